"""The recipe's numerics: what services are sent, and how policy losses weigh tokens."""

from __future__ import annotations

from typing import Any

import pytest
from support.fake_recipes import GRPO, PPO, fake_recipe

from rolemesh.coordinator.recipe.loading import dump_recipe, read_recipe
from rolemesh.coordinator.recipe.schema import Recipe


def _recipe(
    algorithm: dict[str, Any] = GRPO, *, numerics: str = "fast", prompts: int = 2
) -> Recipe:
    values = fake_recipe().model_dump(mode="json")
    values["run"] |= {"prompts_per_step": prompts, "numerics": numerics}
    return Recipe.model_validate({**values, "algorithm": algorithm})


def _loss(recipe: Recipe) -> Any:
    return recipe.algorithm.policy_loss  # type: ignore[union-attr]


def test_roles_are_told_of_fast_numerics_alone() -> None:
    assert _recipe(numerics="exact").sent_section("actor").numerics is None
    fast = _recipe()
    assert {fast.sent_section(role).numerics for role in fast.roles} == {"fast"}
    # The recipe itself stays as it was given.
    assert fast.actor is not None
    assert fast.actor.numerics is None


def test_a_role_may_compute_otherwise_than_the_recipe() -> None:
    values = _recipe().model_dump(mode="json")
    values["reference"]["numerics"] = "exact"
    recipe = Recipe.model_validate(values)
    assert recipe.sent_section("reference").chosen_numerics == "exact"
    assert recipe.sent_section("actor").chosen_numerics == "fast"


def test_fast_numerics_weigh_tokens_unless_the_recipe_says_otherwise() -> None:
    assert _loss(_recipe(numerics="exact")).importance_cap is None
    assert _loss(_recipe()).importance_cap == 2.0
    # What the algorithm's own default says beside it stays.
    assert _loss(_recipe()).aggregation == "seq_mean_token_mean"
    off = {**GRPO, "policy_loss": {"importance_cap": None}}
    assert _loss(_recipe(off)).importance_cap is None
    other = {**GRPO, "policy_loss": {"importance_cap": 5.0}}
    assert _loss(_recipe(other)).importance_cap == 5.0
    rloo = {**GRPO, "type": "rloo"}
    assert _loss(_recipe(rloo)).type == "reinforce"
    assert _loss(_recipe(rloo)).importance_cap == 2.0
    # Losses without such weights stay as they are.
    assert (
        _recipe({**GRPO, "type": "gspo"}).algorithm
        == _recipe({**GRPO, "type": "gspo"}, numerics="exact").algorithm
    )


def test_one_optimizer_step_needs_no_scoring_pass() -> None:
    # 2 prompts x 2 samples are one mini-batch of 4 rows; 3 prompts are two.
    assert _loss(_recipe(prompts=2)).proximal == "same_pass"
    assert "proximal_logprobs" not in _loss(_recipe(prompts=2)).columns()
    assert _loss(_recipe(prompts=3)).proximal == "scored"
    assert "proximal_logprobs" in _loss(_recipe(prompts=3)).columns()
    assert _loss(_recipe({**GRPO, "epochs": 2})).proximal == "scored"


def test_a_saved_recipe_says_what_was_filled_in() -> None:
    recipe = _recipe()
    assert read_recipe(dump_recipe(recipe), "saved") == recipe


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (
            {**PPO, "epochs": 3, "policy_loss": {"importance_cap": 2, "proximal": "same_pass"}},
            "a step makes 3 of optimizer steps",
        ),
        (
            {**PPO, "policy_loss": {"proximal": "same_pass"}},
            "'same_pass' without importance_cap",
        ),
    ],
    ids=["three steps", "no cap"],
)
def test_a_pass_that_is_not_at_the_start_is_refused(
    algorithm: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        _recipe(algorithm, numerics="exact")
