"""Recipes as this host runs them: pools that name no devices get the GPUs that there are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.loading import load_recipe
from rolemesh.coordinator.recipe.role_names import role_of
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.render.placement import gpus_wanted, spread
from rolemesh.coordinator.run.checks.cautions import Caution
from rolemesh.coordinator.run.checks.pool_memory import gpu_cautions
from rolemesh.coordinator.run.services.host_gpus import HostGpus


def load_placed(
    files: Sequence[Path],
    gpus: HostGpus,
    *,
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Recipe:
    """Reads a recipe, and gives its pools the GPUs of a host where they name no devices.

    Args:
        files: As in load_recipe.
        gpus: Of the host that runs it.
        overrides: As in load_recipe.
        environment: As in load_recipe.

    Raises:
        RecipeError: As load_recipe, and where the GPUs are too few.
    """
    recipe = load_recipe(files, overrides=overrides, environment=environment)
    settings = placement(recipe, gpus.count)
    if not settings:
        return recipe
    return load_recipe(files, overrides=[*overrides, *settings], environment=environment)


def placement(recipe: Recipe, num_gpus: int) -> list[str]:
    """Settings that give the GPUs of a host to pools that name no devices.

    One such pool of all roles is cut as `spread` does. Of several, each gets a GPU for each rank
    of its largest role, in order, of those that no other pool names.

    Raises:
        RecipeError: There are too few.
    """
    open_pools = [
        name for name, pool in recipe.pools.items() if "devices" not in pool.model_fields_set
    ]
    if not num_gpus or not open_pools:
        return []
    if len(recipe.pools) == 1:
        return spread(recipe, num_gpus)
    named = {device for pool in recipe.pools.values() for device in pool.devices}
    free = [f"cuda:{index}" for index in range(num_gpus) if f"cuda:{index}" not in named]
    settings = []
    for name in open_pools:
        roles = [role for role in recipe.pools[name].roles if role in recipe.roles]
        wanted = max((gpus_wanted(recipe, role) for role in roles), default=0)
        if wanted > len(free):
            raise RecipeError(
                f"pools.{name} names no devices and wants {wanted} GPUs, but {len(free)} of "
                f"{num_gpus} are left: name its devices, or lower a layout"
            )
        taken, free = free[:wanted], free[wanted:]
        settings.append(f"pools.{name}.devices=[{', '.join(taken) or 'cpu'}]")
    return settings


def pools_on_cpu(recipe: Recipe, own_services: Mapping[str, str | None]) -> list[str]:
    """Keys of the pools whose models compute on this host's CPU.

    Args:
        recipe: With its pools.
        own_services: By name of each service: its address, None where this host starts it.
    """
    own = {role_of(name) for name, address in own_services.items() if address is None}
    return [
        f"pools.{name}"
        for name, pool in recipe.pools.items()
        if set(pool.devices) == {"cpu"}
        and any(role in own and recipe.has_model(role) for role in pool.roles)
    ]


def start_cautions(
    recipe: Recipe, gpus: HostGpus, own_services: Mapping[str, str | None]
) -> Iterator[Caution]:
    """What to think about before services of a recipe start on a host with GPUs, or near them.

    Args:
        recipe: With its pools.
        gpus: Of this host.
        own_services: By name of each service: its address, None where this host starts it.
    """
    on_cpu = pools_on_cpu(recipe, own_services)
    if on_cpu and gpus.unusable:
        yield Caution(f"models compute on the CPU: {gpus.unusable}", "fix it, or leave it so")
    elif on_cpu and gpus.count:
        yield Caution(
            f"models compute on the CPU, though this host has {gpus.count} x {gpus.name}: "
            f"{' and '.join(on_cpu)} names devices [cpu]",
            "leave the pools out, or name cuda:0",
        )
    if gpus.count:
        yield from gpu_cautions(recipe, own_services, gpus.bytes_each)
