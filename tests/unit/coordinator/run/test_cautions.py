"""Cautions: what a recipe asks for and will not get."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.fake_recipes import fake_recipe

from rolemesh.coordinator.recipe.loading import load_recipe
from rolemesh.coordinator.run.cautions import cautions

RECIPES = Path(__file__).parents[4] / "recipes"


@pytest.mark.parametrize(
    ("name", "overrides", "told"),
    [
        ("sft", ["run.evaluation.num_prompts=128"], None),
        ("sft", ["run.evaluation.samples_per_prompt=4"], "samples_per_prompt is 4"),
        ("reward-model", ["run.evaluation.pass_at=[1]"], "pass_at is (1,)"),
        ("dpo", ["run.evaluation.num_prompts=0", "run.evaluation.samples_per_prompt=4"], None),
        ("quickstart-grpo", ["run.evaluation.samples_per_prompt=4"], None),
    ],
)
def test_a_setting_of_an_evaluation_without_samples_is_told(
    name: str, overrides: list[str], told: str | None
) -> None:
    recipe = load_recipe([RECIPES / f"{name}.yaml"], overrides=overrides)
    found = [one for one in cautions(recipe, 1000, 100) if "run.evaluation" in one.text]
    assert len(found) == (told is not None)
    if told is not None:
        assert told in found[0].text


UNJUDGED = """
def unjudged(prompts, actor):
    actor.update(actor.read_demonstrations(prompts))
"""


@pytest.mark.parametrize("num_prompts", [0, 64])
def test_an_evaluation_that_will_not_be_is_told(num_prompts: int, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(UNJUDGED)
    algorithm = {"type": "custom", "function": f"{tmp_path / 'own.py'}:unjudged"}
    recipe = fake_recipe(
        roles=("actor",), algorithm=algorithm, evaluation={"num_prompts": num_prompts}
    )
    told = [one for one in cautions(recipe, 1000, 100) if "num_prompts" in one.text]
    assert bool(told) == (num_prompts > 0)
    if told:
        assert "the 100 held-out rows are not used" in told[0].text
        assert "held_out_size" in told[0].remedy
