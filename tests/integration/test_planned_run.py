"""A recipe that `rolemesh plan` wrote starts, trains, and tells how good the prediction was."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer.testing
import yaml
from support.mesh_runs import CliRun, tiny_model, tiny_recipe
from support.public_models import config_folder

from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.coordinator.commands.plan import app
from rolemesh.coordinator.commands.terminal.ending import EXIT_NOT_WHOLE
from rolemesh.coordinator.run.folders.ended_runs import read_runs
from rolemesh.v1 import coordinator_pb2

pytestmark = pytest.mark.timeout(600)

RECIPE = """
run: {{name: planned, steps: 1, prompts_per_step: 64}}
algorithm: {{type: ppo, sampling: {{max_new_tokens: 512}}, mini_batch_rows: 32}}
actor:
  model: {{path: {model}}}
  rollout: {{type: vllm, max_model_len: 1024}}
  data: {{type: jsonl, path: data.jsonl}}
critic: {{model: {{path: {model}}}}}
reference: {{model: {{path: {model}}}}}
reward: {{source: {{type: arithmetic}}}}
"""


async def plan_of(directory: Path) -> coordinator_pb2.RunPlan:
    """The plan of a run that has ended, as the dashboard shows it."""
    found = await read_runs(directory)
    (run_id,) = found.run_ids
    return (await StoreOperations(found.store).get_plan(run_id)).plan


@pytest.mark.slow
def test_a_planned_recipe_trains_on_a_cpu_and_its_plan_stands_beside(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(tiny_recipe(tiny_model(tmp_path / "model"), run__steps=3)))
    written = tmp_path / "planned.yaml"
    arguments = [str(recipe), "--gpus=1", "--gpu=cpu", f"--write={written}"]
    result = typer.testing.CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    text = written.read_text()
    assert "seconds are assumptions" in text
    planned = yaml.safe_load(text)
    assert {tuple(pool["devices"]) for pool in planned["pools"].values()} == {("cpu",)}
    checked = subprocess.run(
        [sys.executable, "-m", "rolemesh", "check", written],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    # EXIT_NOT_WHOLE: nothing is wrong, but not everything could be looked at.
    assert checked.returncode in (0, EXIT_NOT_WHOLE), checked.stdout + checked.stderr
    (tmp_path / "run").mkdir()
    run = CliRun(planned, tmp_path / "run")
    try:
        assert run.wait(300) == 0, run.output
        records = run.metrics()
        assert f"planned: {planned['plan']['step_s']:.3g} s a step; no machine" in run.output
        summary = json.loads((run.out / "summary.json").read_text())
        plan = asyncio.run(plan_of(run.out))
    finally:
        run.close()
    # The first two steps do not count.
    assert summary["step_s"]["planned"] == planned["plan"]["step_s"] == plan.step_s
    assert summary["step_s"]["measured"] == records[2]["time/step"] == plan.measured_step_s
    assert plan.measured_tokens == records[2]["tokens"]
    assert {task.name for task in plan.tasks} == {one["name"] for one in planned["plan"]["tasks"]}
    for task in plan.tasks:
        assert 0 < task.measured_s <= plan.measured_step_s, task.name
        assert task.HasField("predicted_s"), task.name
    for pool in plan.pools:
        assert (list(pool.devices), list(pool.roles)) == (["cpu"], list(pool.planned_roles))


@pytest.mark.slow
def test_a_planned_recipe_fits_where_fit_counts(tmp_path: Path) -> None:
    model = config_folder(tmp_path, "Qwen2.5-0.5B-Instruct", num_hidden_layers=2)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(model=model))
    written = tmp_path / "planned.yaml"
    arguments = [str(recipe), "--gpus=2", "--gpu=rtx4090", "--together=actor,critic,reference"]
    result = typer.testing.CliRunner().invoke(app, [*arguments, f"--write={written}"])
    assert result.exit_code == 0, result.output
    completed = subprocess.run(
        [sys.executable, "-m", "rolemesh", "fit", written, "--gpu=rtx4090", "--count=2", "--json"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    told = json.loads(completed.stdout)
    (pool,) = told["pools"]
    # The plan leaves a tenth of each GPU free; what it estimates is near what is counted.
    assert 0.08 < pool["headroom"] / pool["gpu_bytes"] < 0.25
