"""The graph of a step is built without any service, and names the section that is missing."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from support.fake_recipes import GRPO, PPO, PPO_ROLES, fake_recipe

from rolemesh.coordinator.dataflow.futures import NodeState
from rolemesh.coordinator.recipe.loading import load_recipe
from rolemesh.coordinator.run.checks.planning import plan_step

RECIPES = sorted((Path(__file__).parents[5] / "recipes").glob("*.yaml"))
KL = {"policy_loss": {"type": "ppo_policy", "kl_in_loss": 0.02}}


async def test_a_plan_has_the_calls_of_a_step_and_makes_none() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nodes = await plan_step(fake_recipe(roles=PPO_ROLES, algorithm=PPO))
    assert [node.name for node in nodes] == [
        "actor.generate",
        "critic.compute_values",
        "reference.compute_logprobs",
        "reward.compute_reward",
        "actor.compute_advantages",
        "critic.update",
        "actor.update",
    ]
    assert {node.state for node in nodes} == {NodeState.CANCELLED}


async def test_a_plan_with_rollout_services_brings_them_weights() -> None:
    recipe = fake_recipe(
        roles=("actor", "reward", "rollout"),
        algorithm=GRPO,
        services={"rollout": {"replicas": 2}},
        pools={"train": {"roles": ["actor", "reward"]}, "sample": {"roles": ["rollout"]}},
    )
    names = [node.name for node in await plan_step(recipe)]
    assert names[0] == "actor.publish_weights"
    assert {"rollout-0.update_weights", "rollout-1.generate"} <= set(names)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (
            {**GRPO, **KL},
            "algorithm 'grpo' cannot be run: algorithm.policy_loss.kl_in_loss is 0.02, which needs "
            "the column 'reference_logprobs', which the role reference makes, but the recipe has "
            "no section reference: add one (reference: {model: {path: FOLDER}}), or take "
            "algorithm.policy_loss.kl_in_loss out",
        ),
        (
            {**GRPO, "advantages": {"type": "grpo", "kl_in_reward": {"type": "fixed"}}},
            "algorithm.advantages.kl_in_reward is {'type': 'fixed', 'coefficient': 0.05}, which",
        ),
        (
            {**GRPO, **KL, "type": "dapo"},
            "but this algorithm does not use that role: take algorithm.policy_loss.kl_in_loss out, "
            "or take another algorithm",
        ),
    ],
)
async def test_a_missing_section_is_named_with_what_asks_for_it(
    algorithm: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match="cannot be run") as raised:
        await plan_step(fake_recipe(roles=("actor", "reward"), algorithm=algorithm))
    assert message in str(raised.value)


async def test_a_section_that_is_there_is_no_longer_missing() -> None:
    recipe = fake_recipe(roles=("actor", "reference", "reward"), algorithm={**GRPO, **KL})
    assert "reference.compute_logprobs" in [node.name for node in await plan_step(recipe)]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
async def test_every_recipe_has_all_sections_that_its_step_needs(path: Path) -> None:
    recipe = load_recipe([path])
    assert await plan_step(recipe) or recipe.algorithm.type == "external"


async def test_a_client_that_makes_the_steps_leaves_nothing_to_plan() -> None:
    assert await plan_step(fake_recipe(algorithm={"type": "external"})) == []
