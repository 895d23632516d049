"""Cautions: what a recipe asks for and will not get."""

from __future__ import annotations

from pathlib import Path

import pytest

from rolemesh.coordinator.recipe.loading import load_recipe
from rolemesh.coordinator.run.cautions import cautions

RECIPES = Path(__file__).parents[4] / "recipes"


@pytest.mark.parametrize(
    ("name", "overrides", "is_told"),
    [
        ("sft", ["run.evaluation.num_prompts=128"], True),
        ("dpo", ["run.evaluation.num_prompts=128"], True),
        ("sft", ["run.evaluation.num_prompts=0"], False),
        ("quickstart-grpo", ["run.evaluation.num_prompts=64"], False),
    ],
)
def test_an_evaluation_that_will_not_be_is_told(
    name: str, overrides: list[str], is_told: bool
) -> None:
    recipe = load_recipe([RECIPES / f"{name}.yaml"], overrides=overrides)
    told = [one for one in cautions(recipe, 1000, 100) if "num_prompts" in one.text]
    assert bool(told) == is_told
    if is_told:
        assert "the 100 held-out rows are not used" in told[0].text
        assert "held_out_size" in told[0].remedy
