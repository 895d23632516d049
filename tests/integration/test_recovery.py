"""Runs of fake roles that are killed in every phase of a step, and end with the same numbers."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.fake_recipes import split_pools
from support.fake_roles import FakeMesh, expected_weight, fake_mesh, fake_recipe, until
from support.fake_runs import Recorder, kill_during, make_run, read_lines

from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.coordinator.dataflow.errors import RunAbortedError, RunError, ServiceLostError
from rolemesh.coordinator.run.reporting.records import enter_again
from rolemesh.coordinator.run.saving.checkpoints import NoWholeCheckpointError, committed_steps
from rolemesh.coordinator.run.saving.cut_pace import CutPace
from rolemesh.coordinator.run.saving.resume import reached
from rolemesh.coordinator.run.services.launch import LaunchError
from rolemesh.coordinator.run.training_run import TrainingRun
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.store import RunState, RunStream
from rolemesh.rpc.errors import InternalError, InvalidRequestError
from rolemesh.v1 import coordinator_pb2

STEPS = 3
ROLES = ("actor", "critic", "reference", "reward")
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
RECOVERY: dict[str, Any] = {"attempts": 3, "pause_s": 0.01}


def recipe(**run: Any) -> Any:
    settings = {"steps": STEPS, "evaluation": {"num_prompts": 4, "every_steps": 2}, **run}
    return fake_recipe(**{"recovery": RECOVERY, **settings}, pools=split_pools(ROLES))


def learnt(directory: Path) -> list[dict[str, float]]:
    """What the records say of learning, without times and traffic."""
    return [
        {
            name: value
            for name, value in record.items()
            if not name.startswith(("time/", "coordinator/", "dataflow/"))
            and name != "tokens_per_second"
        }
        for record in read_lines(directory / "metrics.jsonl")
    ]


_UNDISTURBED: dict[str, tuple[float, list[dict[str, float]]]] = {}
"""Weight and records of runs that are the same each time."""


async def undisturbed(directory: Path) -> list[dict[str, float]]:
    if "" not in _UNDISTURBED:
        async with fake_mesh(has_cuts=True) as mesh:
            await make_run(mesh, directory, recipe(), MemoryStateStore()).execute()
            _UNDISTURBED[""] = (mesh.roles["actor"].weight, learnt(directory))
    return _UNDISTURBED[""][1]


def recovering_run(
    mesh: FakeMesh, directory: Path, store: MemoryStateStore, **settings: Any
) -> TrainingRun:
    run = make_run(mesh, directory, recipe(), store, restart=mesh.restart, **settings)
    run._loss_grace_s = 0.2
    return run


@pytest.mark.parametrize("victim", ROLES)
@pytest.mark.parametrize(("service", "method"), PHASES)
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


async def test_a_run_whose_services_die_again_and_again_ends_after_its_attempts(
    tmp_path: Path,
) -> None:
    store, recorder = MemoryStateStore(), Recorder()
    async with fake_mesh(has_cuts=True) as mesh:
        run = recovering_run(mesh, tmp_path, store, observer=recorder)
        task = asyncio.create_task(run.execute())
        for number in range(RECOVERY["attempts"] + 1):
            await until(lambda: len(mesh.restarted) == number)  # noqa: B023 - awaited here
            mesh.roles["actor"].gates["Update"] = asyncio.Event()
            await until(lambda: "actor.Update" in mesh.running)
            await mesh.roles["actor"].stop()
            run.service_lost("actor", "actor was killed by signal 9")
            await until(lambda: "actor.Update" not in mesh.running)
        with pytest.raises(ServiceLostError, match="killed by signal 9"):
            await task
    assert mesh.restarted == ["actor"] * RECOVERY["attempts"]
    assert (await store.get_run(run.run_id)).state is RunState.FAILED


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


async def test_an_error_inside_a_service_that_comes_again_ends_the_run(tmp_path: Path) -> None:
    async with fake_mesh(has_cuts=True) as mesh:
        mesh.roles["critic"].failures["Update"] = InternalError("KeyError: 'values'")
        run = recovering_run(mesh, tmp_path, MemoryStateStore())
        with pytest.raises(RunError, match="KeyError"):
            await run.execute()
        updates = [call for call in mesh.calls if call.name == "critic.Update"]
        assert len(updates) == 2


@pytest.mark.parametrize("refusals", [2, RECOVERY["attempts"] + 1])
async def test_a_role_that_is_refused_what_it_had_before_is_asked_again(
    refusals: int, tmp_path: Path
) -> None:
    lacking = InvalidRequestError("9 GiB are free, but 12 are needed", reason="VALUE_INVALID")
    store = MemoryStateStore()
    async with fake_mesh(has_cuts=True) as mesh:
        mesh.roles["actor"].gates["Update"] = asyncio.Event()

        async def restart(service: str) -> str:
            address = await mesh.restart(service)
            mesh.roles[service].failures["Initialize"] = lacking
            return address

        run = make_run(mesh, tmp_path, recipe(), store, restart=restart)
        run._loss_grace_s = 0.2
        task = asyncio.create_task(run.execute())
        await until(lambda: "actor.Update" in mesh.running)
        await mesh.roles["actor"].stop()
        run.service_lost("actor", "actor was killed by signal 9, for want of memory")

        def number_of(state: str) -> int:
            return sum(call.state == state for call in mesh.of("actor.Initialize"))

        await until(lambda: number_of("failed") == min(refusals, RECOVERY["attempts"]))
        if refusals > RECOVERY["attempts"]:
            with pytest.raises(RunError, match="12 are needed"):
                await task
            return
        mesh.roles["actor"].failures.clear()
        summary = await task
        assert mesh.restarted == ["actor"]
        assert mesh.roles["actor"].weight == expected_weight(STEPS)
    assert [one.restarted for one in summary.recoveries] == [("actor",)]


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


async def test_a_run_that_is_told_to_end_while_it_recovers_ends_at_once(tmp_path: Path) -> None:
    async with fake_mesh(has_cuts=True) as mesh:
        is_starting = asyncio.Event()

        async def restart(service: str) -> str:
            is_starting.set()
            await asyncio.Event().wait()
            raise AssertionError

        mesh.roles["actor"].gates["Update"] = asyncio.Event()
        run = make_run(mesh, tmp_path, recipe(), MemoryStateStore(), restart=restart)
        run._loss_grace_s = 0.2
        task = asyncio.create_task(run.execute())
        await until(lambda: "actor.Update" in mesh.running)
        await mesh.roles["actor"].stop()
        run.service_lost("actor", "actor was ended by signal 15")
        await is_starting.wait()
        run.request_stop()
        with pytest.raises(RunAbortedError, match="steps made before: 0"):
            await task


async def test_a_role_that_is_refused_at_the_start_ends_the_run(tmp_path: Path) -> None:
    async with fake_mesh(has_cuts=True) as mesh:
        mesh.roles["actor"].failures["Initialize"] = InvalidRequestError(
            "9 GiB are free, but 12 are needed", reason="VALUE_INVALID"
        )
        with pytest.raises(RunError, match="12 are needed"):
            await recovering_run(mesh, tmp_path, MemoryStateStore()).execute()
        assert len(mesh.of("actor.Initialize")) == 1


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


@pytest.mark.parametrize("victim", ["actor", "critic"])
async def test_a_kill_between_cuts_costs_the_steps_since_the_newest(
    victim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await undisturbed(tmp_path / "undisturbed")
    monkeypatch.setattr(CutPace, "of", lambda recipe, tell: every_third_step())
    async with fake_mesh(has_cuts=True) as mesh:
        run = recovering_run(mesh, tmp_path / "killed", MemoryStateStore())
        summary = await kill_during(run, mesh, "actor", "Update", victim, 3)
        assert mesh.roles["actor"].weight == expected_weight(STEPS)
        saved = {call.step for call in mesh.of("actor.SaveCut")}
        restored = [call.step for call in mesh.of("actor.RestoreCut")]
    assert learnt(tmp_path / "killed") == expected
    assert [one.lost_steps for one in summary.recoveries] == [1]
    # Steps 2 and 3 are made again; their attempt begins to count anew.
    assert saved == {0, 1, 2}
    assert restored == [1]


async def test_a_checkpoint_that_is_newer_than_the_cut_is_what_a_run_goes_back_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await undisturbed(tmp_path / "undisturbed")
    monkeypatch.setattr(CutPace, "of", lambda recipe, tell: every_third_step())
    store = MemoryStateStore()
    async with fake_mesh(has_cuts=True) as mesh:
        run = recovering_run(mesh, tmp_path / "killed", store)
        # Once step 2, which has no cut, is the one that a user wants to keep.
        gate = mesh.roles["reward"].gates["ComputeReward 2"] = asyncio.Event()
        task = asyncio.create_task(kill_during(run, mesh, "actor", "Update", "critic", 3))
        await until(lambda: any(call.step == 2 for call in mesh.of("reward.ComputeReward")))
        await store.append_entry(run.run_id, RunStream.CHECKPOINT_WISHES, b"a wish")
        gate.set()
        summary = await task
        assert mesh.roles["actor"].weight == expected_weight(STEPS)
        assert not mesh.of("actor.RestoreCut")
    assert [one.lost_steps for one in summary.recoveries] == [0]
    assert learnt(tmp_path / "killed") == expected


async def test_a_newer_checkpoint_that_is_damaged_does_not_cost_the_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await undisturbed(tmp_path / "undisturbed")
    monkeypatch.setattr(CutPace, "of", lambda recipe, tell: every_third_step())
    store, recorder, folder = MemoryStateStore(), Recorder(), tmp_path / "killed"
    async with fake_mesh(has_cuts=True) as mesh:
        run = recovering_run(mesh, folder, store, observer=recorder)
        gate = mesh.roles["reward"].gates["ComputeReward 2"] = asyncio.Event()
        update = mesh.roles["actor"].gates["Update 3"] = asyncio.Event()
        task = asyncio.create_task(run.execute())
        await until(lambda: any(call.step == 2 for call in mesh.of("reward.ComputeReward")))
        await store.append_entry(run.run_id, RunStream.CHECKPOINT_WISHES, b"a wish")
        gate.set()
        await until(lambda: any(call.step == 3 for call in mesh.of("actor.Update")))
        # The only checkpoint, of a step that has no cut; the cut is of the step before.
        assert committed_steps(folder / "checkpoints") == [2]
        (folder / "checkpoints/step-00000002/actor/weight.json").write_text("torn")
        await mesh.roles["critic"].stop()
        run.service_lost("critic", "critic was killed by signal 9")
        update.set()
        mesh.roles["actor"].gates.clear()
        summary = await task
        assert mesh.roles["actor"].weight == expected_weight(STEPS)
    assert learnt(folder) == expected
    assert [one.lost_steps for one in summary.recoveries] == [1]
    assert any("checkpoint of step 2 cannot be used" in event for event in recorder.events)


async def test_a_failed_run_saves_the_newest_step_that_has_a_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await undisturbed(tmp_path / "undisturbed")
    monkeypatch.setattr(CutPace, "of", lambda recipe, tell: every_third_step())
    store, folder, recorder = MemoryStateStore(), tmp_path / "failed", Recorder()
    async with fake_mesh(has_cuts=True) as mesh:
        run = make_run(mesh, folder, recipe(recovery={"attempts": 0}), store, observer=recorder)
        task = asyncio.create_task(run.execute())
        await until(lambda: any(call.step == 3 for call in mesh.calls))
        mesh.roles["actor"].failures["Update"] = InternalError("the device is gone")
        with pytest.raises(RunError, match="the device is gone"):
            await task
        assert any("step 1 was saved before the end" in event for event in recorder.events)
        assert committed_steps(folder / "checkpoints") == [1]
        mesh.roles["actor"].failures.clear()
        progress, _ = await reached(store, run.run_id, folder)
        resumed = make_run(mesh, folder, recipe(), store, run_id=run.run_id, resumed=progress)
        await resumed.execute()
        assert mesh.roles["actor"].weight == expected_weight(STEPS)
    assert learnt(folder) == expected


def every_third_step() -> CutPace:
    pace = CutPace(None, print)
    pace.every = 3
    return pace


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


AHEAD_ROLES = (*ROLES, "rollout")
AHEAD_PHASES = (
    ("rollout-0", "Generate"),
    ("rollout-1", "UpdateWeights"),
    ("actor", "PublishWeights"),
    ("actor", "Update"),
    ("critic", "Update"),
)


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


@pytest.mark.parametrize("victim", ["actor", "rollout-1"])
@pytest.mark.parametrize(("service", "method"), AHEAD_PHASES)
@pytest.mark.parametrize("sampler", ["sync", "one_step_ahead"])
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


# --- checkpoints that cannot be used ------------------------------------------------------


def damage(directory: Path, *steps: int, part: str = "actor/weight.json") -> None:
    for step in steps:
        found = directory / f"checkpoints/step-{step:08}" / part
        if found.is_dir():
            shutil.rmtree(found)
        else:
            found.write_text("{")


def files_of(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


async def made(folder: Path, store: MemoryStateStore, mesh: FakeMesh) -> str:
    """A run of STEPS steps that was stopped by a power cut: no cut is left; gives its id."""
    run = make_run(mesh, folder, recipe(checkpoint={"every_steps": 1}), store)
    await run.execute()
    mesh.cuts.clear()
    for role in mesh.roles.values():
        role.run_id = ""
    return run.run_id


async def resumed(folder: Path, store: MemoryStateStore, mesh: FakeMesh, run_id: str) -> Recorder:
    progress, _ = await reached(store, run_id, folder)
    await enter_again(store, recipe(steps=STEPS + 1), run_id, folder)
    recorder, wanted = Recorder(), recipe(steps=STEPS + 1, checkpoint={"every_steps": 1})
    run = make_run(mesh, folder, wanted, store, run_id=run_id, resumed=progress, observer=recorder)
    await run.execute()
    return recorder


@pytest.mark.parametrize("is_kept", [True, False], ids=["journal kept", "journal lost"])
@pytest.mark.parametrize(
    "part", ["actor/weight.json", "critic/manifest.json", "critic", "COMMITTED"]
)
async def test_a_resume_with_nothing_whole_ends_and_changes_nothing(
    part: str, is_kept: bool, tmp_path: Path
) -> None:
    store = MemoryStateStore()
    async with fake_mesh(has_cuts=True) as mesh:
        run_id = await made(tmp_path, store, mesh)
        (tmp_path / "summary.json").unlink()
        whole = files_of(tmp_path)
        damage(tmp_path, 2, 3, part=part)
        before = files_of(tmp_path)
        kept = store if is_kept else MemoryStateStore()
        with pytest.raises(NoWholeCheckpointError) as refusal:
            await resumed(tmp_path, kept, mesh, run_id)
        for step in (2, 3):
            assert f"step {step}: " in str(refusal.value)
        assert f"--out {tmp_path} --from-start" in str(refusal.value)
        after = files_of(tmp_path)
        after.pop("summary.json", None)
        assert {name for name in before | after if before.get(name) != after.get(name)} <= {
            "config.yaml"
        }
        # Its files are repaired.
        for name, content in whole.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes(content)
        await resumed(tmp_path, kept, mesh, run_id)
        assert mesh.roles["actor"].weight == expected_weight(STEPS + 1)


@pytest.mark.parametrize("is_kept", [True, False], ids=["journal kept", "journal lost"])
@pytest.mark.parametrize("part", ["actor/weight.json", "critic", "COMMITTED"])
async def test_what_is_damaged_is_set_aside_where_an_older_checkpoint_takes_its_place(
    part: str, is_kept: bool, tmp_path: Path
) -> None:
    store = MemoryStateStore()
    async with fake_mesh(has_cuts=True) as mesh:
        run_id = await made(tmp_path, store, mesh)
        damage(tmp_path, 3, part=part)
        kept = store if is_kept else MemoryStateStore()
        recorder = await resumed(tmp_path, kept, mesh, run_id)
        assert mesh.roles["actor"].weight == expected_weight(STEPS + 1)
    assert sum("the checkpoint of step 3 cannot be used" in one for one in recorder.events) == 1
    assert [record["step"] for record in recorder.records] == [3, 4]
    # The one before was not pruned for it, and its step was saved anew.
    assert committed_steps(tmp_path / "checkpoints") == [3, 4]
    (aside,) = (tmp_path / "checkpoints").glob("*.damaged")
    assert part == "critic" or (aside / part).read_text() == "{"


async def test_a_recovery_with_nothing_whole_ends_the_run(tmp_path: Path) -> None:
    store = MemoryStateStore()
    async with fake_mesh(has_cuts=True) as mesh:
        settings = recipe(checkpoint={"every_steps": 1})
        run = make_run(mesh, tmp_path, settings, store, restart=mesh.restart)
        run._loss_grace_s = 0.2
        gate = mesh.roles["actor"].gates["Update 3"] = asyncio.Event()
        task = asyncio.create_task(run.execute())
        await until(lambda: committed_steps(tmp_path / "checkpoints") == [1, 2])
        await until(lambda: any(call.step == 3 for call in mesh.of("actor.Update")))
        damage(tmp_path, 1, 2)
        mesh.cuts["critic"].clear()
        await mesh.roles["critic"].stop()
        run.service_lost("critic", "critic was killed by signal 9")
        gate.set()
        with pytest.raises(NoWholeCheckpointError, match=r"step 1: .*step 2: "):
            await task
    assert committed_steps(tmp_path / "checkpoints") == [1, 2]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["state"], summary["steps"]) == ("failed", 2)


async def test_a_resume_without_any_checkpoint_says_that_it_begins_again(tmp_path: Path) -> None:
    store = MemoryStateStore()
    async with fake_mesh(has_cuts=True) as mesh:
        run_id = await made(tmp_path, store, mesh)
        shutil.rmtree(tmp_path / "checkpoints")
        recorder = await resumed(tmp_path, store, mesh, run_id)
        assert mesh.roles["actor"].weight == expected_weight(STEPS + 1)
    assert any("no checkpoint is there" in text for text in recorder.events)
