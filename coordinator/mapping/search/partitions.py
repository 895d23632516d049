"""Set partitions and allocations: placements of Algorithm 1 (arXiv 2409.19256, section 6)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

Sets = tuple[tuple[str, ...], ...]
"""Roles by pool; pools in the order of their first roles."""


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


def allocations(total: int, least: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All ways to give every device to one of several pools, each at least what it needs.

    With a least of 1 each these are C(N - 1, k - 1) compositions, the paper's bound.
    """
    if len(least) == 1:
        if total >= least[0]:
            yield (total,)
        return
    rest = sum(least[1:])
    for first in range(least[0], total - rest + 1):
        for others in allocations(total - first, least[1:]):
            yield (first, *others)


def kind_choices(pools: int, kinds: int) -> Iterator[tuple[int, ...]]:
    """All ways to put each pool on one kind of device."""
    return itertools.product(range(kinds), repeat=pools)
