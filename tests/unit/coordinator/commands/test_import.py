"""`rolemesh import`: what it prints, writes and refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from rolemesh.coordinator.commands.cli import app
from rolemesh.coordinator.recipe.loading import load_recipe, read_recipe

VERL = "algorithm: {adv_estimator: grpo}\nactor_rollout_ref: {rollout: {n: 4}}\n"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(VERL)
    return path


def test_a_recipe_is_printed(config: Path) -> None:
    done = CliRunner().invoke(
        app, ["import", "verl", str(config), "trainer.total_training_steps=3"]
    )
    assert done.exit_code == 0
    assert read_recipe(done.stdout, "printed").run.steps == 3


def test_a_recipe_is_written_and_not_over_another_one(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine.yaml"
    words = ["import", "verl", str(config), "+new.key=1", "--output", str(out)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0
    assert "without a counterpart: 1 values" in done.stdout
    assert "to fill in: run.steps, actor.model.path" in done.stdout
    assert load_recipe([out]).algorithm.type == "grpo"
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 2
    assert "exists: name another file, or give --overwrite" in again.output
    assert CliRunner().invoke(app, [*words, "--overwrite"]).exit_code == 0


def test_flags_of_openrlhf_may_begin_the_text() -> None:
    done = CliRunner().invoke(app, ["import", "openrlhf", "--pretrain models/a --seed 3"])
    assert done.exit_code == 0
    assert read_recipe(done.stdout, "printed").run.seed == 3
    split = CliRunner().invoke(app, ["import", "openrlhf", "--", "--pretrain", "models/a"])
    assert split.exit_code == 0


def test_a_file_of_trl_with_the_number_of_processes(tmp_path: Path) -> None:
    path = tmp_path / "grpo.json"
    path.write_text('{"per_device_train_batch_size": 4, "num_generations": 8, "max_steps": 9}')
    refused = CliRunner().invoke(app, ["import", "trl", str(path)])
    assert refused.exit_code == 2
    assert "say with --gpus how many processes train" in refused.output
    done = CliRunner().invoke(app, ["import", "trl", str(path), "--gpus", "4"])
    assert read_recipe(done.stdout, "printed").run.prompts_per_step == 2


def test_bad_input_ends_with_2_and_one_line(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["import", "verl", str(tmp_path / "none.yaml")])
    assert done.exit_code == 2
    assert "there is no such file" in done.output
    nowhere = str(tmp_path / "no" / "a.yaml")
    (tmp_path / "c.yaml").write_text(VERL)
    done = CliRunner().invoke(
        app, ["import", "verl", str(tmp_path / "c.yaml"), "--output", nowhere]
    )
    assert "there is no folder" in done.output
