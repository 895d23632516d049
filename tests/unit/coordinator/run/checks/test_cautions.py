"""Cautions: what a recipe asks for and will not get."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.fake_recipes import GRPO, fake_recipe

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


CAPPED = {"off_policy": {"type": "token_truncation", "cap": 2.0}}


@pytest.mark.parametrize(
    ("sampler", "algorithm", "told"),
    [
        ({"type": "async", "max_staleness": 3}, {}, "up to 3 steps old sample, .* clip of the"),
        ({"type": "one_step_ahead"}, {}, "up to 1 step old sample"),
        ({"type": "async"}, {"type": "gspo"}, "'gspo' is around them"),
        ({"type": "async"}, {"type": "rloo"}, "'reinforce' takes their samples for its own"),
        ({"type": "async"}, CAPPED, None),
        ({"type": "async"}, {"type": "cispo"}, None),
        ({"type": "async"}, {"policy_loss": "python:loss.py:f"}, None),
        ({"type": "sync"}, {}, None),
    ],
)
def test_old_weights_without_a_correction_are_told(
    sampler: dict[str, Any], algorithm: dict[str, Any], told: str | None
) -> None:
    recipe = fake_recipe(
        roles=("actor", "reward", "rollout"),
        algorithm={**GRPO, **algorithm},
        sampler=sampler,
        pools={"train": {"roles": ["actor", "reward"]}, "sample": {"roles": ["rollout"]}},
    )
    found = [one for one in cautions(recipe, 1000, 100) if "schedule.sampler" in one.text]
    assert len(found) == (told is not None)
    if told is not None:
        assert re.search(told, found[0].text)
        assert "algorithm.off_policy: {type: token_truncation, cap: 2.0}" in found[0].remedy


@pytest.mark.parametrize(
    ("algorithm", "numerics", "is_told"),
    [
        ({"type": "gspo", "off_policy": None}, "fast", True),
        ({"type": "gspo"}, "fast", False),
        ({"type": "gspo"}, "exact", False),
        ({"off_policy": None}, "fast", False),
    ],
)
def test_a_clip_that_is_narrower_than_rounding_is_told(
    algorithm: dict[str, Any], numerics: str, is_told: bool
) -> None:
    section = {**GRPO, "mini_batch_rows": 6, **algorithm}
    recipe = fake_recipe(roles=("actor", "reward"), algorithm=section, numerics=numerics)
    told = [one for one in cautions(recipe, 1000, 100) if "numerics" in one.text]
    assert bool(told) == is_told
    if told:
        assert "clips ratios at 0.0003 and 0.0004" in told[0].text
