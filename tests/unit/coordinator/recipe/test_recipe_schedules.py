"""Schedules, replicas and pools of a recipe that cannot work are refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from support.fake_recipes import PPO_ROLES, fake_recipe, split_pools

from rolemesh.coordinator.recipe.schema import Recipe

ROLES = (*PPO_ROLES, "rollout")
APART = {"roles": ROLES, "pools": split_pools(ROLES)}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"sampler": {"type": "sync", "block_rows": 3}},
            r"block_rows is 3 and algorithm\.sampling\.samples_per_prompt is 2: give a multiple",
        ),
        (
            {"sampler": {"type": "sync", "batch_size": 4}},
            r"batch_size is 4, but run\.prompts_per_step is 3",
        ),
        (
            {"roles": ("actor",), "algorithm": {"type": "sft"},
             "sampler": {"type": "sync", "block_rows": 2}},
            r"block_rows is given, but algorithm 'sft' samples nothing",
        ),
        (
            {"roles": ("actor",), "algorithm": {"type": "sft"},
             "sampler": {"type": "sync", "batch_size": 2}},
            r"batch_size is given, but algorithm 'sft' samples nothing",
        ),
        ({"sampler": {"type": "async"}}, "but there is no rollout section: add one"),
        (
            {"sampler": {"type": "sync", "weights": "nccl"}},
            r"weights is 'nccl', but there is no rollout section",
        ),
        (
            {"roles": ("actor", "rollout"), "pools": split_pools(("actor", "rollout")),
             "algorithm": {"type": "sft"}, "sampler": {"type": "sync", "weights": "nccl"}},
            r"weights is 'nccl', but algorithm 'sft' samples nothing by itself",
        ),
        (
            {"roles": ROLES, "sampler": {"type": "sync", "weights": "nccl"}},
            r"weights is 'nccl', but the actor and the rollout role share a pool",
        ),
        ({"sampler": {"type": "one_step_ahead"}}, "but there is no rollout section: add one"),
        (
            {"roles": ROLES, "sampler": {"type": "async"}},
            "the rollout role shares its pool with actor, critic, reference, reward",
        ),
        (
            {**APART, "sampler": {"type": "async", "max_staleness": 0}},
            r"max_staleness\n.*greater than or equal to 1",
        ),
        (
            {"roles": ("actor", "reward", "rollout"),
             "pools": split_pools(("actor", "reward", "rollout")),
             "algorithm": {"type": "dapo"}, "sampler": {"type": "async"}},
            "'async', which algorithm 'dapo' cannot be run with",
        ),
        ({"services": {"critic": {"replicas": 2}}}, "services.critic: has replicas, which only"),
        (
            {"services": {"critic": {"addresses": ["h:1", "h:2"]}}},
            "services.critic: has replicas, which only",
        ),
        (
            {**APART, "services": {"rollout": {"replicas": 4}}},
            r"has 4 services, but a step's 3 prompts make 3 calls",
        ),
        (
            {**APART, "services": {"rollout": {"replicas": 2}},
             "sampler": {"type": "sync", "batch_size": 3}},
            r"has 2 services, but a step's 3 prompts make 1 calls",
        ),
        (
            {"roles": ROLES, "services": {"rollout": {"replicas": 2}}},
            r"the rollout role shares its pool with actor, critic, reference, reward: give it",
        ),
        (
            {**APART, "services": {"reward": {"replicas": 2}}},
            r"services\.reward has 2 services, which share the blocks of a step's rows, but there "
            r"is 1: lower",
        ),
        (
            {**APART, "services": {"reference": {"replicas": 4}},
             "sampler": {"type": "sync", "batch_size": 2, "block_rows": 2}},
            r"services\.reference has 4 services, .* but there are 3: lower",
        ),
        (
            {"services": {"reward": {"replicas": 2}}, "sampler": {"type": "sync", "block_rows": 2}},
            r"services\.reward has 2 services, each on devices of its own, but the reward role "
            r"shares its pool with actor, critic, reference: give it",
        ),
        (
            {**APART, "services": {"rollout": {"replicas": 2, "address": "h:1"}}},
            "address and replicas are given: give one of them",
        ),
        ({"pools": {"all": {"roles": [*PPO_ROLES, "tutor"]}}}, "pools: no role 'tutor'"),
        ({"pools": {"some": {"roles": ["actor"]}}}, "role 'critic' stands in 0 pools"),
        (
            {"pools": {"a": {"roles": list(PPO_ROLES)}, "b": {"roles": ["actor"]}}},
            "role 'actor' stands in 2 pools",
        ),
        ({"services": {"tutor": {}}}, "services.tutor: no such role"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_with_field_value_and_remedy(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        fake_recipe(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"sampler": {"type": "sync", "block_rows": 4, "batch_size": 3}},
        {**APART, "services": {"rollout": {"replicas": 3}}},
        {**APART, "services": {"reward": {"replicas": 3}, "rollout": {"replicas": 3}}},
        {
            **APART,
            "services": {"reference": {"replicas": 2}},
            "sampler": {"type": "sync", "block_rows": 4},
        },
        {**APART, "sampler": {"type": "async", "batch_size": 1, "block_rows": 2}},
        {"roles": ROLES},
    ],
)
def test_what_works_is_taken(values: dict[str, Any]) -> None:
    recipe = fake_recipe(**values)
    assert recipe.roles == values.get("roles", PPO_ROLES)


@pytest.mark.parametrize(
    ("sampler", "is_refused"),
    [
        ({"type": "async", "weights": "nccl"}, True),
        ({"type": "async", "weights": "nccl", "partial_rollouts": False}, False),
        ({"type": "one_step_ahead", "weights": "nccl"}, False),
        ({"type": "async"}, False),
    ],
)
def test_slices_that_sample_take_no_weights_by_nccl_meanwhile(
    sampler: dict[str, Any], is_refused: bool
) -> None:
    sections = fake_recipe(**APART).model_dump(mode="json")  # type: ignore[arg-type]
    sections["rollout"]["layout"]["tp"] = 2
    sections["schedule"]["sampler"] = sampler
    if not is_refused:
        assert Recipe.model_validate(sections).layout("rollout").tp == 2
        return
    with pytest.raises(ValidationError, match=r"rollout\.layout has 2 ranks, which exchange"):
        Recipe.model_validate(sections)


def test_the_budget_of_a_pass_is_a_setting_of_the_model() -> None:
    sections = fake_recipe().model_dump(mode="json")
    sections["actor"]["model"]["micro_batch_tokens"] = 2048
    assert Recipe.model_validate(sections).section("actor").model.micro_batch_tokens == 2048
    # What an earlier version saved of a run without the setting.
    sections["schedule"]["updater"]["micro_batch_tokens"] = None
    assert Recipe.model_validate(sections).schedule.updater.type == "sync"
    sections["schedule"]["updater"]["micro_batch_tokens"] = 2048
    with pytest.raises(ValidationError, match=r"give it as actor\.model\.micro_batch_tokens"):
        Recipe.model_validate(sections)


def test_an_algorithm_that_samples_needs_a_sampler() -> None:
    recipe = fake_recipe(roles=ROLES)
    sections = recipe.model_dump(mode="json")
    sections["actor"]["rollout"] = None
    assert recipe.rollout is not None, "a rollout role samples: the actor needs no sampler"
    assert Recipe.model_validate(sections).actor is not None
    without = {**sections, "rollout": None}
    without["pools"] = {"all": {"roles": list(PPO_ROLES)}}
    with pytest.raises(
        ValidationError, match=r"samples, but the recipe names no sampler: give actor\.rollout"
    ):
        Recipe.model_validate(without)


def test_replicas_have_names_and_addresses_in_order() -> None:
    recipe = fake_recipe(**APART, services={"rollout": {"addresses": ["a:1", "b:2"]}})
    assert recipe.services_of("rollout") == ("rollout-0", "rollout-1")
    assert [recipe.address(s) for s in recipe.services_of("rollout")] == ["a:1", "b:2"]
    assert recipe.services_of("actor") == ("actor",)
