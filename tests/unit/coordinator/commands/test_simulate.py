"""Tests of `rolemesh simulate` as people call it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer.testing
from support.mapping_jobs import LLAMAS

from rolemesh.coordinator.commands.simulate import app

RECIPE = """
run: {{name: simulated, steps: 1, prompts_per_step: 64}}
algorithm: {{type: grpo, sampling: {{max_new_tokens: 512, samples_per_prompt: 4}},
  mini_batch_rows: 64}}
actor:
  model: {{path: {model}}}
  rollout: {{type: vllm, max_model_len: 1024}}
  data: {{type: jsonl, path: data.jsonl}}
reference: {{model: {{path: {model}}}}}
reward: {{source: {{type: arithmetic}}}}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMAS["7B"]))
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(model=model))
    return path


def simulate(*arguments: str | Path, code: int = 0) -> str:
    result = typer.testing.CliRunner().invoke(app, [str(one) for one in arguments])
    assert result.exit_code == code, result.output
    return result.output


def told(*arguments: str | Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(simulate(*arguments, "--json"))["simulated"]
    return found


def test_constant_lengths_take_what_the_plan_predicts(recipe: Path) -> None:
    (one,) = told(recipe, "--gpus", "8", "--gpu", "h100", "--steps", "3")
    # Beside it the cut of each step.
    assert one["predicted_s"] <= one["period_s"] <= 1.1 * one["predicted_s"]
    assert one["steps"] == 3
    assert one["losses"] == one["recoveries"] == []


def test_a_sampler_of_plain_transformers_takes_what_the_plan_predicts(recipe: Path) -> None:
    recipe.write_text(recipe.read_text().replace("type: vllm, ", "type: hf, "))
    (one,) = told(recipe, "--gpus", "8", "--gpu", "h100", "--steps", "3")
    assert one["predicted_s"] <= one["period_s"] <= 1.1 * one["predicted_s"]


def test_the_same_seed_gives_the_same_output_and_another_one_another(recipe: Path) -> None:
    options = ("--gpus", "8", "--gpu", "h100", "--steps", "3", "--completion-tokens", "100")
    faults = ("--losses", "1", "--stragglers", "0.3", "--start-s", "5", "--json")
    first = simulate(recipe, *options, *faults, "--seed", "1")
    assert simulate(recipe, *options, *faults, "--seed", "1") == first
    assert simulate(recipe, *options, *faults, "--seed", "2") != first
    (one,) = json.loads(first)["simulated"]
    assert one["steps"] == 3
    assert len(one["losses"]) == len(one["recoveries"]) == 1


def test_schedules_stand_side_by_side(recipe: Path) -> None:
    output = simulate(
        recipe, "--gpus", "8", "--gpu", "h100", "--steps", "3", "--schedules", "--samplers", "2"
    )
    for text in ("the actor", "sync", "ahead", "async", "predicted by", "train on older weights"):
        assert text in output


def test_samplers_that_cannot_be_are_refused(recipe: Path) -> None:
    options = ("--gpus", "8", "--gpu", "h100", "--samplers")
    assert "--samplers is 2, but no rollout role" in simulate(recipe, *options, "2", code=2)
    rest = ("65", "--schedules", "--steps", "2")
    assert "--samplers is 65, but run.prompts_per_step is 64" in simulate(
        recipe, *options, *rest, code=2
    )


def test_a_model_that_fits_nowhere_says_what_is_missing(recipe: Path) -> None:
    assert "needs" in simulate(recipe, "--gpus", "1", "--gpu", "rtx4090", code=1)
