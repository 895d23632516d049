"""What `rolemesh calibrate` measures: that all of it is there, and all of its work is timed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rolemesh.coordinator.mapping.calibration.primitives import Primitive
from rolemesh.engine.fit import primitives


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A clock that shows operations in place of seconds: they are the same on each machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(primitives, "_WIDTHS", {"cpu": (64, 256)})
    monkeypatch.setattr(primitives, "_ROWS", {"cpu": ((1, 16, 2), (16, 48, 16))})
    with FlopCounterMode(display=False) as counter:
        monkeypatch.setattr(time, "thread_time", counter.get_total_flops)
        yield
    torch.set_num_threads(threads)


def taken(some: Any) -> list[Primitive]:
    return [Primitive(**one) for one in some]


@pytest.mark.usefixtures("counted")
def test_products_are_timed_alone() -> None:
    small, large = taken(primitives._products(torch.device("cpu")))
    assert small.seconds == 2 * 2048 * 64 * 128
    assert large.seconds == 16 * small.seconds


@pytest.mark.usefixtures("counted")
def test_a_model_is_scored_updated_and_sampled_with_all_rows() -> None:
    found = taken(primitives._model(torch.device("cpu"), 64, 1))
    assert [one.kind for one in found] == ["score", "update", "decode"] * 2
    few, many = found[:3], found[3:]
    # 57 times the tokens, and longer rows, whose attention costs more.
    assert many[0].seconds > 57 * few[0].seconds
    # A backward pass takes two products for each one of the forward pass.
    assert many[1].seconds >= 3 * many[0].seconds
    # 16 times the rows: each prompt 3 times as long, and 8 times the steps of decoding.
    assert many[2].seconds > 16 * 3 * few[2].seconds
    assert found[0].config is not None
    assert found[0].config["num_hidden_layers"] == 1


def test_copies_are_counted_by_the_bytes_that_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(primitives, "_TRY_S", 0.05)
    cpu = torch.device("cpu")
    within = Primitive(**primitives._copied("memory", 1 << 20, cpu, cpu))
    across = Primitive(**primitives._copied("host", 1 << 20, cpu, cpu))
    assert (within.sizes["bytes"], across.sizes["bytes"]) == (2 << 20, 1 << 20)


@pytest.mark.slow
def test_a_process_measures_a_machine_in_a_minute() -> None:
    command = [sys.executable, "-m", "rolemesh.services.preview.primitives", "cpu", "1"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    *lines, last = map(json.loads, printed.splitlines())
    kinds = {one["kind"] for one in lines}
    assert kinds == {"matmul", "memory", "host", "reduce", "score", "update", "decode"}
    assert last["type"] == "machine"
    assert last["threads"] == 1
    # More bytes take longer to sum over ranks.
    reduces = [one["seconds"] for one in lines if one["kind"] == "reduce"]
    assert reduces[-1] > reduces[0]
