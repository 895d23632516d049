"""Simulated runs of recipes that need no model, with seconds of calls that a test chooses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from support.fake_recipes import PPO, fake_recipe, split_pools

from rolemesh.coordinator.mapping.job.work import Lengths
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.simulation.faults import Faults
from rolemesh.coordinator.simulation.run import Outcome, simulate
from rolemesh.coordinator.simulation.timing import RowLengths, Settings, Timing

ROLES = ("actor", "critic", "reference", "reward")
SECONDS: Mapping[str, float] = {
    "actor.generate": 4.0,
    "rollout.generate": 4.0,
    "critic.compute_values": 0.5,
    "reference.compute_logprobs": 0.75,
    "reward.compute_reward": 0.125,
    "actor.compute_advantages": 0.0625,
    "critic.update": 2.0,
    "actor.update": 3.0,
    "actor.publish_weights": 0.25,
    "rollout.update_weights": 0.5,
}
"""Of calls over all rows. Sums of these have no rounding."""


def ppo(
    *,
    sampler: dict[str, Any] | None = None,
    samplers: int = 0,
    steps: int = 4,
    pools: dict[str, Any] | None = None,
    **run: Any,
) -> Recipe:
    """PPO with a pool for each role; with `samplers` > 0, as many rollout services."""
    roles = (*ROLES, *(["rollout"] if samplers else []))
    return fake_recipe(
        roles=roles,
        algorithm=PPO,
        sampler=sampler,
        pools=split_pools(roles) if pools is None else pools,
        services={"rollout": {"replicas": samplers}} if samplers > 1 else None,
        evaluation={"num_prompts": 0},
        steps=steps,
        prompts_per_step=max(4, samplers),
        **{"recovery": {"attempts": 20}, **run},
    )


def timing(seconds: Mapping[str, float] = SECONDS, *, tokens: float | None = None) -> Timing:
    """Calls that take so long; `tokens` of a step, where a call over fewer takes less."""
    calls = {tuple(name.split(".")): (spent,) for name, spent in seconds.items()}
    calls |= {(role, "generate"): (0.0,) for role in ("actor", "rollout")}

    def decoding(role: str) -> Any:
        spent = seconds.get(f"{role}.generate", 0.0)
        return lambda lengths: [spent] * len(lengths)

    return Timing(
        calls=calls,  # type: ignore[arg-type]
        tokens=tokens,
        decoding={role: decoding(role) for role in ("actor", "rollout")},
    )


def simulated(
    recipe: Recipe,
    *,
    seconds: Mapping[str, float] = SECONDS,
    tokens: float | None = None,
    start_s: float = 16.0,
    faults: Faults | None = None,
) -> Outcome:
    """What the run comes to: rows have 1 token of prompt and 1 of completion."""
    return simulate(
        recipe,
        Settings(
            timing=timing(seconds, tokens=tokens),
            lengths=RowLengths(Lengths.fixed(1), 0),
            prompt_tokens=1,
            start_s=start_s,
            faults=faults or Faults(),
        ),
    )
