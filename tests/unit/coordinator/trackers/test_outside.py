"""Trackers of users' own, each in a real process of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from rolemesh.coordinator.recipe.sections.trackers import CustomTrackerSpec
from rolemesh.coordinator.trackers.outside import (
    QUEUE_STEPS,
    OutsideTracker,
    outside_trackers,
)
from rolemesh.coordinator.trackers.tracker import RunFacts
from rolemesh.engine.specs.urls import without_passwords

LONG_S = 60.0
"""Nothing of a test may take that long: a hang."""

KEEPER = '''
import json, os, pathlib, subprocess, time

class Keeper:
    """Writes down what it is told; misbehaves as its options ask."""

    def __init__(self, fails_at=(), dies_at=None, sleeps_at_finish=0.0, waits_for=None):
        self.fails_at, self.dies_at, self.waits_for = fails_at, dies_at, waits_for
        self.sleeps_at_finish = sleeps_at_finish

    def start(self, run, config):
        print("hello from the package")
        while self.waits_for and not pathlib.Path(self.waits_for).exists():
            time.sleep(0.01)
        self.file = open(os.path.join(run.directory, "kept.jsonl"), "w")
        self.write({"run": run.run_id, "config": config})

    def write(self, record):
        self.file.write(json.dumps(record) + "\\n")
        self.file.flush()

    def log(self, step, scalars):
        if step == self.dies_at:
            os._exit(9)
        if step in self.fails_at:
            raise RuntimeError("no room for step " + str(step))
        self.write({"step": step, **scalars})

    def finish(self, state):
        time.sleep(self.sleeps_at_finish)
        self.write({"state": state})

class Broken:
    def start(self, run, config):
        raise ConnectionError("nobody is there: http://me:secret@host/api")
    log = finish = start

class Starter:
    """Starts a process, as some packages do, and hangs."""

    def start(self, run, config):
        self.started = subprocess.Popen(["sleep", "600"])
        with open(os.path.join(run.directory, "started"), "w") as file:
            file.write(str(self.started.pid))

    def log(self, step, scalars):
        time.sleep(600)

    def finish(self, state):
        pass
'''


class Tracked:
    """One tracker, what it kept, and the events that it caused."""

    def __init__(self, folder: Path, name: str = "Keeper", **options: Any) -> None:
        code = folder / "keeper.py"
        code.write_text(KEEPER)
        self.events: list[str] = []
        self.log = folder / "logs" / "tracker-custom.log"
        self._folder = folder
        spec = CustomTrackerSpec(tracker=f"{code}:{name}", options=options)
        self.tracker = OutsideTracker(spec, "custom", self.log, self.events.append)

    async def start(self, **config: Any) -> None:
        facts = RunFacts(run_id="run-1", name="run", directory=str(self._folder))
        await self.tracker.start(facts, config)

    @property
    def kept(self) -> list[dict[str, Any]]:
        path = self._folder / "kept.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]


async def test_a_tracker_is_told_everything_in_order(tmp_path: Path) -> None:
    tracked = Tracked(tmp_path)
    await tracked.start(algorithm={"type": "ppo"})
    for step in range(3):
        tracked.tracker.log(step, {"reward/mean": step / 4})
    await tracked.tracker.finish("succeeded", LONG_S)
    assert tracked.kept == [
        {"run": "run-1", "config": {"algorithm": {"type": "ppo"}}},
        *({"step": step, "reward/mean": step / 4} for step in range(3)),
        {"state": "succeeded"},
    ]
    assert tracked.events == []
    assert "hello from the package" in tracked.log.read_text()


async def test_a_failing_tracker_is_noted_once_and_its_lost_steps_are_counted(
    tmp_path: Path,
) -> None:
    tracked = Tracked(tmp_path, fails_at=[1, 2])
    await tracked.start()
    for step in range(4):
        tracked.tracker.log(step, {})
    await tracked.tracker.finish("stopped", LONG_S)
    assert [record.get("step") for record in tracked.kept[1:-1]] == [0, 3]
    first, last = tracked.events
    assert "tracker custom failed, and the run goes on: RuntimeError: no room for step 1" in first
    assert last == "tracker custom lost 2 of 4 steps"


async def test_a_tracker_that_cannot_start_loses_all_steps(tmp_path: Path) -> None:
    tracked = Tracked(tmp_path, "Broken")
    await tracked.start()
    tracked.tracker.log(1, {})
    await tracked.tracker.finish("succeeded", LONG_S)
    assert "ConnectionError: nobody is there: http://***@host/api;" in tracked.events[0]
    assert tracked.events[1:] == ["tracker custom lost 1 of 1 steps"]


async def test_a_tracker_that_dies_is_noted(tmp_path: Path) -> None:
    tracked = Tracked(tmp_path, dies_at=2)
    await tracked.start()
    for step in range(5):
        tracked.tracker.log(step, {})
    await tracked.tracker.finish("succeeded", LONG_S)
    assert "its process ended with exit code 9" in tracked.events[0]
    assert tracked.events[1:] == ["tracker custom lost 3 of 5 steps"]


async def test_a_tracker_that_died_long_before_the_end_does_not_hold_it_up(tmp_path: Path) -> None:
    tracked = Tracked(tmp_path, "Broken")
    await tracked.start()
    assert tracked.tracker._process is not None
    await tracked.tracker._process.wait()
    for step in range(QUEUE_STEPS + 2):
        tracked.tracker.log(step, {})
        await asyncio.sleep(0)
    async with asyncio.timeout(LONG_S / 2):
        await tracked.tracker.finish("succeeded", LONG_S)
    assert "nobody is there" in tracked.events[0]


async def until(is_so: Callable[[], bool]) -> None:
    while True:
        if is_so():
            return
        await asyncio.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_what_a_hanging_tracker_has_started_ends_with_it(tmp_path: Path) -> None:
    tracked = Tracked(tmp_path, "Starter")
    await tracked.start()
    tracked.tracker.log(1, {})
    note = tmp_path / "started"
    async with asyncio.timeout(LONG_S):
        await until(lambda: note.exists() and note.read_text() != "")
        await tracked.tracker.finish("succeeded", 0.2)
        await until(lambda: not is_running(int(note.read_text())))


async def test_steps_beyond_the_queue_of_a_slow_tracker_are_dropped_without_waiting(
    tmp_path: Path,
) -> None:
    gate, surplus = tmp_path / "gate", 7
    tracked = Tracked(tmp_path, waits_for=str(gate))
    await tracked.start()
    for step in range(QUEUE_STEPS + surplus):
        # No turn of the loop in between: were a call to wait, it would wait forever.
        tracked.tracker.log(step, {"x": 1.0})
    gate.touch()
    await tracked.tracker.finish("succeeded", LONG_S)
    # The line that starts the tracker is in the queue too.
    assert tracked.events == [f"tracker custom lost {surplus + 1} of {QUEUE_STEPS + surplus} steps"]
    steps = [record["step"] for record in tracked.kept[1:-1]]
    assert steps == list(range(QUEUE_STEPS - 1))


async def test_a_tracker_that_never_finishes_is_ended_at_its_deadline(tmp_path: Path) -> None:
    tracked = Tracked(tmp_path, sleeps_at_finish=LONG_S)
    await tracked.start()
    async with asyncio.timeout(LONG_S / 2):
        await tracked.tracker.finish("succeeded", 0.2)
    assert "it had not finished 0.2 s after the run's end" in tracked.events[0]
    process = tracked.tracker._process
    assert process is not None
    assert process.returncode is not None


def test_trackers_of_one_type_have_logs_of_their_own(tmp_path: Path) -> None:
    spec = CustomTrackerSpec(tracker="a.py:A")
    names = [made._log.name for made in outside_trackers((spec, spec), tmp_path, print)]
    assert names == ["tracker-custom-0.log", "tracker-custom-1.log"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ({"url": "redis://me:secret@host/0"}, {"url": "redis://***@host/0"}),
        (["http://h/get?token=x", 3, None], ["http://h/get?***", 3, None]),
        ("a // b? c", "a // b? c"),
    ],
)
def test_what_leaves_the_run_has_no_passwords(value: object, shown: object) -> None:
    assert without_passwords(value) == shown
