"""Estimators of groups in a recipe: weights of several rewards, and groups large enough for k."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from support.fake_recipes import fake_recipe

from rolemesh.coordinator.recipe.loading import dump_recipe, read_recipe
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.run.checks.planning import plan_step

REWARDS = {
    "source": [
        {"source": {"type": "arithmetic"}, "weight": 2.0},
        {"source": {"type": "environment"}, "name": "game", "weight": 0.5},
    ]
}
STEP = """
def step(prompts, actor, reward):
    rollouts = actor.generate(prompts)
    rollouts |= reward.compute_reward(rollouts)
    rollouts |= actor.compute_advantages(rollouts, "{}")
    actor.update(rollouts)
"""


def recipe_of(
    advantages: dict[str, Any],
    *,
    reward: Any = REWARDS,
    folder: Path | None = None,
    samples: int = 4,
) -> Recipe:
    function = "step.py:step"
    if folder is not None:
        (folder / "step.py").write_text(STEP.format(advantages["type"]))
        function = f"{folder / 'step.py'}:step"
    algorithm = {
        "type": "custom",
        "function": function,
        "sampling": {"samples_per_prompt": samples},
        "advantages": advantages,
        "policy_loss": {"type": "ppo_policy"},
        "mini_batch_rows": 4,
    }
    return fake_recipe(roles=("actor", "reward"), algorithm=algorithm, reward=reward)


def weights_of(recipe: Recipe) -> Any:
    return recipe.algorithm.advantages.weights  # type: ignore[union-attr]


def test_weights_of_several_rewards_stand_once() -> None:
    recipe = recipe_of({"type": "gdpo"})
    assert weights_of(recipe) == {"arithmetic": 2.0, "game": 0.5}
    assert recipe.reward_columns == ("reward/arithmetic", "reward/game")
    # As it is stored, and sent to the actor.
    assert read_recipe(dump_recipe(recipe), "stored") == recipe
    given = {"type": "gdpo", "weights": {"game": 1.0}}
    assert weights_of(recipe_of(given)) == {"game": 1.0}


def test_gdpo_needs_the_sources_that_it_weighs() -> None:
    with pytest.raises(ValidationError, match=r"reward\.source is 'arithmetic' alone: give a list"):
        recipe_of({"type": "gdpo"}, reward=None)
    with pytest.raises(ValidationError, match=r"weights has 'length', but .*arithmetic, game"):
        recipe_of({"type": "gdpo", "weights": {"length": 1.0}})


def test_pass_at_k_needs_more_completions_than_k() -> None:
    with pytest.raises(ValidationError, match=r"advantages\.k is 4, but .*samples_per_prompt is 4"):
        recipe_of({"type": "pass_at_k"})
    assert recipe_of({"type": "pass_at_k"}, samples=5)


async def test_the_rewards_of_each_source_are_columns_of_a_step(tmp_path: Path) -> None:
    """Only where there are several: a source alone is the column rewards."""
    for advantages in (
        {"type": "gdpo"},
        {"type": "python", "function": "own.py:f", "reads": ["reward/game"]},
    ):
        nodes = await plan_step(recipe_of(advantages, folder=tmp_path))
        assert "actor.compute_advantages" in [node.name for node in nodes]
    with pytest.raises(ValueError, match="'reward/game'"):
        await plan_step(recipe_of(advantages, reward=None, folder=tmp_path))
