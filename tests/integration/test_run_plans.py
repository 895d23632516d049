"""Runs over fake roles of recipes that `rolemesh plan` wrote: each planned call is measured."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import typer.testing
from support.fake_recipes import GRPO, PPO, PPO_ROLES, fake_recipe
from support.fake_roles import fake_mesh
from support.fake_runs import Recorder, make_run
from support.mapping_jobs import LLAMAS

from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.coordinator.commands.plan import app
from rolemesh.coordinator.recipe.loading import dump_recipe, load_recipe
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.state.memory import MemoryStateStore

REMAX: dict[str, Any] = {
    "type": "remax",
    "mini_batch_rows": 3,
    "advantages": {"kl_in_reward": {"type": "fixed"}},
}
AHEAD = {"roles": (*PPO_ROLES, "rollout"), "sampler": {"type": "one_step_ahead"},
         "pools": {"a": {"roles": list(PPO_ROLES)}, "b": {"roles": ["rollout"]}}}  # fmt: skip


def planned(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe as `rolemesh plan --write` writes it for two CPUs."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMAS["tiny"]))
    given, written = folder / "recipe.yaml", folder / "planned.yaml"
    given.write_text(dump_recipe(recipe).replace("/models/none", str(model)))
    arguments = [given, "--gpus=2", "--gpu=cpu", f"--write={written}"]
    result = typer.testing.CliRunner().invoke(app, [str(one) for one in arguments])
    assert result.exit_code == 0, result.output
    return load_recipe([written])


@pytest.mark.parametrize(
    ("settings", "ahead"),
    [
        ({"algorithm": PPO}, []),
        ({"algorithm": GRPO, "roles": ("actor", "reference", "reward")}, []),
        ({"algorithm": REMAX, "roles": ("actor", "reference", "reward")}, []),
        ({"algorithm": PPO, **AHEAD}, ["rollout.update_weights", "rollout.generate"]),
    ],
    ids=["ppo", "grpo", "remax", "ahead"],
)
def test_every_planned_call_is_measured_under_its_name(
    settings: dict[str, Any], ahead: list[str], tmp_path: Path
) -> None:
    asyncio.run(_check(planned(fake_recipe(**settings), tmp_path), ahead, tmp_path / "run"))


async def _check(recipe: Recipe, ahead: list[str], folder: Path) -> None:
    store, recorder = MemoryStateStore(), Recorder()
    async with fake_mesh(recipe.roles) as mesh:
        run = make_run(mesh, folder, recipe, store, observer=recorder)
        summary = await run.execute()
    section = recipe.plan
    assert section is not None
    assert f"planned: {section.told}" in recorder.events
    operations = StoreOperations(store)
    notes = [event.note.text async for event in operations.watch_run(run.run_id)]
    assert f"planned: {section.told}" in notes
    plan = (await operations.get_plan(run.run_id)).plan
    assert [task.name for task in plan.tasks] == list(dict.fromkeys(t.name for t in section.tasks))
    for task in plan.tasks:
        assert task.HasField("predicted_s"), task.name
        assert task.HasField("measured_s"), task.name
    assert sorted(task.name for task in plan.tasks if task.is_ahead) == sorted(ahead)
    assert plan.num_steps == 2
    assert summary.planned_step_s == plan.step_s == section.step_s
    assert summary.measured_step_s == plan.measured_step_s
    for pool in plan.pools:
        assert list(pool.roles) == list(pool.planned_roles)
