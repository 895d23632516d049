"""Every recipe of the repository loads, and survives being written and read."""

from __future__ import annotations

from pathlib import Path

import pytest

from rolemesh.coordinator.recipe_loading import dump_recipe, load_recipe

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


def test_there_are_recipes() -> None:
    assert {"quickstart-ppo", "classifier-reward-ppo"} <= {path.stem for path in RECIPES}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_loads_and_is_named_like_its_file(path: Path) -> None:
    assert load_recipe([path]).run.name == path.stem


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_resolved_recipe_loads_to_an_equal_one(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe([path])
    written = tmp_path / "config.yaml"
    written.write_text(dump_recipe(recipe))
    assert load_recipe([written]) == recipe


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_evaluation_asks_for_no_more_prompts_than_are_held_out(path: Path) -> None:
    recipe = load_recipe([path])
    held_out = getattr(recipe.actor.data, "held_out_size", None)
    assert held_out is None or recipe.run.evaluation.num_prompts <= held_out
