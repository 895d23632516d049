"""Set partitions: the placements of Algorithm 1 (arXiv 2409.19256, section 6)."""

from __future__ import annotations

from collections.abc import Sequence

Sets = tuple[tuple[str, ...], ...]
"""Roles by pool; pools in the order of their first roles."""


def pool_numbers(sets: Sets) -> dict[str, int]:
    """Number of its pool, by role."""
    return {role: number for number, roles in enumerate(sets) for role in roles}


def set_partitions(roles: Sequence[str]) -> list[Sets]:
    """All ways to put roles into pools, the coarsest first: Bell(k) of them.

    Example: 15 for the four models of PPO.
    """
    found: list[list[list[str]]] = [[]]
    for role in roles:
        found = [
            [*(one for one in sets[:place]), [*sets[place], role], *sets[place + 1 :]]
            if place < len(sets)
            else [*sets, [role]]
            for sets in found
            for place in range(len(sets) + 1)
        ]
    partitions = [tuple(tuple(one) for one in sets) for sets in found]
    order = {role: place for place, role in enumerate(roles)}
    return sorted(
        partitions, key=lambda sets: (len(sets), [[order[role] for role in one] for one in sets])
    )
