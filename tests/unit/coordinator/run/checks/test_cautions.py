"""Cautions: what a recipe asks for and will not get."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.fake_recipes import fake_recipe

from rolemesh.coordinator.recipe.loading import load_recipe
from rolemesh.coordinator.run.checks.cautions import cautions

RECIPES = Path(__file__).parents[5] / "recipes"


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


@pytest.mark.parametrize(
    ("algorithm", "numerics", "is_told"),
    [("gspo", "fast", True), ("gspo", "exact", False), ("grpo", "fast", False)],
)
def test_a_clip_that_is_narrower_than_rounding_is_told(
    algorithm: str, numerics: str, is_told: bool
) -> None:
    section = {"type": algorithm, "sampling": {"samples_per_prompt": 2}, "mini_batch_rows": 6}
    recipe = fake_recipe(roles=("actor", "reward"), algorithm=section, numerics=numerics)
    told = [one for one in cautions(recipe, 1000, 100) if "numerics" in one.text]
    assert bool(told) == is_told
    if told:
        assert "clips ratios at 0.0003 and 0.0004" in told[0].text
