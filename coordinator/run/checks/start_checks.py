"""Everything that can be checked of a recipe before the first process of its run is started."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

from rolemesh.coordinator.algorithms.registry import roles_in
from rolemesh.coordinator.api.doors.doors import check_doors
from rolemesh.coordinator.recipe.role_names import role_of
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.recipe.sections.stores import RedisStoreSpec
from rolemesh.coordinator.run.checks.inputs import check_paths
from rolemesh.coordinator.run.checks.installation import check_roles_run
from rolemesh.coordinator.run.services.commands import visible_devices
from rolemesh.coordinator.run.services.host_gpus import host_gpus, why_no_gpu
from rolemesh.coordinator.trackers.registry import check_trackers
from rolemesh.rpc import tracing


def services_in(recipe: Recipe) -> dict[str, str | None]:
    """The services of a recipe's run by name, each with its address, as `Recipe.address` says.

    Raises:
        ValueError: The recipe lacks a section that the algorithm needs.
    """
    names = [name for role in roles_in(recipe) for name in recipe.services_of(role)]
    return {name: recipe.address(name) for name in names}


def check_start(recipe: Recipe, own_services: Sequence[str]) -> None:
    """Raises ValueError for the first thing that a run of the recipe lacks on this machine.

    Args:
        recipe: The recipe.
        own_services: Names of the services that are started here.

    Raises:
        ValueError: A file that the recipe names, a package that a role needs or a GPU is missing,
            or the coordinator would be open to others without a token or in clear.
    """
    check_trackers(recipe.trackers)
    if recipe.tracing is not None or tracing.is_configured(os.environ):
        tracing.check_installed()
    check_doors(recipe.api, recipe.certificates, os.environ)
    if own_services:
        check_roles_run()
    check_paths(recipe, {role_of(name) for name in own_services})
    _check_can_register(recipe)
    check_named_gpus(recipe, {role_of(name) for name in own_services})
    for name in own_services:
        visible_devices(recipe, name, os.environ.get("CUDA_VISIBLE_DEVICES"))
        _check_variables(recipe, role_of(name))


def _check_can_register(recipe: Recipe) -> None:
    """Raises ValueError where services register themselves, and have nowhere to."""
    registering = [role for role in roles_in(recipe) if recipe.service(role).registers]
    if (
        registering
        and recipe.api.member_port is None
        and not isinstance(recipe.store, RedisStoreSpec)
    ):
        raise ValueError(
            f"services.{registering[0]}.registers is true, but api.member_port is null, and no "
            "other coordinator has this run's store: give the port at which services register"
        )


def check_named_gpus(recipe: Recipe, own_roles: Collection[str]) -> None:
    """Raises ValueError where models are to compute on GPUs, and this host has none for them.

    Args:
        recipe: The recipe.
        own_roles: Roles whose services are started here.
    """
    role = next((role for role in recipe.roles if role in own_roles and recipe.wants_gpu(role)), "")
    why = why_no_gpu(host_gpus()) if role else ""
    if why:
        raise ValueError(
            f"pools.{recipe.pool_name(role)}.devices is {list(recipe.pool_of(role).devices)}, but "
            f"this host has no GPU for the {role}: {why}; mend that (`rolemesh doctor` shows "
            "more), name the devices [cpu], or leave them out to take what there is"
        )


def _check_variables(recipe: Recipe, role: str) -> None:
    for variable in recipe.service(role).variables:
        if variable not in os.environ:
            raise ValueError(
                f"services.{role}.variables names {variable}, which is not set here: export it, "
                "or leave it out"
            )
