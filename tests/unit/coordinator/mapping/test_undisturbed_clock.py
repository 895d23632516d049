"""The clock by which predicted steps are compared on a busy machine."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from support.undisturbed import Undisturbed, Waits


def test_the_clock_stands_still_while_the_busiest_process_waits() -> None:
    samples = [
        (10.00, {}),
        # a runs for half of the interval, and waits for the other half.
        (10.10, {"a": (0.05, 0.05)}),
        # a runs, and b that waits beside it holds nothing up.
        (10.20, {"a": (0.1, 0.0), "b": (0.01, 0.09)}),
        # It is told of waiting that began two intervals before.
        (10.25, {}),
        (10.30, {"a": (0.0, 0.08)}),
    ]
    clock = Undisturbed(samples)
    assert clock(10.10) - clock(10.00) == pytest.approx(0.05)
    assert clock(10.20) - clock(10.10) == pytest.approx(0.1)
    assert clock(10.30) - clock(10.20) == pytest.approx(0.02)
    assert clock(11.30) - clock(10.30) == pytest.approx(1.0)


def test_a_process_that_sleeps_waits_for_no_core() -> None:
    with Waits() as waits:
        begun = time.time()
        subprocess.run([sys.executable, "-c", "import time; time.sleep(1)"], check=True)
        ended = time.time()
    clock = Undisturbed(waits.samples)
    # It may wait for a core while it starts and ends, and not for the second in between.
    waited = sum(wait for _, rows in waits.samples for _, wait in rows.values())
    # Unix times have a resolution of a quarter of a microsecond.
    assert ended - begun - waited - 1e-6 <= clock(ended) - clock(begun) <= ended - begun
