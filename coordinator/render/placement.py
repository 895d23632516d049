"""Placement of roles on the GPUs of a host, where the recipe does not state it."""

from __future__ import annotations

from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.engine.specs import ClassifierRewardSpec, named_sources

_LAYOUTS = {
    "actor": "actor.train",
    "critic": "critic.train",
    "reference": "reference.layout",
    "rollout": "rollout.layout",
    "reward": "reward.layout",
    "cost": "cost.layout",
}
"""Field that holds a role's layout. Roles get the remaining GPUs in this order."""


def needs_gpu(recipe: Recipe, role: str) -> bool:
    """Whether a role computes with a model. A reward from outside, or one that compares, does not.

    Example: the quickstart's reward, which reads numbers, needs none.
    """
    section = recipe.section(role)
    source = getattr(section, "source", None)
    if source is None:
        return True
    return any(isinstance(one.source, ClassifierRewardSpec) for one in named_sources(source))


def names_gpus(recipe: Recipe) -> bool:
    """Whether the recipe's own pools say which GPUs there are."""
    return any(device != "cpu" for pool in recipe.pools.values() for device in pool.devices)


def spread(recipe: Recipe, num_gpus: int) -> list[str]:
    """Settings that place a recipe's roles on GPUs so that no GPU is idle, if its layouts allow.

    Each role with a model gets its own GPUs while there are enough. The remaining GPUs go to roles
    whose layout is one rank, actor first, as data parallelism: their number of ranks doubles while
    there is room. With too few GPUs, the actor keeps its own and the others take turns on the last
    one. On a single GPU all roles take turns.

    Args:
        recipe: A recipe in which no pool names a GPU.
        num_gpus: GPUs of the host.

    Returns:
        Texts for `--set`, e.g. ["pools={actor: {devices: ['cuda:0', 'cuda:1'], roles: [actor]},
        ...}", "actor.train.dp=2"].

    Raises:
        RecipeError: The layouts of the recipe need more GPUs than there are.
    """
    models = [role for role in _LAYOUTS if role in recipe.roles and needs_gpu(recipe, role)]
    others = [role for role in recipe.roles if role not in models]
    ranks = {role: recipe.layout(role).world_size for role in models}
    if len(models) <= num_gpus:
        groups = [[role] for role in models]
    elif num_gpus == 1:
        groups = [models]
    else:
        groups = [[role] for role in models[: num_gpus - 1]] + [models[num_gpus - 1 :]]
    sizes = [max(ranks[role] for role in group) for group in groups]
    if sum(sizes) > num_gpus:
        wanted = ", ".join(
            f"{' and '.join(group)} {size}" for group, size in zip(groups, sizes, strict=True)
        )
        raise RecipeError(
            f"--gpus is {num_gpus}, but the recipe's layouts want {sum(sizes)}: {wanted}; lower a "
            "layout, or give pools in the recipe whose roles share GPUs"
        )
    settings = []
    grows = [index for index, group in enumerate(groups) if len(group) == 1 and sizes[index] == 1]
    while fits := [index for index in grows if sum(sizes) + sizes[index] <= num_gpus]:
        # The role with the fewest ranks first; of equals the first in order (actor, critic, ...).
        sizes[min(fits, key=lambda index: sizes[index])] *= 2
    pools, first = [], 0
    for index, (group, size) in enumerate(zip(groups, sizes, strict=True)):
        devices = ", ".join(f"'cuda:{number}'" for number in range(first, first + size))
        pools.append(f"{group[0]}: {{devices: [{devices}], roles: [{', '.join(group)}]}}")
        if index in grows and size > 1:
            settings.append(f"{_LAYOUTS[group[0]]}.dp={size}")
        first += size
    if others:
        pools.append(f"{others[0]}: {{devices: [cpu], roles: [{', '.join(others)}]}}")
    return [f"pools={{{', '.join(pools)}}}", *settings]
