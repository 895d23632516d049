"""A clock without what other programs of a busy machine cost a run: Linux's scheduler tells."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil

WATCHED_EVERY_S = 0.01
LONGEST_WAIT_S = 0.1
"""Waiting that is told later than this after it began is of threads that waited beside others."""
WORKED_S = 0.01
"""Seconds on a core after which a thread is looked at."""

Sample = tuple[float, dict[str, tuple[float, float]]]
"""Unix time, and for each process the seconds that its threads ran, and those of waiting for a core
that ended, since the sample before."""


class Waits:
    """Watches how long processes that this one has started wait for a core, by Linux's scheduler.

    Owner: its own thread, until the end of the block.
    """

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Waits:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        this = psutil.Process()
        threads: dict[Path, tuple[str, float, float]] = {}
        number = 0
        while not self._ended.wait(WATCHED_EVERY_S):
            if number % 50 == 0:
                threads = {**self._threads(this), **threads}
            number += 1
            found: dict[str, tuple[float, float]] = {}
            for file, (pid, ran_before, waited_before) in threads.items():
                ran, waited = _scheduled(file)
                if ran <= ran_before:
                    continue
                threads[file] = pid, ran, waited
                before = found.get(pid, (0.0, 0.0))
                found[pid] = before[0] + ran - ran_before, before[1] + waited - waited_before
            self.samples.append((time.time(), found))

    def _threads(self, this: psutil.Process) -> dict[Path, tuple[str, float, float]]:
        """Threads that have worked, with their process, and seconds that they ran and waited."""
        found = {}
        for pid in (one.pid for one in this.children(recursive=True)):
            for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
                ran, waited = _scheduled(file)
                # Most threads of a service never do anything.
                if ran > WORKED_S:
                    found[file] = str(pid), ran, waited
        return found


def _scheduled(file: Path) -> tuple[float, float]:
    """Seconds that a thread ran, and waited for a core; zeros once it has ended."""
    try:
        ran, waited, _ = file.read_text().split()
        return int(ran) / 1e9, int(waited) / 1e9
    except (OSError, ValueError):
        return 0.0, 0.0


class Undisturbed:
    """A clock that stands still while a run waits for a core that others have.

    That is the time in which some process of the run waits, less what the busiest one runs.
    """

    def __init__(self, samples: Sequence[Sample]) -> None:
        """Takes those of `Waits`."""
        self._times = np.array([time for time, _ in samples])
        lengths = np.diff(self._times, prepend=self._times[0])
        most, waits = np.zeros(len(samples)), np.zeros(len(samples))
        for pid in {pid for _, found in samples for pid in found}:
            ran = np.array([found.get(pid, (0.0, 0.0))[0] for _, found in samples])
            ended = np.array([found.get(pid, (0.0, 0.0))[1] for _, found in samples])
            left = 0.0
            # Waiting is told when it ends, and may have begun several intervals before.
            for index in range(len(samples) - 1, 0, -1):
                left += ended[index]
                waited = min(left, max(0.0, lengths[index] - ran[index]))
                left = min(left - waited, LONGEST_WAIT_S)
                waits[index] = max(waits[index], waited)
            most = np.maximum(most, ran)
        self._still = np.cumsum(np.clip(np.minimum(lengths - most, waits), 0.0, None))

    def __call__(self, unix_s: float) -> float:
        """Seconds on this clock."""
        return unix_s - float(np.interp(unix_s, self._times, self._still))
