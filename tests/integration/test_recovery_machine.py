"""Any order of faults over a run of fake roles: each step counts once, and nothing is lost.

A machine of Hypothesis makes steps, kills and restarts services, loses cuts, damages checkpoints
and replaces the coordinator. In the end the run is made, with the numbers of an undisturbed one.
"""

from __future__ import annotations

import asyncio
import functools
import os
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.fake_recipes import split_pools
from support.fake_roles import FakeMesh, expected_weight, fake_mesh, fake_recipe, until
from support.fake_runs import Recorder, make_run
from support.run_results import learnt_of

from rolemesh.coordinator.dataflow.journal import COMMIT_OPERATION
from rolemesh.coordinator.run.folders.summary import RunSummary
from rolemesh.coordinator.run.saving.checkpoints import COMMITTED, committed_steps
from rolemesh.coordinator.run.saving.resume import reached
from rolemesh.coordinator.run.services import lost_services
from rolemesh.coordinator.run.training_run import TrainingRun
from rolemesh.coordinator.state.errors import StaleEpochError
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.store import RunState, RunStream
from rolemesh.rpc.errors import UnavailableError

STEPS = 8
ROLES = ("actor", "critic", "reference", "reward")
TRAINED = ("actor", "critic")
CALLS = (
    ("actor", "Generate"),
    ("critic", "ComputeValues"),
    ("reward", "ComputeReward"),
    ("actor", "ComputeAdvantages"),
    ("critic", "Update"),
    ("actor", "Update"),
    ("actor", "SaveCut"),
    ("critic", "SaveCut"),
    ("actor", "SaveCheckpoint"),
    ("critic", "RestoreCut"),
    ("reference", "Attach"),
)
BOUND_S = 60
"""No rule and no end of a run takes so long: what does hangs."""

START_S = 2.0
"""Longest wait for a service that does not answer: the fakes start in milliseconds, and many kills
are not told."""

CALL_S = 0.003
"""A call of a fake takes so long, so that others come between its beginning and its end."""

EXAMPLES = int(os.environ.get("ROLEMESH_TEST_FAULT_EXAMPLES", "20"))

victims = st.sampled_from(ROLES)


def recipe() -> Any:
    return fake_recipe(
        steps=STEPS,
        evaluation={"num_prompts": 4, "every_steps": 3},
        checkpoint={"every_steps": 2},
        # The machine decides when a run has had enough.
        recovery={"attempts": 1000, "pause_s": 0.01},
        pools=split_pools(ROLES),
    )


@functools.cache
def undisturbed() -> list[dict[str, float]]:
    """Records of a run that is left alone, without what depends on the clock."""

    async def make() -> list[dict[str, float]]:
        recorder = Recorder()
        with tempfile.TemporaryDirectory() as folder:
            async with fake_mesh(has_cuts=True) as mesh:
                run = make_run(
                    mesh, Path(folder) / "run", recipe(), MemoryStateStore(), observer=recorder
                )
                await run.execute()
        return [learnt_of(record) for record in recorder.records]

    return asyncio.run(make())


def is_whole(checkpoint: Path) -> bool:
    files = (checkpoint / COMMITTED, *(checkpoint / role / "weight.json" for role in TRAINED))
    return all(file.read_text() != "{" for file in files)


class Coordinator:
    """One coordinator of the run, and what it has told."""

    def __init__(self, run: TrainingRun, recorder: Recorder) -> None:
        self.run = run
        self.recorder = recorder
        self.task = asyncio.ensure_future(run.execute())


class RecoveryMachine(RuleBasedStateMachine):
    """Time passes within a rule only: between two of them everything stands still."""

    def __init__(self) -> None:
        super().__init__()
        self.expected = undisturbed()
        self.loop = asyncio.new_event_loop()
        self.stack = AsyncExitStack()
        self.folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory())) / "run"
        self.stack.enter_context(mock.patch.object(lost_services, "MEET_AGAIN_DEADLINE_S", START_S))
        self.store = MemoryStateStore()
        self.mesh: FakeMesh
        self.coordinators: list[Coordinator] = []
        self.dead: set[str] = set()
        """Services that were killed, until something starts them again."""

    @property
    def newest(self) -> Coordinator:
        return self.coordinators[-1]

    def passes(self, holds: Callable[[], bool]) -> None:
        """Lets time pass until something holds, or the run has ended."""

        async def wait() -> None:
            async with asyncio.timeout(BOUND_S):
                await until(lambda: holds() or self.newest.task.done())

        self.loop.run_until_complete(wait())

    @initialize()
    def begin(self) -> None:
        async def start() -> None:
            mesh = fake_mesh(has_cuts=True, delay=lambda service, method: CALL_S)
            self.mesh = await self.stack.enter_async_context(mesh)
            recorder = Recorder()
            run = make_run(
                self.mesh,
                self.folder,
                recipe(),
                self.store,
                observer=recorder,
                restart=self.restart,
                start_deadline_s=START_S,
            )
            run._loss_grace_s = 0.2
            self.coordinators.append(Coordinator(run, recorder))

        self.loop.run_until_complete(start())

    def tell(self, service: str, reason: str) -> None:
        """Tells the run of a loss, on its loop, as a launcher does."""

        async def told() -> None:
            self.newest.run.service_lost(service, reason)

        self.loop.run_until_complete(told())

    async def restart(self, service: str) -> str:
        """As a launcher does, for whichever coordinator asks: who is late finds a living one."""
        if service in self.dead:
            self.dead.discard(service)
            return await self.mesh.restart(service)
        return self.mesh.roles[service].address

    @rule()
    def make_a_step(self) -> None:
        made = self.newest.run.progress.step
        self.passes(lambda: self.newest.run.progress.step > made)

    @rule(call=st.sampled_from(CALLS))
    def come_to_a_call(self, call: tuple[str, str]) -> None:
        name, made = ".".join(call), self.newest.run.progress.step
        self.passes(
            # The call may not come again before two more steps are made.
            lambda: name in self.mesh.running or self.newest.run.progress.step > made + 1
        )

    @rule(victim=victims, is_told=st.booleans())
    def kill(self, victim: str, is_told: bool) -> None:
        """The launcher may tell of it; the watcher finds out by itself otherwise."""
        if victim in self.dead:
            return
        self.dead.add(victim)
        self.loop.run_until_complete(self.mesh.roles[victim].stop())
        if is_told:
            self.tell(victim, f"{victim} was killed by signal 9")

    @rule(victim=victims)
    def give_up_a_living_service(self, victim: str) -> None:
        """It is told as lost, e.g. since it did not answer, and is replaced."""
        self.dead.add(victim)
        self.tell(victim, f"{victim} does not answer")

    @rule(victim=victims, call=st.sampled_from(["Update", "SaveCut", "ComputeReward", "Generate"]))
    def break_a_connection(self, victim: str, call: str) -> None:
        """Calls fail without a process being lost, until the next attempt begins."""
        role = self.mesh.roles[victim]
        role.failures[call] = UnavailableError("the connection was reset")
        made, told = self.newest.run.progress.step, len(self.newest.recorder.events)
        self.passes(
            lambda: (
                self.newest.run.progress.step > made
                or any("recovering" in text for text in self.newest.recorder.events[told:])
            )
        )
        role.failures.clear()

    @rule(victim=st.sampled_from(TRAINED))
    def lose_cuts(self, victim: str) -> None:
        """The host of a service was restarted."""
        self.mesh.cuts.get(victim, {}).clear()

    @rule(part=st.sampled_from([COMMITTED, *TRAINED]))
    def damage_the_newest_checkpoint(self, part: str) -> None:
        directory = self.folder / "checkpoints"
        folders = [directory / f"step-{step:08}" for step in committed_steps(directory)]
        whole = [folder for folder in folders if is_whole(folder)]
        # With the last one that is whole, the run would end: see test_recovery.
        if len(whole) < 2:
            return
        found = whole[-1] / part
        (found if part == COMMITTED else found / "weight.json").write_text("{")

    @rule()
    def replace_the_coordinator(self) -> None:
        """Another one takes over; the older one still lives, and does not know."""
        if len(self.coordinators) > 3 or self.newest.task.done():
            return

        async def take_over() -> None:
            run_id, recorder = self.newest.run.run_id, Recorder()
            progress, _ = await reached(self.store, run_id, self.folder)
            for service in sorted(self.dead):
                await self.restart(service)
            run = make_run(
                self.mesh,
                self.folder,
                recipe(),
                self.store,
                observer=recorder,
                restart=self.restart,
                start_deadline_s=START_S,
                run_id=run_id,
                resumed=progress,
            )
            run._loss_grace_s = 0.2
            self.coordinators.append(Coordinator(run, recorder))
            # It has not taken the run before it has an epoch of its own.
            await until(lambda: run.progress.epoch > progress.epoch)

        self.loop.run_until_complete(take_over())

    @invariant()
    def nothing_told_is_changed_later(self) -> None:
        """Whatever was told of a step, by whichever coordinator, stays true."""
        for coordinator in self.coordinators:
            for record in coordinator.recorder.records:
                assert learnt_of(record) == self.expected[int(record["step"]) - 1]

    @invariant()
    def the_journal_counts_each_step_once(self) -> None:
        if not self.coordinators:
            return
        entries = self.loop.run_until_complete(self.store.read_journal(self.newest.run.run_id))
        epochs = [entry.epoch for entry in entries]
        assert epochs == sorted(epochs), "an older coordinator wrote after a newer one"
        by_epoch: dict[int, list[tuple[int, int]]] = {}
        for entry in entries:
            if entry.operation == COMMIT_OPERATION:
                version = int(entry.result["actor_version"])
                by_epoch.setdefault(entry.epoch, []).append((entry.step, version))
        for commits in by_epoch.values():
            steps = [step for step, _ in commits]
            assert steps == list(range(steps[0], steps[0] + len(steps)))
            assert [version for _, version in commits] == [2 * step for step in steps]

    def teardown(self) -> None:
        try:
            if self.coordinators:
                self.passes(lambda: False)
                self.check_end()
        finally:
            for coordinator in self.coordinators:
                coordinator.task.cancel()
            everything = asyncio.gather(
                *(coordinator.task for coordinator in self.coordinators), return_exceptions=True
            )
            self.loop.run_until_complete(everything)
            self.loop.run_until_complete(self.stack.aclose())
            self.loop.close()

    def check_end(self) -> None:
        """The run is made; only the newest coordinator has made it to the end."""
        summary: RunSummary = self.newest.task.result()
        assert (summary.state, summary.steps) == (RunState.SUCCEEDED, STEPS)
        assert self.mesh.roles["actor"].weight == expected_weight(STEPS)
        for older in self.coordinators[:-1]:

            async def ended(task: asyncio.Task[RunSummary] = older.task) -> BaseException | None:
                async with asyncio.timeout(BOUND_S):
                    await asyncio.wait({task})
                return task.exception()

            error = self.loop.run_until_complete(ended())
            assert isinstance(error, StaleEpochError), repr(error)
        run_id = self.newest.run.run_id
        # The first is the evaluation before.
        _, *entries = self.loop.run_until_complete(self.store.read_metrics(run_id))
        assert [int(entry.values["step"]) for entry in entries] == list(range(1, STEPS + 1))
        found = [learnt_of(dict(entry.values)) for entry in entries]
        assert found == self.expected
        kept = self.loop.run_until_complete(self.store.read_entries(run_id, RunStream.EXPERTS))
        assert [entry.step for entry in kept] == list(range(1, STEPS + 1))


TestRecoveryMachine = pytest.mark.slow(pytest.mark.timeout(1800)(RecoveryMachine.TestCase))
TestRecoveryMachine.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=12,
    # A run is not the same twice, so that a shorter example would rarely be found.
    phases=(Phase.explicit, Phase.generate),
)
