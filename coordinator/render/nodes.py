"""Nodes of a Slurm job, or hosts of a mesh in containers, as a user puts roles on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.role_names import role_of
from rolemesh.coordinator.recipe.schema import Recipe


def nodes_of(
    recipe: Recipe, placed: Sequence[str], word: str = "node"
) -> dict[str, tuple[int, ...]]:
    """The nodes of each service, by its name; empty where all share one node.

    Args:
        recipe: The recipe.
        placed: Texts "role=node", nodes counted from 0, e.g. ["critic=1", "reference=1"]; with a
            node for each service of a role, "rollout=1,2"; or with several nodes over which the
            ranks of one service lie, "actor=0,1". Roles that are left out are on node 0.
        word: What a node is for the user, in errors.

    Raises:
        RecipeError: A role or a node is wrong, or a node is left empty.
    """
    if not placed:
        return {}
    for role in recipe.roles:
        if any(recipe.address(service) is not None for service in recipe.services_of(role)):
            raise RecipeError(
                f"services.{role} has an address, or registers, so that it runs elsewhere, and "
                "--on is given: take that out of the recipe, or leave --on out"
            )
    nodes: dict[str, tuple[int, ...]] = {
        service: (0,) for role in recipe.roles for service in recipe.services_of(role)
    }
    for text, role, where in read_roles(recipe, "--on", placed, word):
        words = where.split(",")
        if not all(one.isdecimal() and int(one) < 1000 for one in words):
            raise RecipeError(f"--on is {text!r}: give a {word}, counted from 0, e.g. {role}=1")
        nodes |= _nodes_of_role(recipe, role, tuple(map(int, words)), text, word)
    used = {node for own in nodes.values() for node in own}
    for node in range(max(used)):
        if node not in used:
            raise RecipeError(f"--on leaves {word} {node} without a role: count {word}s from 0")
    return nodes


def read_roles(
    recipe: Recipe, flag: str, given: Sequence[str], what: str
) -> Iterator[tuple[str, str, str]]:
    """What an option says of roles: each text, its role, and what stands behind the "=".

    Args:
        recipe: The recipe.
        flag: The option, in errors.
        given: Texts "role=...".
        what: What has to stand behind the "=", in errors.

    Raises:
        RecipeError: A role is not one of the recipe's, or is given twice.
    """
    seen = set()
    for text in given:
        role, _, value = text.partition("=")
        if role not in recipe.roles or role in seen:
            those = "once" if role in seen else f"one of {', '.join(recipe.roles)}"
            raise RecipeError(
                f"{flag} is {text!r}: give each role of the recipe {those}, as role={what}"
            )
        seen.add(role)
        yield text, role, value


def _nodes_of_role(
    recipe: Recipe, role: str, numbers: tuple[int, ...], text: str, word: str
) -> dict[str, tuple[int, ...]]:
    services = recipe.services_of(role)
    if len(services) > 1:
        if len(numbers) not in (1, len(services)):
            raise RecipeError(
                f"--on is {text!r}, but the {role} has {len(services)} services: give one {word} "
                "for all, or one for each"
            )
        return {service: (numbers[index % len(numbers)],) for index, service in enumerate(services)}
    if numbers != tuple(range(numbers[0], numbers[0] + len(numbers))):
        raise RecipeError(f"--on is {text!r}: give {word}s that follow each other, e.g. {role}=0,1")
    return {role: numbers}


def check_nodes(recipe: Recipe, nodes: Mapping[str, tuple[int, ...]], word: str = "node") -> None:
    """Raises RecipeError where layouts or pools do not go with the nodes of services."""
    for service, own in nodes.items():
        layout = recipe.layout(role_of(service))
        if len(own) > 1 and layout.world_size % (len(own) * layout.tp):
            raise RecipeError(
                f"--on puts the {service} on {len(own)} {word}s, but its layout has "
                f"{layout.world_size} ranks with tp {layout.tp}: each {word} gets as many ranks, "
                "and whole tensor slices"
            )
    on_gpus = {
        service: own
        for service, own in nodes.items()
        if any(
            role_of(service) in pool.roles and set(pool.devices) != {"cpu"}
            for pool in recipe.pools.values()
        )
    }
    for name, pool in recipe.pools.items():
        places = {own for service, own in on_gpus.items() if role_of(service) in pool.roles}
        if len(pool.roles) > 1 and len(places) > 1:
            raise RecipeError(
                f"pools.{name} has {', '.join(pool.roles)}, which take turns on its GPUs, but --on "
                f"puts them on several {word}s: put them on one, or give each a pool of its own"
            )
    for service, own in on_gpus.items():
        for other, theirs in on_gpus.items():
            if len(own) > 1 and other != service and set(own) & set(theirs):
                raise RecipeError(
                    f"--on puts the {service} on several {word}s, and the {other} on one of them: "
                    f"a role over several {word}s has their GPUs for itself"
                )


def given_addresses(nodes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Flags for a recipe whose numbered services get addresses, which stand for their number."""
    numbered = dict.fromkeys(role_of(name) for name in nodes if name != role_of(name))
    return [word for role in numbered for word in ("--set", f"services.{role}.replicas=1")]


def address_setting(role: str, addresses: Sequence[str]) -> tuple[str, str]:
    """Variable that tells a coordinator where the services of a role are, and its value."""
    name = f"ROLEMESH_SERVICES__{role.upper().replace('-', '_')}__ADDRESS"
    return (name, addresses[0]) if len(addresses) == 1 else (f"{name}ES", str(list(addresses)))


def roles_of_nodes(
    recipe: Recipe, nodes: Mapping[str, tuple[int, ...]]
) -> list[tuple[list[str], int]]:
    """Roles that share nodes, and the number of these nodes."""
    groups: list[tuple[list[str], set[int]]] = []
    for role in recipe.roles:
        own = {node for service in recipe.services_of(role) for node in nodes.get(service, (0,))}
        sharing = [group for group in groups if group[1] & own]
        groups = [group for group in groups if not group[1] & own]
        roles = [one for names, _ in sharing for one in names] + [role]
        groups.append((roles, own.union(*(places for _, places in sharing))))
    return [(roles, len(places)) for roles, places in groups]
