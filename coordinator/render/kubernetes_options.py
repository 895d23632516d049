"""Options of a mesh on Kubernetes, and what they ask of its recipe."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.render.nodes import read_roles
from rolemesh.coordinator.render.placement import gpus_wanted

_NAME = re.compile(r"^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$")
_CLAIM = re.compile(r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")
_IMAGE = re.compile(r"^[\w.:/@-]+$", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class KubernetesOptions:
    """Where the mesh is to be, and of what it is made."""

    image: str
    """Of the roles."""
    coordinator_image: str
    store_image: str
    name: str
    """Prefix of all names."""
    namespace: str | None
    claim: str
    """PersistentVolumeClaim with the folders .models, recipes and runs."""
    hosts: Mapping[str, int]
    """Pods over which the ranks of a role lie, of roles that have several."""


def own_pools(recipe: Recipe) -> list[str]:
    """Settings that give each role with a model a GPU for each rank, which no other role has.

    Args:
        recipe: A recipe in which no pool names a GPU.
    """
    pools = []
    for role in recipe.roles:
        devices = [f"'cuda:{index}'" for index in range(gpus_wanted(recipe, role))] or ["cpu"]
        pools.append(f"{role}: {{devices: [{', '.join(devices)}], roles: [{role}]}}")
    return [f"pools={{{', '.join(pools)}}}"]


def hosts_of(recipe: Recipe, given: Sequence[str]) -> dict[str, int]:
    """Pods of the roles whose ranks lie on several.

    Args:
        recipe: The recipe.
        given: Texts "role=number", e.g. ["actor=2"].

    Raises:
        RecipeError: A role or a number is wrong, or does not go with the role's layout.
    """
    hosts: dict[str, int] = {}
    for text, role, number in read_roles(recipe, "--hosts", given, "2"):
        if not number.isdecimal() or not 1 < int(number) < 1000:
            raise RecipeError(f"--hosts is {text!r}: give a number of pods from 2, e.g. {role}=2")
        if len(recipe.services_of(role)) > 1:
            raise RecipeError(
                f"--hosts is {text!r}, but the {role} has several services: give it one, or leave "
                "this out"
            )
        hosts[role] = int(number)
        layout = recipe.layout(role)
        if layout.world_size % (hosts[role] * layout.tp):
            raise RecipeError(
                f"--hosts is {text!r}, but the layout of the {role} has {layout.world_size} ranks "
                f"with tp {layout.tp}: each pod gets as many ranks, and whole tensor slices"
            )
    return hosts


def check_options(recipe: Recipe, options: KubernetesOptions) -> None:
    """Raises RecipeError where an option is no name, a role has an address, or roles share GPUs."""
    for flag, value, pattern in (
        ("--name", options.name, _NAME),
        ("--namespace", options.namespace, _NAME),
        ("--claim", options.claim, _CLAIM),
        ("--image", options.image, _IMAGE),
        ("--coordinator-image", options.coordinator_image, _IMAGE),
        ("--store-image", options.store_image, _IMAGE),
    ):
        if value is not None and not pattern.fullmatch(value):
            raise RecipeError(
                f"{flag} is {value!r}: give a name of Kubernetes, in lower-case letters, digits "
                "and hyphens"
                if pattern is not _IMAGE
                else f"{flag} is {value!r}: give an image, e.g. registry.example/rolemesh:gpu"
            )
    for role in recipe.roles:
        spec = recipe.service(role)
        if spec.address is not None or spec.addresses:
            raise RecipeError(
                f"services.{role} has an address, but a rendered mesh has all roles, and lets none "
                "of them out: take it out of the recipe"
            )
    for name, pool in recipe.pools.items():
        sharing = [role for role in pool.roles if role in recipe.roles]
        if set(pool.devices) != {"cpu"} and len(sharing) > 1:
            raise RecipeError(
                f"pools.{name} has {', '.join(sharing)}, which take turns on its GPUs, but GPUs of "
                "a pod are its own: give each of them a pool, or take the devices out of the "
                "recipe's pools and give --gpu"
            )
