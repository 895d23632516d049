"""Checkpoints in the background by themselves: what a run that goes back leaves of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from support.fake_runs import Recorder

from rolemesh.coordinator.run.reporting.events import EventLog
from rolemesh.coordinator.run.saving.cut_pace import CutPace
from rolemesh.coordinator.run.saving.durable import DurableCheckpoints
from rolemesh.coordinator.run.saving.progress import RunProgress
from rolemesh.coordinator.state.memory import MemoryStateStore


class HeldCheckpoints:
    """Checkpoints whose writers wait; notes what was written, and what was removed."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.written: list[tuple[int, Mapping[str, Any]]] = []
        self.removed_after: list[int] = []
        self.may_go_on = asyncio.Event()

    def committed(self) -> list[int]:
        return [step for step, _ in self.written]

    async def save(self, step: int, state: Mapping[str, Any], *, from_cut: bool = False) -> Path:
        self.begun.append(step)
        await self.may_go_on.wait()
        self.written.append((step, state))
        return Path(f"step-{step}")

    async def remove_after(self, step: int) -> None:
        self.removed_after.append(step)


class Kept:
    """Cuts of services that keep them."""

    is_on = True

    def __init__(self) -> None:
        self.saved: list[int] = []
        self.waited_s = 0.0

    @property
    def newest(self) -> int | None:
        return self.saved[-1] if self.saved else None

    async def save(self, step: int) -> float:
        self.saved.append(step)
        return self.waited_s

    async def known(self) -> set[int]:
        return set(self.saved[-2:])


@contextlib.contextmanager
def no_phase(name: str, activity: str) -> Iterator[None]:
    yield


class Scene:
    """A run that saves every step, unless it is told otherwise."""

    def __init__(self, every: int = 1, best: int | None = None) -> None:
        self.checkpoints: Any = HeldCheckpoints()
        self.cuts: Any = Kept()
        self.pace = CutPace(None, print)
        self.progress = RunProgress()
        self.durable = DurableCheckpoints(
            self.checkpoints,
            self.cuts,
            self.pace,
            self.progress,
            Recorder(),
            EventLog(MemoryStateStore(), "run"),
            every=every,
            best=lambda: best,
            phase=no_phase,
        )

    async def make(self, step: int) -> None:
        await self.durable.save_cut(step)
        self.progress.commit(step, 8 * step, 2 * step, {"step": float(step)})
        self.progress.recorded({"step": float(step)})
        await self.durable.save_due()
        await asyncio.sleep(0)


async def test_what_is_written_says_its_own_step_though_the_run_has_gone_on() -> None:
    scene = Scene()
    for step in (1, 2):
        await scene.make(step)
    third = asyncio.create_task(scene.make(3))
    await asyncio.sleep(0.01)
    assert scene.checkpoints.begun == [1]
    assert scene.cuts.saved == [1, 2]
    scene.checkpoints.may_go_on.set()
    await third
    await scene.durable.save_now()
    assert scene.checkpoints.begun == [1, 2, 3, 3]
    for step, state in scene.checkpoints.written:
        assert (state["step"], state["next_prompt"]) == (step, 8 * step)
        assert state["actor_versions"] == [0, *(2 * made for made in range(1, step + 1))]
        assert len(state["next_prompts"]) == step + 1


async def test_a_run_that_goes_back_gives_up_what_is_written_before_it_removes() -> None:
    scene = Scene()
    for step in (1, 2):
        await scene.make(step)
    await scene.durable.remove_after(0)
    scene.checkpoints.may_go_on.set()
    await asyncio.sleep(0.01)
    assert scene.checkpoints.begun == [1]
    assert scene.checkpoints.written == []
    assert scene.checkpoints.removed_after == [0]
    # Nothing is waited for any more.
    await scene.make(3)
    assert scene.cuts.saved == [1, 2, 3]


async def test_the_best_step_is_due_whatever_its_turn() -> None:
    scene = Scene(every=0, best=2)
    scene.checkpoints.may_go_on.set()
    for step in (1, 2, 3):
        await scene.make(step)
    assert scene.checkpoints.begun == [2]


async def test_the_checkpoint_of_the_best_step_is_owed_by_the_next_attempt() -> None:
    scene = Scene(every=0, best=2)
    for step in (1, 2):
        await scene.make(step)
    await scene.durable.give_up()
    scene.checkpoints.may_go_on.set()
    await scene.durable.save_owed()
    await asyncio.sleep(0)
    assert scene.checkpoints.begun == [2, 2]
    assert scene.checkpoints.committed() == [2]


async def test_steps_between_cuts_have_none_but_those_whose_checkpoint_is_due() -> None:
    scene = Scene(every=4)
    scene.checkpoints.may_go_on.set()
    scene.pace.every = 3
    for step in range(1, 10):
        await scene.make(step)
    assert scene.cuts.saved == [1, 4, 7, 8]
    assert scene.checkpoints.begun == [4, 8]


async def test_a_checkpoint_that_becomes_due_after_its_step_needs_no_cut() -> None:
    scene = Scene(every=0)
    scene.checkpoints.may_go_on.set()
    scene.pace.every = 9
    for step in (1, 2):
        await scene.make(step)
    # Its evaluation has made it the best one.
    scene.durable._best = lambda: 2
    await scene.durable.save_due()
    assert scene.cuts.saved == [1]
    assert scene.checkpoints.committed() == [2]


async def test_a_cut_waits_for_the_checkpoint_whose_cut_it_replaces_whatever_their_steps() -> None:
    scene = Scene(every=2)
    scene.pace.every = 9
    for step in range(1, 6):
        await scene.make(step)
    # Step 1, then the due ones.
    assert scene.cuts.saved == [1, 2, 4]
    assert scene.checkpoints.begun == [2]
    sixth = asyncio.create_task(scene.make(6))
    await asyncio.sleep(0.01)
    assert scene.cuts.saved == [1, 2, 4]
    scene.checkpoints.may_go_on.set()
    await sixth
    assert scene.cuts.saved == [1, 2, 4, 6]


async def test_what_a_cut_costs_is_its_call_and_the_wait_for_the_one_before() -> None:
    scene = Scene()
    scene.cuts.waited_s = 5.0
    took = await scene.durable.save_cut(1)
    assert took is not None
    assert 5.0 <= took < 6.0
    scene.pace.every, scene.checkpoints.committed = 9, lambda: []
    scene.durable._every = 0
    assert await scene.durable.save_cut(2) is None
