"""A recipe that `rolemesh plan` wrote starts, and trains."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer.testing
import yaml
from support.mesh_runs import CliRun, tiny_model, tiny_recipe

from rolemesh.coordinator.commands.plan import app

pytestmark = pytest.mark.timeout(600)


def test_a_planned_recipe_trains_on_a_cpu(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(tiny_recipe(tiny_model(tmp_path / "model"), run__steps=1)))
    written = tmp_path / "planned.yaml"
    arguments = [str(recipe), "--gpus=1", "--gpu=cpu", f"--write={written}"]
    result = typer.testing.CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    text = written.read_text()
    assert "seconds are assumptions" in text
    planned = yaml.safe_load(text)
    assert {tuple(pool["devices"]) for pool in planned["pools"].values()} == {("cpu",)}
    (tmp_path / "run").mkdir()
    run = CliRun(planned, tmp_path / "run")
    try:
        assert run.wait(300) == 0, run.output
        assert "step" in run.metrics()[-1]
    finally:
        run.close()
