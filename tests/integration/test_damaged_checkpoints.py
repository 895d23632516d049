"""Runs that go on from checkpoints of which some cannot be used, or none."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from support.fake_roles import FakeMesh, expected_weight, fake_mesh, until
from support.fake_runs import Recorder, make_run
from support.recovering_runs import (
    STEPS,
    recipe,
)

from rolemesh.coordinator.run.reporting.records import enter_again
from rolemesh.coordinator.run.saving.checkpoints import NoWholeCheckpointError, committed_steps
from rolemesh.coordinator.run.saving.resume import reached
from rolemesh.coordinator.state.memory import MemoryStateStore


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
