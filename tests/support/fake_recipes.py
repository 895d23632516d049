"""Recipes that the fake roles can run: one for each algorithm and schedule."""

from __future__ import annotations

from typing import Any

from rolemesh.coordinator.recipe.schema import Recipe

_MODEL = {"path": "/models/none"}
_DATA = {"type": "jsonl", "path": "/data/none.jsonl"}
SECTIONS: dict[str, dict[str, Any]] = {
    "actor": {"model": _MODEL, "rollout": {"type": "hf"}, "data": _DATA},
    "critic": {"model": _MODEL},
    "reference": {"model": _MODEL},
    "teacher": {"model": _MODEL},
    "reward": {"source": {"type": "arithmetic"}},
    "cost": {"source": {"type": "arithmetic"}},
    "rollout": {"model": _MODEL, "rollout": {"type": "hf"}, "data": _DATA},
}
"""A section of each role."""
TRAINED_REWARD: dict[str, Any] = {
    "source": {"type": "classifier", "model": _MODEL},
    "optimizer": {},
    "data": _DATA,
}
"""A reward that learns."""
PPO: dict[str, Any] = {
    "type": "ppo",
    "sampling": {"samples_per_prompt": 2},
    "advantages": {"kl_in_reward": {"type": "fixed"}},
    "mini_batch_rows": 4,
}
GRPO: dict[str, Any] = {
    "type": "grpo",
    "sampling": {"samples_per_prompt": 2},
    "mini_batch_rows": 4,
}
PPO_ROLES = ("actor", "critic", "reference", "reward")


def role_sections(roles: tuple[str, ...]) -> dict[str, Any]:
    """Sections of these roles."""
    return {role: SECTIONS[role] for role in roles}


def split_pools(roles: tuple[str, ...]) -> dict[str, Any]:
    """A pool for each role."""
    return {role: {"roles": [role]} for role in roles}


def fake_recipe(
    *,
    roles: tuple[str, ...] = PPO_ROLES,
    algorithm: dict[str, Any] = PPO,
    sampler: dict[str, Any] | None = None,
    pools: dict[str, Any] | None = None,
    services: dict[str, Any] | None = None,
    reward: dict[str, Any] | None = None,
    **run: Any,
) -> Recipe:
    """A recipe that the fakes can run.

    Args:
        roles: Roles that have a section.
        algorithm: The algorithm section.
        sampler: The schedule's sampler section.
        pools: The pools section; None: all roles in one.
        services: The services section.
        reward: The reward section; None: one that judges by arithmetic.
        **run: Fields of the run section.
    """
    values: dict[str, Any] = {
        "run": {
            "name": "fake",
            "steps": 4,
            "prompts_per_step": 3,
            "evaluation": {"num_prompts": 8},
            # The fakes serve no columns.
            "samples": 0,
            # What a failure ends. Tests of recovery say otherwise.
            "recovery": {"attempts": 0},
            **run,
        },
        "algorithm": algorithm,
        **role_sections(roles),
        "store": {"type": "memory"},
    }
    if reward is not None:
        values["reward"] = reward
    if sampler is not None:
        values["schedule"] = {"sampler": sampler}
    if pools is not None:
        values["pools"] = pools
    if services is not None:
        values["services"] = services
    return Recipe.model_validate(values)
