"""Runs that evaluate a loss on held-out rows, and are killed in it: they end the same."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.fake_recipes import TRAINED_REWARD, split_pools
from support.fake_roles import fake_mesh, fake_recipe, until
from support.fake_runs import kill_during, make_run, read_lines
from support.run_results import learnt

from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.coordinator.dataflow.errors import RunError
from rolemesh.coordinator.run.folders.summary import RunSummary
from rolemesh.coordinator.run.saving.resume import reached
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.rpc.errors import InternalError

ROLES = ("actor", "reference")
STEPS = 3


def recipe(**recovery: Any) -> Any:
    return fake_recipe(
        roles=ROLES,
        algorithm={"type": "dpo", "mini_batch_rows": 4},
        pools=split_pools(ROLES),
        steps=STEPS,
        evaluation={"num_prompts": 4, "every_steps": 2},
        recovery={"attempts": 3, "pause_s": 0.01, **recovery},
    )


async def undisturbed(directory: Path) -> RunSummary:
    async with fake_mesh(ROLES, has_cuts=True) as mesh:
        return await make_run(mesh, directory, recipe(), MemoryStateStore()).execute()


def held_out(summary: RunSummary) -> list[Any]:
    return [summary.held_out_before, summary.held_out_after]


async def test_a_loss_stands_wherever_a_score_would(tmp_path: Path) -> None:
    store = MemoryStateStore()
    async with fake_mesh(ROLES, has_cuts=True) as mesh:
        run = make_run(mesh, tmp_path, recipe(), store)
        summary = await run.execute()
        weight = mesh.roles["actor"].weight
    before, after = held_out(summary)
    assert (before.score, before.metrics["loss"], after.metrics["loss"]) == (None, 1.0, 1 - weight)
    # Of the third step too, which is the last one.
    evaluated = [r["step"] for r in read_lines(tmp_path / "metrics.jsonl") if "held_out/loss" in r]
    assert evaluated == [2, 3]
    operations = StoreOperations(store)
    curve = await operations.get_metrics(run.run_id, ["held_out/loss"])
    assert list(curve.steps) == [0, 1, 2, 3]
    assert [curve.series[0].values[step] for step in (0, 3)] == [1.0, 1 - weight]
    events = [event async for event in operations.watch_run(run.run_id)]
    told = [dict(e.evaluated.metrics) for e in events if e.HasField("evaluated")]
    assert [one["held_out/loss"] for one in told] == [1.0, told[1]["held_out/loss"], 1 - weight]
    notes = [event.note.text for event in events if event.note.text.startswith("held-out")]
    assert notes[0] == "held-out loss after 0 steps: 1.000, accuracy 0.500 (4 rows)"
    assert len(notes) == 3


@pytest.mark.parametrize("victim", ROLES)
@pytest.mark.parametrize("step", [0, 2])
async def test_a_kill_in_an_evaluation_changes_nothing(
    step: int, victim: str, tmp_path: Path
) -> None:
    expected = await undisturbed(tmp_path / "undisturbed")
    async with fake_mesh(ROLES, has_cuts=True) as mesh:
        run = make_run(
            mesh, tmp_path / "killed", recipe(), MemoryStateStore(), restart=mesh.restart
        )
        run._loss_grace_s = 0.2
        summary = await kill_during(run, mesh, "actor", "ForwardBackward", victim, step)
        assert mesh.restarted == [victim]
    assert learnt(tmp_path / "killed") == learnt(tmp_path / "undisturbed")
    assert held_out(summary) == held_out(expected)


async def test_another_process_goes_on_from_an_evaluation_that_failed(tmp_path: Path) -> None:
    expected = await undisturbed(tmp_path / "undisturbed")
    store, folder = MemoryStateStore(), tmp_path / "failed"
    async with fake_mesh(ROLES, has_cuts=True) as mesh:
        run = make_run(mesh, folder, recipe(attempts=0), store)
        task = asyncio.create_task(run.execute())
        await until(lambda: any(call.step == 1 for call in mesh.calls))
        mesh.roles["actor"].failures["ForwardBackward"] = InternalError("out of luck")
        with pytest.raises(RunError, match="out of luck"):
            await task
        mesh.roles["actor"].failures.clear()
        progress, _ = await reached(store, run.run_id, folder)
        assert progress.step == 2
        assert progress.before == expected.held_out_before
        resumed = make_run(mesh, folder, recipe(), store, run_id=run.run_id, resumed=progress)
        summary = await resumed.execute()
    # The step whose evaluation failed was told of without it, and is not told of again.
    without = [dict(record) for record in learnt(tmp_path / "undisturbed")]
    assert learnt(folder) in (
        without,
        [
            {name: value for name, value in record.items() if not name.startswith("held_out/")}
            if record["step"] == 2
            else record
            for record in without
        ],
    )
    assert held_out(summary) == held_out(expected)


@pytest.mark.parametrize("role", ["actor", "reward"])
async def test_more_rows_than_are_held_out_are_refused(role: str, tmp_path: Path) -> None:
    trained: dict[str, Any] = {"algorithm": {"type": "sft"}}
    if role == "reward":
        trained = {"algorithm": {"type": "reward_model"}, "reward": TRAINED_REWARD}
    async with fake_mesh((role,), num_held_out=3) as mesh:
        asks = fake_recipe(roles=(role,), evaluation={"num_prompts": 4}, **trained)
        with pytest.raises(RunError, match=r"run\.evaluation\.num_prompts is 4, .* 3 held-out"):
            await make_run(mesh, tmp_path, asks, MemoryStateStore()).execute()
        assert "Update" not in {call.method for call in mesh.calls}
