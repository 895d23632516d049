"""Runs of fake roles whose held-out scores are given: what they keep, and when they stop early."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.protobuf import json_format
from support.fake_recipes import PPO_ROLES, fake_recipe, split_pools
from support.fake_roles import FakeMesh, expected_weight, fake_mesh
from support.fake_runs import Recorder, kill_during, make_run
from support.run_results import learnt
from typer.testing import CliRunner

from rolemesh.coordinator.commands.cli import app
from rolemesh.coordinator.dataflow.errors import RunError
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.run.folders.ended_runs import read_runs
from rolemesh.coordinator.run.folders.folder import read_status
from rolemesh.coordinator.run.saving.checkpoints import committed_steps
from rolemesh.coordinator.run.saving.kept_checkpoints import best_kept
from rolemesh.coordinator.run.saving.resume import reached
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.store import RunState, RunStream
from rolemesh.rpc.errors import CapacityError
from rolemesh.v1 import coordinator_pb2

SCORES = (0.1, 0.2, 0.9, 0.3, 0.3, 0.3, 0.3)
"""Before the first step, and after each."""
STEPS = len(SCORES) - 1


def judge(mesh: FakeMesh, *lineages: Sequence[float]) -> None:
    """Gives the scores of evaluations, by lineage: a roll-back begins the next one."""

    def reported(name: str, key: Any) -> Mapping[str, float]:
        if name != "reward.ComputeReward" or not key.operation.startswith("evaluate."):
            return {}
        scores = lineages[min(key.lineage, len(lineages) - 1)]
        return {"reward/mean": scores[key.step]}

    mesh.reported = reported


def recipe(*, patience: int | None = None, **run: Any) -> Any:
    checkpoint = {"every_steps": 1, "keep_best": {}, **run.pop("checkpoint", {})}
    stopping = {} if patience is None else {"early_stopping": {"patience": patience}}
    settings: dict[str, Any] = {
        "steps": STEPS,
        "evaluation": {"num_prompts": 4, "every_steps": 1},
        "recovery": {"attempts": 3, "pause_s": 0.01},
        "checkpoint": checkpoint,
        **stopping,
        **run,
    }
    return fake_recipe(**settings, pools=split_pools(PPO_ROLES))


def kept(directory: Path) -> list[int]:
    return committed_steps(directory / "checkpoints")


@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize("has_cuts", [False, True], ids=["waiting", "from cuts"])
async def test_the_best_checkpoint_stays_beside_the_newest(
    has_cuts: bool, every: int, tmp_path: Path
) -> None:
    async with fake_mesh(has_cuts=has_cuts) as mesh:
        judge(mesh, SCORES)
        wanted = recipe(checkpoint={"every_steps": every})
        summary = await make_run(mesh, tmp_path, wanted, MemoryStateStore()).execute()
    assert summary.state is RunState.SUCCEEDED
    # With `every` 0 step 1 was the best, too, before step 2 was made.
    assert kept(tmp_path) == ([2, 5, 6] if every else [2, 6])
    weight = json.loads((tmp_path / "checkpoints/step-00000002/actor/weight.json").read_text())
    assert weight["weight"] == expected_weight(2)
    told = json.loads((tmp_path / "summary.json").read_text())
    assert told["best"] == {
        "metric": "held_out/score",
        "step": 2,
        "value": 0.9,
        "directory": str(tmp_path / "checkpoints/step-00000002"),
    }
    assert told["early_stop"] == ""


async def test_the_smallest_value_of_another_metric_may_be_the_best(tmp_path: Path) -> None:
    async with fake_mesh(has_cuts=True) as mesh:
        judge(mesh, SCORES)
        best = {"metric": "held_out/reward/mean", "mode": "min"}
        wanted = recipe(checkpoint={"every_steps": 0, "keep_best": best})
        await make_run(mesh, tmp_path, wanted, MemoryStateStore()).execute()
    assert kept(tmp_path) == [1, 6]
    assert best_kept(tmp_path) == 1


async def test_commands_know_the_best_checkpoint_and_do_not_prune_it(tmp_path: Path) -> None:
    async with fake_mesh(has_cuts=True) as mesh:
        judge(mesh, SCORES)
        await make_run(mesh, tmp_path, recipe(), MemoryStateStore()).execute()
    shown = CliRunner().invoke(app, ["checkpoints", str(tmp_path), "--prune", "1", "--json"])
    assert shown.exit_code == 0, shown.output
    lines = [json.loads(line) for line in shown.output.splitlines()]
    assert [line["step"] for line in lines if line["type"] == "removed"] == [5]
    known = {line["step"]: line["is_best"] for line in lines if line["type"] == "checkpoint"}
    assert known == {2: True, 6: False}
    table = CliRunner().invoke(app, ["checkpoints", str(tmp_path)]).output
    assert table.count("complete, best") == 1


async def test_a_step_that_was_taken_back_does_not_stay_the_best(tmp_path: Path) -> None:
    async with fake_mesh(has_cuts=True) as mesh:
        again = (0.1, 0.2, 0.25, 0.3, 0.4, 0.35, 0.3)
        judge(mesh, SCORES, again)
        scored = mesh.reported
        mesh.reported = lambda name, key: (
            {"entropy": 0.0}
            if (name, key.step, key.lineage) == ("actor.Update", 3, 0)
            else scored(name, key)
        )
        health = {"entropy": {"below": 0.01, "do": "roll_back", "back": 2}}
        summary = await make_run(
            mesh, tmp_path, recipe(health=health), MemoryStateStore()
        ).execute()
    assert summary.best is not None
    assert (summary.best.held_out.step, summary.best.held_out.value) == (4, 0.4)
    assert kept(tmp_path) == [4, 5, 6]
    assert best_kept(tmp_path) == 4


async def test_a_best_step_that_the_disk_has_no_room_for_replaces_none(tmp_path: Path) -> None:
    async with fake_mesh(has_cuts=True) as mesh:
        judge(mesh, (0.1, 0.2, 0.5, 0.3, 0.9, 0.3, 0.3))
        scored = mesh.reported

        def reported(name: str, key: Any) -> Mapping[str, float]:
            if (name, key.step) == ("actor.SaveCheckpoint", 4):
                raise CapacityError("no room", reason="DISK_FULL")
            return scored(name, key)

        mesh.reported = reported
        summary = await make_run(mesh, tmp_path, recipe(), MemoryStateStore()).execute()
    assert kept(tmp_path) == [2, 5, 6]
    assert summary.best is not None
    assert summary.best.held_out.step == 2


@pytest.mark.parametrize("patience", [1, 3])
async def test_a_run_stops_when_its_patience_is_over_and_goes_on_with_more(
    patience: int, tmp_path: Path
) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "stopped"
    async with fake_mesh(has_cuts=True) as mesh:
        judge(mesh, SCORES)
        await make_run(mesh, whole, recipe(), MemoryStateStore()).execute()
    store, recorder, stop = MemoryStateStore(), Recorder(), 2 + patience
    async with fake_mesh(has_cuts=True) as mesh:
        judge(mesh, SCORES)
        run = make_run(mesh, folder, recipe(patience=patience), store, observer=recorder)
        summary = await run.execute()
        assert (summary.state, summary.steps, summary.failure) == (RunState.SUCCEEDED, stop, "")
        assert mesh.roles["actor"].weight == expected_weight(stop)
        assert max(call.step for call in mesh.of("actor.Update")) == stop
        reason = summary.early_stop
        assert reason.startswith(f"early stopping after step {stop}: held_out/score was 0.9")
        # All that tell of the run say so.
        record = await store.get_run(run.run_id)
        assert (record.state, record.activity, record.failure) == (RunState.SUCCEEDED, reason, "")
        entries = await store.read_entries(run.run_id, RunStream.EVENTS)
        events = [coordinator_pb2.RunEvent.FromString(entry.payload) for entry in entries]
        assert [event.step for event in events if event.note.text == reason] == [stop]
        assert recorder.events.count(reason) == 1
        assert read_status(folder).activity == reason
        shown = await read_runs(folder)
        (run_id,) = shown.run_ids
        assert (await shown.store.get_run(run_id)).activity == reason
        assert reason in CliRunner().invoke(app, ["status", str(folder)]).output.replace("\n", "")

        # With the same patience nothing is left to make.
        progress, _ = await reached(store, run.run_id, folder)
        again = make_run(
            mesh, folder, recipe(patience=patience), store, run_id=run.run_id, resumed=progress
        )
        assert (await again.execute()).early_stop == reason
        assert max(call.step for call in mesh.of("actor.Update")) == stop
        progress, _ = await reached(store, run.run_id, folder)
        more = make_run(
            mesh, folder, recipe(patience=9), store, run_id=run.run_id, resumed=progress
        )
        summary = await more.execute()
        assert (summary.state, summary.steps, summary.early_stop) == (
            RunState.SUCCEEDED, STEPS, ""
        )  # fmt: skip
        assert mesh.roles["actor"].weight == expected_weight(STEPS)
    assert learnt(folder) == learnt(whole)
    assert kept(folder) == [2, 5, 6]


@pytest.mark.parametrize("method", ["Update", "SaveCut", "SaveCheckpoint"])
@pytest.mark.parametrize("step", [2, 4])
async def test_a_kill_changes_neither_the_best_nor_the_end(
    step: int, method: str, tmp_path: Path
) -> None:
    async with fake_mesh(has_cuts=True) as mesh:
        judge(mesh, SCORES)
        run = make_run(mesh, tmp_path, recipe(patience=2), MemoryStateStore(), restart=mesh.restart)
        run._loss_grace_s = 0.2
        summary = await kill_during(run, mesh, "actor", method, "actor", step)
    assert summary.steps == 4
    assert summary.early_stop.startswith("early stopping after step 4")
    assert len(summary.recoveries) == 1
    assert kept(tmp_path) == [2, 3, 4]
    assert [record["step"] for record in learnt(tmp_path)] == [1, 2, 3, 4]


async def test_an_algorithm_without_a_score_keeps_no_best_by_it(tmp_path: Path) -> None:
    wanted = fake_recipe(
        roles=("actor",),
        algorithm={"type": "sft"},
        evaluation={"num_prompts": 4, "every_steps": 1},
        checkpoint={"keep_best": {}},
    )
    async with fake_mesh(("actor",)) as mesh:
        # It has no score.
        with pytest.raises(RunError, match=r"run\.checkpoint\.keep_best\.metric is 'held_out/sc"):
            await make_run(mesh, tmp_path, wanted, MemoryStateStore()).execute()
        assert not mesh.of("actor.Update")


async def test_a_metric_that_no_evaluation_reports_ends_the_run_before_its_first_step(
    tmp_path: Path,
) -> None:
    wanted = recipe(checkpoint={"keep_best": {"metric": "held_out/loss", "mode": "min"}})
    async with fake_mesh() as mesh:
        with pytest.raises(RunError, match=r"keep_best\.metric is 'held_out/loss', which the eval"):
            await make_run(mesh, tmp_path, wanted, MemoryStateStore()).execute()
        assert not mesh.of("actor.Update")


async def test_a_resumption_with_more_steps_gives_its_services_a_longer_schedule(
    tmp_path: Path,
) -> None:
    store, recorder = MemoryStateStore(), Recorder()

    def falling(steps: int) -> Any:
        values = recipe(steps=steps).model_dump(mode="json")
        values["actor"]["optimizer"]["schedule"] = {"type": "cosine"}
        return Recipe.model_validate(values)

    async with fake_mesh(has_cuts=True) as mesh:
        judge(mesh, SCORES)
        run = make_run(mesh, tmp_path, falling(4), store, observer=recorder)
        await run.execute()
        progress, _ = await reached(store, run.run_id, tmp_path)
        longer = make_run(mesh, tmp_path, falling(6), store, run_id=run.run_id, resumed=progress)
        summary = await longer.execute()
        assert mesh.roles["actor"].weight == expected_weight(6)
        sent = [
            json_format.MessageToDict(call.request.spec)["optimizer"]["schedule"]
            for call in mesh.of("actor.Initialize")
        ]
    # A step makes two optimizer steps.
    assert [schedule["optimizer_steps"] for schedule in sent] == [8, 12]
    assert "the learning rate of the actor falls until its optimizer step 8" in recorder.events
    assert summary.steps == 6
    config = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert config["actor"]["optimizer"]["schedule"]["optimizer_steps"] is None


async def test_the_least_held_out_loss_of_given_data_may_be_the_best(tmp_path: Path) -> None:
    losses = (2.0, 1.5, 1.0, 1.2, 1.1, 0.9)
    wanted = fake_recipe(
        roles=("actor",),
        algorithm={"type": "sft"},
        steps=5,
        evaluation={"num_prompts": 4, "every_steps": 1},
        checkpoint={"every_steps": 0, "keep_best": {"metric": "held_out/loss", "mode": "min"}},
        early_stopping={"patience": 2},
    )
    async with fake_mesh(("actor",), has_cuts=True) as mesh:
        mesh.reported = lambda name, key: (
            {"loss": losses[key.step]} if name == "actor.ForwardBackward" else {}
        )
        summary = await make_run(mesh, tmp_path, wanted, MemoryStateStore()).execute()
    assert summary.best is not None
    assert (summary.best.held_out.step, summary.best.held_out.value) == (2, 1.0)
    assert (summary.state, summary.steps) == (RunState.SUCCEEDED, 4)
    assert kept(tmp_path) == [2, 4]
