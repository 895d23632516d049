"""Schedules that a recipe could have: who samples, and when, in place of what it says now."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from rolemesh.coordinator.recipe.algorithm.algorithms import SampledSpec
from rolemesh.coordinator.recipe.schema import Recipe

_APART = {
    "rollout services, sync": "sync",
    "rollout services, one step ahead": "one_step_ahead",
    "rollout services, async": "async",
}


def templates(recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    """The recipe with each schedule that it can have, its pools left open.

    Weights are as new as can be in the synchronous ones alone: the others change what is learnt,
    so that a plan compares them and chooses none.
    """
    section = recipe.algorithm
    if not isinstance(section, SampledSpec) or section.chooses_prompts or recipe.actor is None:
        return
    tree = recipe.model_dump(mode="json", exclude={"pools"}, exclude_unset=True)
    sampler = recipe.sampler
    if sampler is None:
        return
    rollout = sampler.model_dump(mode="json", exclude_unset=True) | {"type": sampler.type}
    actor: dict[str, Any] = tree["actor"]
    own = {**tree, "actor": {**actor, "rollout": rollout}, "schedule": {}}
    own.pop("rollout", None)
    services = {name: spec for name, spec in tree.get("services", {}).items() if name != "rollout"}
    variants = {"the actor samples": {**own, "services": services}}
    apart = tree.get("rollout") or {
        "model": {"path": actor["model"]["path"]},
        "rollout": rollout,
        **{key: actor[key] for key in ("data", "environment") if key in actor},
    }
    without = {key: value for key, value in actor.items() if key not in ("rollout", "generate")}
    others = [role for role in recipe.roles if role != "rollout"]
    # A sampler that is ahead must have a pool of its own; which one is what a plan finds.
    pools = {"others": {"roles": others}, "rollout": {"roles": ["rollout"]}}
    for name, kind in _APART.items():
        schedule = {"sampler": {"type": kind}}
        changed = {"actor": without, "rollout": apart, "schedule": schedule, "pools": pools}
        variants[name] = {**tree, **changed}
    for name, variant in variants.items():
        try:
            yield name, Recipe.model_validate(variant)
        except ValidationError:
            # A loss, say, that cannot correct for old weights: this recipe cannot have it.
            continue
