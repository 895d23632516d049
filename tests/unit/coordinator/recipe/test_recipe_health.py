"""Rules of run.health in a recipe: defaults, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from support.fake_recipes import fake_recipe

from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.loading import dump_recipe, load_recipe
from rolemesh.coordinator.recipe.sections.health import RULES, HealthSpec


def recipe_with(tmp_path: Any, health: dict[str, Any], **run: Any) -> Any:
    values = yaml.safe_load(dump_recipe(fake_recipe(**run)))
    values["run"]["health"] = health
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return load_recipe([path])


def test_only_what_is_no_number_strikes_unless_a_recipe_says_so() -> None:
    assert HealthSpec().rules_that("stop") == ["not_finite"]
    assert set(RULES) < HealthSpec.model_fields.keys()
    shown = yaml.safe_load(dump_recipe(fake_recipe()))["run"]["health"]
    assert shown["not_finite"] == {"do": "stop", "back": 1, "enabled": True}
    assert shown["grad_norm"] == {"do": "stop", "back": 1, "steps": 1, "above": None}
    for rule in RULES:
        for name, field in type(getattr(HealthSpec(), rule)).model_fields.items():
            assert field.description, name


def test_a_recipe_with_all_rules_is_read_as_it_was_written(tmp_path: Any) -> None:
    health = {
        "not_finite": {"do": "skip"},
        "grad_norm": {"above": {"actor": 10.0, "critic": 100.0}, "steps": 2},
        "kl": {"above": 2.0, "do": "roll_back", "back": 5},
        "length": {"growth": 3.0, "truncated": 0.5},
    }
    recipe = recipe_with(tmp_path, health)
    (tmp_path / "saved.yaml").write_text(dump_recipe(recipe))
    assert load_recipe([tmp_path / "saved.yaml"]) == recipe
    assert recipe.run.health.rules_that("skip") == ["not_finite"]


@pytest.mark.parametrize(
    ("health", "message"),
    [
        ({"kl": {"above": 0}}, r"run\.health\.kl\.above is 0 .*: give more than 0"),
        ({"kl": {"above": ".nan"}}, r"run\.health\.kl\.above is '\.nan'"),
        ({"kl": {"above": float("inf")}}, r"run\.health\.kl\.above is inf .*: give a finite"),
        ({"kl": {"below": 1}}, r"run\.health\.kl\.below: unknown key"),
        ({"kl": {"above": 1, "do": "pause"}}, r"run\.health\.kl\.do is 'pause'"),
        ({"kl": {"above": 1, "steps": 0}}, r"run\.health\.kl\.steps is 0"),
        ({"kl": {"do": "skip"}}, r"run\.health\.kl: do is 'skip', but the rule has no bound .*give "
         r"above, or leave the rule out"),
        ({"length": {"steps": 3}}, r"steps is 3, but the rule has no bound .*growth or truncated"),
        ({"length": {"growth": 1.0}}, r"run\.health\.length\.growth is 1\.0"),
        ({"entropy": {"below": 1, "back": 3}}, r"health\.entropy: back is 3, but do is 'stop'"),
        ({"not_finite": {"enabled": False, "do": "skip"}}, r"do is 'skip', but enabled is false"),
        ({"grad_norm": {"above": {"reference": 1}}}, r"run\.health\.grad_norm\.above\.reference"),
        ({"grad_norm": {"above": {}}}, r"run\.health\.grad_norm\.above is \{\}"),
        ({"most_skips": 0}, r"run\.health\.most_skips is 0"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_with_field_value_and_remedy(
    health: dict[str, Any], message: str, tmp_path: Any
) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe_with(tmp_path, health)


def test_skipping_needs_cuts(tmp_path: Any) -> None:
    with pytest.raises(RecipeError, match=r"health\.kl\.do is 'skip', .*but recovery\.cuts is fal"):
        recipe_with(tmp_path, {"kl": {"above": 1, "do": "skip"}}, recovery={"cuts": False})


def test_a_role_that_is_bounded_must_be_there(tmp_path: Any) -> None:
    sft = {"roles": ("actor",), "algorithm": {"type": "sft"}}
    with pytest.raises(RecipeError, match=r"grad_norm\.above\.critic: the recipe has no section"):
        recipe_with(tmp_path, {"grad_norm": {"above": {"critic": 1}}}, **sft)
