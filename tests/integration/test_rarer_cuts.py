"""Runs that have no cut of every step, killed between two of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.fake_roles import expected_weight, fake_mesh, until
from support.fake_runs import Recorder, kill_during, make_run
from support.recovering_runs import (
    STEPS,
    learnt,
    recipe,
    recovering_run,
    undisturbed,
)

from rolemesh.coordinator.dataflow.errors import RunError
from rolemesh.coordinator.run.saving.checkpoints import committed_steps
from rolemesh.coordinator.run.saving.cut_pace import CutPace
from rolemesh.coordinator.run.saving.resume import reached
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.store import RunStream
from rolemesh.rpc.errors import InternalError


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
