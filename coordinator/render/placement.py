"""Placement of roles on the GPUs of hosts, where the recipe does not state it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.role_names import role_of
from rolemesh.coordinator.recipe.schema import Recipe

_LAYOUTS = {
    "actor": "actor.train",
    "critic": "critic.train",
    "reference": "reference.layout",
    "teacher": "teacher.layout",
    "rollout": "rollout.layout",
    "reward": "reward.layout",
    "cost": "cost.layout",
}
"""Field that holds a role's layout. Roles get the remaining GPUs in this order."""


def gpus_wanted(recipe: Recipe, role: str) -> int:
    """GPUs of all services of a role, one a rank; 0 for a role that computes with no model."""
    if not recipe.has_model(role):
        return 0
    return recipe.layout(role).world_size * len(recipe.services_of(role))


def names_gpus(recipe: Recipe) -> bool:
    """Whether the recipe's own pools say which GPUs there are."""
    return any(device != "cpu" for pool in recipe.pools.values() for device in pool.devices)


def device_ids(recipe: Recipe, service: str, devices: Sequence[str] | None = None) -> list[str]:
    """One GPU for each rank of a service: the first of its pool, or every n-th of n services.

    Args:
        recipe: The recipe, with its pools on GPUs or on the CPU.
        service: Name of the service.
        devices: What "cuda:0", "cuda:1", ... mean; None: "0", "1", ...

    Returns:
        Empty for a pool on the CPU.

    Raises:
        RecipeError: The pool names a device that does not exist.
    """
    role = role_of(service)
    name, pool = recipe.pool_name(role), recipe.pool_of(role)
    if set(pool.devices) == {"cpu"}:
        return []
    services = recipe.services_of(role)
    own = pool.devices[services.index(service) :: len(services)]
    ids = []
    for device in own[: recipe.layout(role).world_size]:
        kind, _, index = device.partition(":")
        if kind != "cuda" or not index.isdecimal():
            raise RecipeError(
                f'pools.{name}.devices has {device!r}: give ["cpu"], or GPUs as ["cuda:0", ...]'
            )
        if devices is not None and int(index) >= len(devices):
            raise RecipeError(
                f"pools.{name}.devices has {device!r}, but --devices names {len(devices)}: name "
                "more, or fewer in the pool"
            )
        ids.append(index if devices is None else devices[int(index)])
    return ids


def gpus_of(recipe: Recipe, service: str, num_nodes: int) -> list[int]:
    """GPUs of a service on each of its nodes, of those that the mesh has there, from 0."""
    ids = [int(one) for one in device_ids(recipe, service)]
    return ids if num_nodes == 1 else list(range(len(ids) // num_nodes))


def spread(
    recipe: Recipe, num_gpus: int, hosts: Sequence[tuple[Collection[str], int]] | None = None
) -> list[str]:
    """Settings that place a recipe's roles on GPUs so that no GPU is idle, if its layouts allow.

    On each host, each role with a model gets its own GPUs while there are enough. The remaining
    GPUs go to roles whose layout is one rank, actor first, as data parallelism: their number of
    ranks doubles while there is room. With too few GPUs, the actor keeps its own and the others
    take turns on the last one. On a single GPU all roles take turns. A role of several services
    does not grow.

    Args:
        recipe: A recipe in which no pool names a GPU.
        num_gpus: GPUs of each host.
        hosts: Roles that share hosts, and the number of these hosts; each role once. None: one host
            with all roles.

    Returns:
        Texts for `--set`, e.g. ["pools={actor: {devices: ['cuda:0', 'cuda:1'], roles: [actor]},
        ...}", "actor.train.dp=2"]. "cuda:0" is the first GPU of the host of the pool's roles.

    Raises:
        RecipeError: The layouts of the recipe need more GPUs than there are.
    """
    pools: list[str] = []
    settings: list[str] = []
    for roles, number in hosts or [(recipe.roles, 1)]:
        _spread_on_hosts(recipe, roles, number * num_gpus, pools, settings)
    return [f"pools={{{', '.join(pools)}}}", *settings]


def _spread_on_hosts(
    recipe: Recipe, roles: Collection[str], num_gpus: int, pools: list[str], settings: list[str]
) -> None:
    """Adds the pools and layouts of roles that share hosts."""
    models = [role for role in _LAYOUTS if role in roles and recipe.has_model(role)]
    others = [role for role in recipe.roles if role in roles and role not in models]
    services = {role: len(recipe.services_of(role)) for role in models}
    ranks = {role: gpus_wanted(recipe, role) for role in models}
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
    grows = [
        index
        for index, group in enumerate(groups)
        if len(group) == 1 and sizes[index] == services[group[0]] == 1
    ]
    while fits := [index for index in grows if sum(sizes) + sizes[index] <= num_gpus]:
        # The role with the fewest ranks first; of equals the first in order (actor, critic, ...).
        sizes[min(fits, key=lambda index: sizes[index])] *= 2
    first = 0
    for index, (group, size) in enumerate(zip(groups, sizes, strict=True)):
        devices = ", ".join(f"'cuda:{number}'" for number in range(first, first + size))
        pools.append(f"{group[0]}: {{devices: [{devices}], roles: [{', '.join(group)}]}}")
        if index in grows and size > 1:
            settings.append(f"{_LAYOUTS[group[0]]}.dp={size}")
        first += size
    if others:
        pools.append(f"{others[0]}: {{devices: [cpu], roles: [{', '.join(others)}]}}")
