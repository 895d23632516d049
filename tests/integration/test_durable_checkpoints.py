"""Runs of fake roles whose checkpoints are written in the background of the steps that follow."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from support.fake_recipes import split_pools
from support.fake_roles import FakeMesh, FakeRole, expected_weight, fake_mesh, fake_recipe, until
from support.fake_runs import Recorder, make_run

from rolemesh.coordinator.dataflow.errors import RunError
from rolemesh.coordinator.run.saving.checkpoints import committed_steps
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.store import RunState, RunStream
from rolemesh.rpc.errors import CapacityError, InternalError
from rolemesh.v1 import coordinator_pb2, weights_pb2

STEPS = 5
ROLES = ("actor", "critic", "reference", "reward")
TRAINED = ("actor", "critic")
FULL = CapacityError("a checkpoint takes 8 bytes, 7 are free", reason="CHECKPOINT_CAPACITY")


def recipe(every: int, **run: Any) -> Any:
    settings: dict[str, Any] = {
        "steps": STEPS,
        "checkpoint": {"every_steps": every, "keep": 9},
        "recovery": {"attempts": 3, "pause_s": 0.01},
    }
    return fake_recipe(**{**settings, **run}, pools=split_pools(ROLES))


def weights_in(directory: Path) -> dict[int, dict[str, Any]]:
    """What each complete checkpoint holds, by step and role."""
    checkpoints = directory / "checkpoints"
    return {
        step: {
            role: json.loads((checkpoints / f"step-{step:08}" / role / "weight.json").read_text())
            for role in TRAINED
        }
        for step in committed_steps(checkpoints)
    }


async def foreground(directory: Path, every: int) -> dict[int, dict[str, Any]]:
    """Checkpoints of a run without cuts, which waits for each."""
    async with fake_mesh() as mesh:
        await make_run(mesh, directory, recipe(every), MemoryStateStore()).execute()
        assert not any(call.request.from_cut for call in mesh.of("actor.SaveCheckpoint"))
    return weights_in(directory)


def hold(mesh: FakeMesh, role: str, step: int) -> asyncio.Event:
    """Holds a role's writer of a step until the event is set."""
    gate = mesh.roles[role].gates[f"SaveCheckpoint {step}"] = asyncio.Event()
    return gate


def made(mesh: FakeMesh, name: str, step: int) -> bool:
    return any(call.step == step and call.state == "done" for call in mesh.of(name))


def asked(mesh: FakeMesh, name: str) -> list[int]:
    """Steps of the calls of a name, in the order in which they came."""
    return [call.step for call in mesh.of(name)]


async def test_the_run_goes_on_until_a_cut_would_replace_one_that_is_written(
    tmp_path: Path,
) -> None:
    expected = await foreground(tmp_path / "foreground", 2)
    store, directory = MemoryStateStore(), tmp_path / "background"
    async with fake_mesh(has_cuts=True) as mesh:
        gate = hold(mesh, "actor", 2)
        run = make_run(mesh, directory, recipe(2), store)
        task = asyncio.create_task(run.execute())
        # Step 3 is made as a whole, and step 4 but for its cuts.
        await until(lambda: made(mesh, "actor.Update", 4))
        await until(
            lambda: run._attempt is not None and run._attempt.activity == "checkpoint of step 2"
        )
        assert run.progress.step == 3
        assert committed_steps(directory / "checkpoints") == []
        for role in TRAINED:
            # The critic has long written its own, but that alone can be lost with a disk.
            assert asked(mesh, f"{role}.SaveCut") == [0, 1, 2, 3]
        await until(lambda: made(mesh, "critic.SaveCheckpoint", 2))
        assert (await store.get_run(run.run_id)).state is RunState.RUNNING
        gate.set()
        summary = await task
        assert mesh.roles["actor"].weight == expected_weight(STEPS)
        from_cut = {call.step: call.request.from_cut for call in mesh.of("actor.SaveCheckpoint")}
        # The end of the run is waited for, from what the roles hold.
        assert from_cut == {2: True, 4: True, 5: False}
    assert summary.state is RunState.SUCCEEDED
    assert weights_in(directory) == expected
    assert sorted(expected) == [2, 4, 5]
    saved = [
        Path(event.checkpoint_saved.directory).name
        for entry in await store.read_entries(run.run_id, RunStream.EVENTS)
        if (event := coordinator_pb2.RunEvent.FromString(entry.payload)).HasField(
            "checkpoint_saved"
        )
    ]
    assert saved == ["step-00000002", "step-00000004", "step-00000005"]


async def test_a_slow_disk_slows_the_run_and_no_checkpoint_is_left_out(tmp_path: Path) -> None:
    expected = await foreground(tmp_path / "foreground", 1)

    def delay(service: str, method: str) -> float:
        return 0.03 if (service, method) == ("critic", "SaveCheckpoint") else 0.0

    recorder, directory = Recorder(), tmp_path / "background"
    async with fake_mesh(has_cuts=True, delay=delay) as mesh:
        run = make_run(mesh, directory, recipe(1), MemoryStateStore(), observer=recorder)
        await run.execute()
        calls = [
            (call.name, call.step)
            for call in mesh.calls
            if call.method in ("SaveCut", "SaveCheckpoint")
        ]
        for step in range(1, STEPS - 1):
            for role in TRAINED:
                # A step's checkpoint is whole before the cut that takes the place of its own.
                written = calls.index((f"{role}.SaveCheckpoint", step))
                assert written < calls.index(("actor.SaveCut", step + 2))
                # One is written at a time.
                assert written < calls.index((f"{role}.SaveCheckpoint", step + 1))
        assert {call.step for call in mesh.of("actor.SaveCheckpoint")} == set(range(1, STEPS + 1))
    assert weights_in(directory) == expected
    assert not any("left out" in text for text in recorder.events)


@pytest.mark.parametrize("victim", TRAINED)
async def test_a_kill_while_a_checkpoint_is_written_costs_neither_step_nor_checkpoint(
    tmp_path: Path, victim: str
) -> None:
    expected = await foreground(tmp_path / "foreground", 2)
    directory = tmp_path / "killed"
    async with fake_mesh(has_cuts=True) as mesh:
        gate = hold(mesh, "critic", 2)
        run = make_run(mesh, directory, recipe(2), MemoryStateStore(), restart=mesh.restart)
        run._loss_grace_s = 0.2
        task = asyncio.create_task(run.execute())
        await until(lambda: made(mesh, "actor.Update", 4))
        await until(lambda: made(mesh, "actor.SaveCheckpoint", 2))
        # The actor's part is whole, and counts for nothing.
        assert (directory / "checkpoints/step-00000002/actor/weight.json").is_file()
        assert committed_steps(directory / "checkpoints") == []
        await mesh.roles[victim].stop()
        run.service_lost(victim, f"{victim} was killed by signal 9")
        # Before that the critic could still write its part, and the checkpoint would be whole.
        await until(lambda: mesh.restarted == [victim])
        gate.set()
        mesh.roles["critic"].gates.clear()
        summary = await task
        assert mesh.restarted == [victim]
        assert mesh.roles["actor"].weight == expected_weight(STEPS)
        # The next attempt has written it from the cut, and not from the newer weights.
        again = [call for call in mesh.of("actor.SaveCheckpoint") if call.step == 2]
        assert [call.request.from_cut for call in again] == [True, True]
    assert weights_in(directory) == expected
    assert [one.lost_steps for one in summary.recoveries] == [0]


async def test_where_the_cut_is_gone_too_the_next_attempt_saves_its_newest_step(
    tmp_path: Path,
) -> None:
    async with fake_mesh(has_cuts=True) as mesh:
        gate = hold(mesh, "critic", 2)
        run = make_run(mesh, tmp_path, recipe(2), MemoryStateStore(), restart=mesh.restart)
        run._loss_grace_s = 0.2
        task = asyncio.create_task(run.execute())
        await until(lambda: made(mesh, "actor.Update", 4))
        await until(lambda: run.progress.step == 3)
        del mesh.cuts["critic"][2]
        await mesh.roles["critic"].stop()
        run.service_lost("critic", "critic was killed by signal 9")
        # Before that the critic could still write its part, and the checkpoint would be whole.
        await until(lambda: mesh.restarted == ["critic"])
        gate.set()
        mesh.roles["critic"].gates.clear()
        summary = await task
        assert mesh.roles["actor"].weight == expected_weight(STEPS)
    assert committed_steps(tmp_path / "checkpoints") == [3, 4, 5]
    assert [one.lost_steps for one in summary.recoveries] == [0]


async def test_an_error_of_the_writer_ends_the_attempt_and_the_next_one_writes(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "run"
    async with fake_mesh(has_cuts=True) as mesh:
        mesh.roles["critic"].failures["SaveCheckpoint"] = InternalError("EIO")
        recorder = Recorder()
        run = make_run(mesh, directory, recipe(2), MemoryStateStore(), observer=recorder)
        task = asyncio.create_task(run.execute())
        await until(lambda: any("recovering" in text for text in recorder.events))
        mesh.roles["critic"].failures.clear()
        summary = await task
    assert committed_steps(directory / "checkpoints") == [2, 4, 5]
    (recovered,) = summary.recoveries
    assert "checkpoint of step 2 failed on critic" in recovered.cause


# --- room ---------------------------------------------------------------------------------


async def test_a_full_disk_leaves_a_checkpoint_out_and_the_run_goes_on(tmp_path: Path) -> None:
    recorder, folder = Recorder(), tmp_path / "checkpoints"
    async with fake_mesh(has_cuts=True) as mesh:
        gate, written = hold(mesh, "critic", 3), hold(mesh, "actor", 3)
        run = make_run(mesh, tmp_path, recipe(1), MemoryStateStore(), observer=recorder)
        task = asyncio.create_task(run.execute())
        await until(lambda: 3 in asked(mesh, "critic.SaveCheckpoint"))
        mesh.roles["critic"].failures["SaveCheckpoint"] = FULL
        gate.set()
        await until(lambda: any(call.state == "failed" for call in mesh.calls))
        # Nothing is removed before the other role has ended, too, which writes into the folder.
        assert (folder / "step-00000003").is_dir()
        assert not any("left out" in text for text in recorder.events)
        written.set()
        await until(lambda: any("left out" in text for text in recorder.events))
        assert not (folder / "step-00000003").exists()
        mesh.roles["critic"].failures.clear()
        summary = await task
        assert mesh.roles["actor"].weight == expected_weight(STEPS)
    assert summary.state is RunState.SUCCEEDED
    assert summary.recoveries == ()
    steps = committed_steps(folder)
    assert {1, 2, STEPS} <= set(steps)
    assert 3 not in steps
    told = [text for text in recorder.events if "left out" in text]
    assert f"the checkpoint of step 3 is left out: {FULL.message}" in told


@pytest.mark.parametrize("has_cuts", [True, False])
async def test_a_disk_that_stays_full_ends_a_run_that_relies_on_its_checkpoint(
    tmp_path: Path, has_cuts: bool
) -> None:
    async with fake_mesh(has_cuts=has_cuts) as mesh:
        mesh.roles["actor"].failures["SaveCheckpoint"] = FULL
        run = make_run(mesh, tmp_path, recipe(2), MemoryStateStore())
        with pytest.raises(RunError, match=r"CHECKPOINT_CAPACITY.*7 are free"):
            await run.execute()
        # With cuts the run came to its end, and they are kept for `--resume`.
        assert run.progress.step == (STEPS if has_cuts else 2)
        assert (STEPS in mesh.cuts.get("actor", {})) == has_cuts
    assert list((tmp_path / "checkpoints").iterdir()) == []


# --- by hand, and the end -----------------------------------------------------------------


async def test_a_wished_checkpoint_comes_after_the_one_that_is_written(tmp_path: Path) -> None:
    store = MemoryStateStore()
    async with fake_mesh(has_cuts=True) as mesh:
        gate = hold(mesh, "actor", 2)
        update = mesh.roles["actor"].gates["Update 3"] = asyncio.Event()
        run = make_run(mesh, tmp_path, recipe(2), store)
        task = asyncio.create_task(run.execute())
        await until(lambda: 3 in asked(mesh, "actor.Update"))
        await store.append_entry(run.run_id, RunStream.CHECKPOINT_WISHES, b"a wish")
        update.set()
        await until(
            lambda: run._attempt is not None and run._attempt.activity == "checkpoint of step 2"
        )
        assert run.progress.step == 3
        gate.set()
        await task
        assert asked(mesh, "actor.SaveCheckpoint") == [2, 3, 4, 5]
    assert committed_steps(tmp_path / "checkpoints") == [2, 3, 4, 5]


async def test_a_stopped_run_waits_for_what_is_written(tmp_path: Path) -> None:
    async with fake_mesh(has_cuts=True) as mesh:
        gate = hold(mesh, "actor", 2)
        run = make_run(mesh, tmp_path, recipe(2), MemoryStateStore())
        task = asyncio.create_task(run.execute())
        await until(lambda: "actor.SaveCheckpoint" in mesh.running)
        run.request_stop()
        await until(
            lambda: run._attempt is not None and run._attempt.activity == "checkpoint of step 2"
        )
        assert not made(mesh, "actor.Export", run.progress.step)
        gate.set()
        summary = await task
    assert summary.state is RunState.STOPPED
    assert committed_steps(tmp_path / "checkpoints") == sorted({2, summary.steps})


async def test_a_service_that_does_not_heed_the_cut_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = FakeRole._written

    def heedless(self: FakeRole, directory: str, **given: Any) -> weights_pb2.CheckpointResult:
        return write(self, directory, replaces=given["replaces"])

    monkeypatch.setattr(FakeRole, "_written", heedless)
    async with fake_mesh(has_cuts=True) as mesh:
        run = make_run(mesh, tmp_path, recipe(2), MemoryStateStore())
        with pytest.raises(RunError, match="keeps cuts, but writes no checkpoint from them"):
            await run.execute()
    assert 2 not in committed_steps(tmp_path / "checkpoints")
