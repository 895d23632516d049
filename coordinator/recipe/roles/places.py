"""Where a recipe's roles stand: pools and services, held against its sections."""

from __future__ import annotations

from typing import Any

from rolemesh.coordinator.recipe.role_names import ROLES, kind_of


def check_places(recipe: Any) -> None:
    """Refuses roles that have no place, or several, and places of roles that are none.

    Args:
        recipe: A Recipe, whose parts are valid.

    Raises:
        ValueError: Names the field and what to do.
    """
    _check_services(recipe)
    _check_pools(recipe)


def known_roles(recipe: Any) -> tuple[str, ...]:
    """Roles that pools may name: all kinds, or each of several teachers in place of theirs."""
    if recipe.teacher is None or recipe.teacher.named is None:
        return ROLES
    return (*(kind for kind in ROLES if kind != "teacher"), *recipe.teachers)


def _check_services(recipe: Any) -> None:
    # A mesh of containers has a service of each kind, whatever the recipe has.
    known = dict.fromkeys((*ROLES, *known_roles(recipe)))
    for role, spec in recipe.services.items():
        if role not in known:
            raise ValueError(f"services.{role}: no such role; roles are {', '.join(known)}")
        if spec.registers and role != kind_of(role):
            raise ValueError(
                f"services.{role}.registers is true, but a service registers as a "
                f"{kind_of(role)}, whichever it is: give services.{role}.address"
            )
        if spec.registers and recipe.certificates is None:
            raise ValueError(
                f"services.{role}.registers is true, but certificates is not given: a service "
                "registers by the certificate of its role; make them with `rolemesh certs`"
            )
    for role in recipe.run.health.grad_norm.above or ():
        if role not in recipe.roles:
            raise ValueError(
                f"run.health.grad_norm.above.{role}: the recipe has no section {role}: leave it out"
            )


def _check_pools(recipe: Any) -> None:
    known = known_roles(recipe)
    placed = [role for pool in recipe.pools.values() for role in pool.roles]
    for role in placed:
        if role not in known:
            raise ValueError(f"pools: no role {role!r}; roles are {', '.join(known)}")
    for role in recipe.roles:
        if placed.count(role) != 1:
            raise ValueError(
                f"pools: role {role!r} stands in {placed.count(role)} pools; "
                "it must stand in exactly one"
            )
    for name, pool in recipe.pools.items():
        num_gpus = sum(device.startswith("cuda") for device in pool.devices)
        for role in pool.roles:
            if role not in recipe.roles:
                continue
            num_ranks = recipe.layout(role).world_size * len(recipe.services_of(role))
            if 0 < num_gpus < num_ranks:
                raise ValueError(
                    f"pools.{name}.devices has {num_gpus} GPUs, but the layout of the {role} "
                    f"has {num_ranks} ranks, each on a GPU of its own: give the pool more "
                    "devices, or the role a smaller layout"
                )
