"""Runs of fake roles that are killed in every phase of a step, and end with the same numbers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from support.fake_recipes import split_pools
from support.fake_roles import expected_weight, fake_mesh, fake_recipe, until
from support.fake_runs import Recorder, kill_during, make_run, read_lines
from support.recovering_runs import (
    RECOVERY,
    ROLES,
    STEPS,
    learnt,
    recipe,
    recovering_run,
    undisturbed,
)

from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.coordinator.dataflow.errors import RunAbortedError, RunError
from rolemesh.coordinator.dataflow.journal import COMMIT_OPERATION
from rolemesh.coordinator.run.reporting.records import enter_again
from rolemesh.coordinator.run.saving.checkpoints import committed_steps
from rolemesh.coordinator.run.saving.resume import reached
from rolemesh.coordinator.run.services.launch import LaunchError
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.store import JournalEntry, RunState, RunStream
from rolemesh.rpc.errors import InternalError
from rolemesh.v1 import coordinator_pb2

PHASES = (
    ("actor", "Generate"),
    ("critic", "ComputeValues"),
    ("reference", "ComputeLogprobs"),
    ("reward", "ComputeReward"),
    ("actor", "ComputeAdvantages"),
    ("critic", "Update"),
    ("actor", "Update"),
    ("actor", "SaveCut"),
    ("critic", "SaveCut"),
)


async def steps_with_loads(store: MemoryStateStore, run_id: str) -> list[int | None]:
    return [entry.step for entry in await store.read_entries(run_id, RunStream.EXPERTS)]


# In each phase the service that answers is killed, and one other.
@pytest.mark.parametrize(
    ("service", "method", "victim"),
    [
        pytest.param(
            service, method, victim,
            marks=() if victim in (service, other) else pytest.mark.slow,
        )
        for number, (service, method) in enumerate(PHASES)
        for other in [ROLES[(ROLES.index(service) + 1 + number % 3) % 4]]
        for victim in ROLES
    ],
)  # fmt: skip
async def test_a_kill_in_any_phase_changes_nothing_that_is_learnt(
    service: str, method: str, victim: str, tmp_path: Path
) -> None:
    expected = await undisturbed(tmp_path / "undisturbed")
    store, recorder = MemoryStateStore(), Recorder()
    async with fake_mesh(has_cuts=True) as mesh:
        run = recovering_run(mesh, tmp_path / "killed", store, observer=recorder)
        summary = await kill_during(run, mesh, service, method, victim, 2)
        assert mesh.restarted == [victim]
        assert mesh.roles["actor"].weight == expected_weight(STEPS)
        assert mesh.cuts["actor"] == {}
        initialized = [call.service for call in mesh.calls if call.method == "Initialize"]
        assert sorted(initialized) == sorted((*ROLES, victim))
    assert learnt(tmp_path / "killed") == expected
    assert summary.state is RunState.SUCCEEDED
    (recovered,) = summary.recoveries
    assert recovered.restarted == (victim,)
    assert recovered.lost_steps == 0
    # The watcher may have found out before the launcher told of it.
    assert victim in recovered.cause
    assert [record["step"] for record in recorder.records] == [1, 2, 3]
    record = await store.get_run(run.run_id)
    assert (record.state, record.step) == (RunState.SUCCEEDED, STEPS)
    assert [int(entry.values["step"]) for entry in await store.read_metrics(run.run_id)] == [
        0, 1, 2, 3,
    ]  # fmt: skip
    assert await steps_with_loads(store, run.run_id) == [1, 2, 3]


async def test_an_epoch_that_a_stranger_made_up_costs_a_recovery_and_not_the_run(
    tmp_path: Path,
) -> None:
    expected = await undisturbed(tmp_path / "undisturbed")
    store = MemoryStateStore()
    async with fake_mesh(has_cuts=True) as mesh:
        run = recovering_run(mesh, tmp_path / "fenced", store)
        gate = mesh.roles["critic"].gates["ComputeValues 2"] = asyncio.Event()
        task = asyncio.create_task(run.execute())
        await until(
            lambda: any((one.method, one.step) == ("ComputeValues", 2) for one in mesh.calls)
        )
        mesh.roles["critic"].highest_epoch = 60_000
        gate.set()
        summary = await task
        assert mesh.restarted == []
        assert mesh.roles["actor"].highest_epoch > 60_000
    assert (summary.state, len(summary.recoveries)) == (RunState.SUCCEEDED, 1)
    assert learnt(tmp_path / "fenced") == expected


async def test_services_that_die_while_others_are_started_again_are_started_too(
    tmp_path: Path,
) -> None:
    expected = await undisturbed(tmp_path / "undisturbed")
    async with fake_mesh(has_cuts=True) as mesh:
        asked: list[str] = []

        async def restart(service: str) -> str:
            asked.append(service)
            if asked == ["actor"]:
                # It is killed once more before it has announced itself.
                raise LaunchError("while starting: actor was killed by signal 9")
            if service == "actor" and "critic" not in asked:
                await mesh.roles["critic"].stop()
                run.service_lost("critic", "critic was killed by signal 9")
            return await mesh.restart(service)

        run = make_run(mesh, tmp_path / "killed", recipe(), MemoryStateStore(), restart=restart)
        run._loss_grace_s = 0.2
        summary = await kill_during(run, mesh, "actor", "Update", "actor", 2)
        assert asked == ["actor", "actor", "critic"]
        assert mesh.roles["actor"].weight == expected_weight(STEPS)
    assert learnt(tmp_path / "killed") == expected
    assert [one.restarted for one in summary.recoveries] == [("actor", "critic")]


async def test_a_run_that_is_told_to_end_with_its_mesh_ends_at_once_and_goes_on_later(
    tmp_path: Path,
) -> None:
    store, folder = MemoryStateStore(), tmp_path / "run"
    expected = await undisturbed(tmp_path / "undisturbed")
    async with fake_mesh(has_cuts=True) as mesh:
        run = recovering_run(mesh, folder, store)
        task = asyncio.create_task(run.execute())
        await until(lambda: len(mesh.of("critic.SaveCut")) == 2)
        gate = mesh.roles["actor"].gates["Update"] = asyncio.Event()
        await until(lambda: "actor.Update" in mesh.running)
        run.request_stop()
        await mesh.roles["actor"].stop()
        run.service_lost("actor", "actor was ended by signal 15")
        with pytest.raises(RunAbortedError, match=r"actor.*; `rolemesh train --resume .* goes on"):
            await task
        assert mesh.restarted == []
        assert (await store.get_run(run.run_id)).state is RunState.STOPPED
        gate.set()
        await mesh.restart("actor")
        progress, _ = await reached(store, run.run_id, folder)
        # The wish to stop was of the process that has ended.
        await enter_again(store, recipe(), run.run_id, folder)
        again = make_run(mesh, folder, recipe(), store, run_id=run.run_id, resumed=progress)
        await again.execute()
        assert mesh.roles["actor"].weight == expected_weight(STEPS)
    assert learnt(folder) == expected


async def test_a_failed_run_saves_its_newest_step_and_can_be_resumed(tmp_path: Path) -> None:
    expected = await undisturbed(tmp_path / "undisturbed")
    store, folder = MemoryStateStore(), tmp_path / "failed"
    async with fake_mesh(has_cuts=True) as mesh:
        run = make_run(mesh, folder, recipe(recovery={"attempts": 0}), store)
        task = asyncio.create_task(run.execute())
        await until(lambda: any(call.step == 2 for call in mesh.calls))
        mesh.roles["reward"].failures["ComputeReward"] = InternalError("the judge is gone")
        with pytest.raises(RunError, match="the judge is gone"):
            await task
        made = json.loads((folder / "summary.json").read_text())["steps"]
        marker = json.loads((folder / f"checkpoints/step-{made:08}/COMMITTED").read_text())
        assert marker["step"] == made
        mesh.roles["reward"].failures.clear()
        mesh.roles["actor"].weight = 99.0
        progress, where = await reached(store, run.run_id, folder)
        assert progress.step == made
        assert "journal" in where
        resumed = make_run(mesh, folder, recipe(), store, run_id=run.run_id, resumed=progress)
        summary = await resumed.execute()
        assert mesh.roles["actor"].weight == expected_weight(STEPS)
    assert summary.state is RunState.SUCCEEDED
    assert learnt(folder) == expected


async def test_cuts_that_are_lost_cost_the_steps_since_the_checkpoint(tmp_path: Path) -> None:
    expected = await undisturbed(tmp_path / "undisturbed")
    store = MemoryStateStore()
    async with fake_mesh(has_cuts=True) as mesh:
        settings = recipe(checkpoint={"every_steps": 1})
        run = make_run(mesh, tmp_path / "killed", settings, store, restart=mesh.restart)
        run._loss_grace_s = 0.2
        gate = mesh.roles["actor"].gates["SaveCheckpoint 2"] = asyncio.Event()
        task = asyncio.create_task(run.execute())
        # The run makes its last step meanwhile, and waits.
        await until(lambda: any(call.step == 2 for call in mesh.of("actor.SaveCheckpoint")))
        await until(lambda: run.progress.step == STEPS and run.progress.unrecorded is None)
        # The host of the critic is gone, with all that was in its memory.
        mesh.cuts["critic"].clear()
        await mesh.roles["critic"].stop()
        run.service_lost("critic", "critic was killed by signal 9")
        gate.set()
        mesh.roles["actor"].gates.clear()
        summary = await task
        assert mesh.roles["actor"].weight == expected_weight(STEPS)
    assert learnt(tmp_path / "killed") == expected
    assert [one.lost_steps for one in summary.recoveries] == [2]
    assert (await store.get_run(run.run_id)).recoveries == 1
    events = [event async for event in StoreOperations(store).watch_run(run.run_id)]
    kinds = [event.WhichOneof("event") for event in events]
    (recovered,) = (event.recovered for event in events if event.HasField("recovered"))
    assert (recovered.step, recovered.lost_steps) == (1, 2)
    assert list(recovered.restarted) == ["critic"]
    assert "critic was killed by signal 9" in recovered.cause
    recovering = [
        event.state.failure
        for event in events
        if event.state.state == coordinator_pb2.RUN_STATE_RECOVERING
    ]
    assert recovering == [f"{recovered.cause}; critic is started again"]
    # Its own event tells of it, so there is no note of the same.
    assert not any("recover" in event.note.text for event in events)
    # Steps 2 and 3 were told of before and after the run went back: a watch keeps them once.
    at = kinds.index("recovered")
    before, after = (
        [event.step for event in part if event.HasField("step_made")]
        for part in (events[:at], events[at:])
    )
    assert (before, after) == ([1, 2, 3], [2, 3])
    kept = [step for step in before if step <= recovered.step]
    assert [*kept, *after] == [1, 2, 3]
    steps = [int(entry.values["step"]) for entry in await store.read_metrics(run.run_id)]
    assert steps == [0, 1, 2, 3]
    assert await steps_with_loads(store, run.run_id) == [1, 2, 3]


async def test_a_kill_between_a_step_and_its_checkpoint_costs_no_checkpoint(tmp_path: Path) -> None:
    store = MemoryStateStore()
    async with fake_mesh(has_cuts=True) as mesh:
        settings = recipe(checkpoint={"every_steps": 1, "keep": STEPS})
        run = make_run(mesh, tmp_path, settings, store, restart=mesh.restart)
        run._loss_grace_s = 0.2
        summary = await kill_during(run, mesh, "critic", "SaveCheckpoint", "critic", 2)
    assert [one.lost_steps for one in summary.recoveries] == [0]
    assert committed_steps(tmp_path / "checkpoints") == [1, 2, 3]


class SlowStore(MemoryStateStore):
    """Says that it appends metrics of the second step, and waits."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked, self.may_go_on = asyncio.Event(), asyncio.Event()

    async def append_metrics(self, run_id: str, values: Any, epoch: int | None = None) -> str:
        if values["step"] == 2:
            self.is_asked.set()
            await self.may_go_on.wait()
        return await super().append_metrics(run_id, values, epoch)


async def test_a_step_that_is_being_told_of_when_a_service_is_lost_is_told_of_once(
    tmp_path: Path,
) -> None:
    store, recorder = SlowStore(), Recorder()
    async with fake_mesh(has_cuts=True) as mesh:
        run = recovering_run(mesh, tmp_path, store, observer=recorder)
        task = asyncio.create_task(run.execute())
        await store.is_asked.wait()
        await mesh.roles["critic"].stop()
        run.service_lost("critic", "critic was killed by signal 9")
        await asyncio.sleep(0.01)
        store.may_go_on.set()
        await task
    told = [
        recorder.records,
        read_lines(tmp_path / "metrics.jsonl"),
        # The first is the evaluation before.
        [entry.values for entry in await store.read_metrics(run.run_id)][1:],
    ]
    assert [[record["step"] for record in records] for records in told] == [[1, 2, 3]] * 3
    assert await steps_with_loads(store, run.run_id) == [1, 2, 3]


class StuckStore(MemoryStateStore):
    """Says that it is to commit the second step, and does not the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked = asyncio.Event()

    async def append_journal(self, run_id: str, entry: JournalEntry) -> str:
        if (entry.operation, entry.step) == (COMMIT_OPERATION, 2) and not self.is_asked.is_set():
            self.is_asked.set()
            await asyncio.Event().wait()
        return await super().append_journal(run_id, entry)


async def test_loads_of_a_step_that_was_not_committed_stand_once(tmp_path: Path) -> None:
    expected = await undisturbed(tmp_path / "undisturbed")
    store = StuckStore()
    async with fake_mesh(has_cuts=True) as mesh:
        run = recovering_run(mesh, tmp_path / "killed", store)
        task = asyncio.create_task(run.execute())
        await store.is_asked.wait()
        # The line of the second step is written by now, and its commit never comes.
        lines = read_lines(tmp_path / "killed" / "experts.jsonl")
        assert [line["step"] for line in lines] == [1, 2]
        assert await steps_with_loads(store, run.run_id) == [1]
        await mesh.roles["critic"].stop()
        run.service_lost("critic", "critic was killed by signal 9")
        summary = await task
    assert len(summary.recoveries) == 1
    assert learnt(tmp_path / "killed") == expected
    assert all(record["expert_loads"] for record in expected)
    assert await steps_with_loads(store, run.run_id) == [1, 2, 3]


async def test_a_run_without_a_mixture_has_no_loads(tmp_path: Path) -> None:
    store = MemoryStateStore()
    async with fake_mesh(has_cuts=True, loads=lambda role, version: []) as mesh:
        run = make_run(mesh, tmp_path, recipe(), store)
        await run.execute()
    assert not (tmp_path / "experts.jsonl").exists()
    assert await steps_with_loads(store, run.run_id) == []


AHEAD_ROLES = (*ROLES, "rollout")
AHEAD_PHASES = (
    ("rollout-0", "Generate"),
    ("rollout-1", "UpdateWeights"),
    ("actor", "PublishWeights"),
    ("actor", "Update"),
    ("critic", "Update"),
)

_UNDISTURBED: dict[str, tuple[float, list[dict[str, float]]]] = {}
"""Weight and records of runs that are the same each time, by their sampler."""


def ahead_recipe(sampler: str) -> Any:
    return fake_recipe(
        roles=AHEAD_ROLES,
        pools=split_pools(AHEAD_ROLES),
        services={"rollout": {"replicas": 2}},
        sampler={"type": sampler},
        steps=5,
        evaluation={"num_prompts": 4, "every_steps": 2},
        recovery=RECOVERY,
    )


# All pairs of a phase, a sampler and a victim; each third thing goes with one of the two others.
@pytest.mark.parametrize(
    ("service", "method", "sampler", "victim"),
    [
        pytest.param(*phase, sampler, victim, marks=marks)
        for number, phase in enumerate(AHEAD_PHASES)
        for ahead, sampler in enumerate(("sync", "one_step_ahead"))
        for place, victim in enumerate(("actor", "rollout-1"))
        for marks in [() if (number + ahead + place) % 2 else pytest.mark.slow]
    ],
)
async def test_a_kill_with_rollout_services_changes_nothing_that_is_learnt(
    sampler: str, service: str, method: str, victim: str, tmp_path: Path
) -> None:
    if sampler not in _UNDISTURBED:
        folder = tmp_path / "undisturbed"
        async with fake_mesh(AHEAD_ROLES, replicas=2, has_cuts=True) as mesh:
            await make_run(mesh, folder, ahead_recipe(sampler), MemoryStateStore()).execute()
            _UNDISTURBED[sampler] = (mesh.roles["actor"].weight, learnt(folder))
    weight, records = _UNDISTURBED[sampler]
    async with fake_mesh(AHEAD_ROLES, replicas=2, has_cuts=True) as mesh:
        settings = ahead_recipe(sampler)
        run = make_run(
            mesh, tmp_path / "killed", settings, MemoryStateStore(), restart=mesh.restart
        )
        run._loss_grace_s = 0.2
        summary = await kill_during(run, mesh, service, method, victim, 4)
        assert mesh.restarted == [victim]
        assert mesh.roles["actor"].weight == weight
    assert learnt(tmp_path / "killed") == records
    assert [one.lost_steps for one in summary.recoveries] == [0]
