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


def _off_policy(recipe: Recipe) -> Any:
    section = recipe.algorithm.off_policy  # type: ignore[union-attr]
    assert section == _loss(recipe).off_policy
    return section


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
    assert _off_policy(_recipe(numerics="exact")) is None
    assert _off_policy(_recipe()).type == "token_truncation"
    assert _off_policy(_recipe()).cap == 2.0
    # What the algorithm's own default says beside it stays.
    assert _loss(_recipe()).aggregation == "seq_mean_token_mean"
    assert _off_policy(_recipe({**GRPO, "off_policy": None})) is None
    other = {**GRPO, "off_policy": {"type": "masking"}}
    assert _off_policy(_recipe(other)).high == 5.0
    for name, loss in (("rloo", "reinforce"), ("gspo", "gspo")):
        recipe = _recipe({**GRPO, "type": name})
        assert _loss(recipe).type == loss
        assert _off_policy(recipe).cap == 2.0
    # One that corrects itself stays as it is.
    cispo = {**GRPO, "type": "cispo"}
    assert _recipe(cispo).algorithm == _recipe(cispo, numerics="exact").algorithm


def test_one_optimizer_step_needs_no_scoring_pass() -> None:
    # 2 prompts x 2 samples are one mini-batch of 4 rows; 3 prompts are two.
    assert _loss(_recipe(prompts=2)).weighs_by == "same_pass"
    assert "proximal_logprobs" not in _loss(_recipe(prompts=2)).columns()
    assert _loss(_recipe(prompts=3)).weighs_by == "scored"
    assert "proximal_logprobs" in _loss(_recipe(prompts=3)).columns()
    assert _loss(_recipe({**GRPO, "epochs": 2})).weighs_by == "scored"
    # Its weights are those of the policy now anyway.
    assert _loss(_recipe({**GRPO, "type": "rloo"}, prompts=3)).weighs_by == "now"


def test_a_saved_recipe_says_what_was_filled_in() -> None:
    recipe = _recipe()
    assert read_recipe(dump_recipe(recipe), "saved") == recipe


CAPPED = {"type": "token_truncation", "cap": 2.0}


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (
            {**PPO, "epochs": 3, "off_policy": {**CAPPED, "proximal": "same_pass"}},
            "a step makes 3 of optimizer steps",
        ),
        (
            {**PPO, "policy_loss": {"importance_cap": 2.0}},
            r"importance_cap is 2.0, .* algorithm.off_policy: {type: token_truncation, cap: 2.0}",
        ),
        (
            {**GRPO, "type": "rloo", "policy_loss": {"type": "reinforce", "importance_cap": None}},
            "importance_cap is None, .* give algorithm.off_policy: null",
        ),
        (
            {**PPO, "policy_loss": {"proximal": "same_pass"}},
            "proximal is 'same_pass', .* cap: 2.0, proximal: same_pass}",
        ),
        (
            {**PPO, "policy_loss": {"off_policy": CAPPED}},
            "policy_loss.off_policy is 'token_truncation', .* in algorithm.off_policy: move it",
        ),
        (
            {**GRPO, "type": "online_dpo", "off_policy": CAPPED},
            "off_policy is 'token_truncation', but policy_loss is 'dpo'",
        ),
        (
            {**PPO, "off_policy": {**CAPPED, "normalize": "batch", "proximal": "same_pass"}},
            "normalize is 'batch' and proximal is 'same_pass'",
        ),
        (
            {**PPO, "off_policy": {"type": "masking", "low": 1.5}},
            "low is 1.5 and high is 5, which leaves out the ratio 1",
        ),
    ],
    ids=[
        *("three steps", "old cap", "no old cap", "old proximal", "within the loss"),
        *("no log-probs of sampling", "unknown mean", "bounds beside 1"),
    ],
)
def test_a_correction_that_cannot_be_made_is_refused(
    algorithm: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        _recipe(algorithm, numerics="exact")


@pytest.mark.parametrize(
    "algorithm",
    [
        PPO,
        {**GRPO, "type": "gspo"},
        {**GRPO, "type": "cispo"},
        {**GRPO, "type": "custom", "function": "f", "policy_loss": "reinforce"},
        {**PPO, "policy_loss": "python:loss.py:f"},
    ],
    ids=["ppo", "gspo", "cispo", "custom", "own loss"],
)
def test_the_section_travels_within_the_loss_of_every_algorithm(algorithm: dict[str, Any]) -> None:
    recipe = _recipe({**algorithm, "off_policy": {"type": "sequence_truncation", "cap": 3}})
    assert _loss(recipe).off_policy == _off_policy(recipe)
    assert _off_policy(recipe).cap == 3.0
    assert read_recipe(dump_recipe(recipe), "saved") == recipe
