"""Layouts for the roles of one allocation: the joint optimum, by branch and bound over roles.

Algorithm 2 of the paper takes the best layout of each model by itself. Here the step decides: a
layout that samples fast may train slowly, and what one role holds another one lacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rolemesh.coordinator.mapping.job.tasks import Timeline
from rolemesh.coordinator.mapping.search.pool_costs import PoolCosts
from rolemesh.coordinator.mapping.simulators.costs import Option

EQUAL = 1 + 1e-9
"""Costs that are closer than this are equal: what was found first stays."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The layouts of all roles, and what follows."""

    options: tuple[tuple[Option, ...], ...]
    """By pool, in the order of its roles."""
    seconds: tuple[float, ...]
    """Of each task of the step."""
    period: float


class Chosen:
    """The choice of layouts on pools of given sizes. Is made for one use."""

    def __init__(
        self,
        pools: Sequence[PoolCosts],
        sizes: Sequence[int],
        timeline: Timeline,
        seconds: list[float],
    ) -> None:
        """Prepares.

        Args:
            pools: Of the placement.
            sizes: Devices of each, for which each pool has a bound.
            timeline: Says what a step takes, which is to be small.
            seconds: Of tasks that no pool decides; 0 for all others.
        """
        self._pools, self._sizes, self._timeline = pools, sizes, timeline
        # Each role at its fastest, until its turn comes.
        self._seconds = seconds
        for pool, size in zip(pools, sizes, strict=True):
            bound = pool.bound(size)
            assert bound is not None  # the caller has looked
            for task, value in zip(pool.tasks, bound, strict=True):
                self._seconds[task] = value
        # Samplers come last in their pool: what they have room for depends on the others.
        self._turns = [
            (number, index)
            for number, pool in enumerate(pools)
            for index in sorted(range(len(pool.roles)), key=lambda one: pool.samples(one))
        ]
        self._chosen: dict[tuple[int, int], Option] = {}
        self._best: Choice | None = None
        self._cutoff = 0.0

    def best(self, cutoff: float) -> Choice | None:
        """The best choice, where it is better than the cutoff."""
        self._cutoff = cutoff
        for number, pool in enumerate(self._pools):
            if not all(pool.ways(index, self._sizes[number]) for index in range(len(pool.roles))):
                return None
        self._choose(0)
        return self._best

    def _choose(self, turn: int) -> None:
        if turn == len(self._turns):
            self._cutoff = self._timeline.period(self._seconds)
            options = tuple(
                tuple(self._chosen[number, index] for index in range(len(pool.roles)))
                for number, pool in enumerate(self._pools)
            )
            self._best = Choice(options, tuple(self._seconds), self._cutoff)
            return
        number, index = self._turns[turn]
        pool = self._pools[number]
        places = pool.places(index)
        before = [self._seconds[place] for place in places]
        for seconds, option in pool.ways(index, self._sizes[number]):
            self._chosen[number, index] = option
            if not self._is_better(places, seconds):
                continue
            if not pool.is_separable:
                if not self._fits(number):
                    continue
                if pool.samples(index):
                    exact = pool.beside(index, option, self._others_rest(number, index))
                    if exact is None or not self._is_better(places, exact):
                        continue
            self._choose(turn + 1)
        del self._chosen[number, index]
        self._set(places, before)

    def _is_better(self, places: Sequence[int], seconds: Sequence[float]) -> bool:
        self._set(places, seconds)
        return self._timeline.period(self._seconds) * EQUAL < self._cutoff

    def _set(self, places: Sequence[int], seconds: Sequence[float]) -> None:
        for place, value in zip(places, seconds, strict=True):
            self._seconds[place] = value

    def _others_rest(self, number: int, index: int) -> int:
        """Bytes that the other roles of a pool hold; those that have no layout yet, the least."""
        pool = self._pools[number]
        return sum(
            self._chosen[number, other].bytes.rest
            if (number, other) in self._chosen
            else pool.least_rest(other, self._sizes[number])
            for other in range(len(pool.roles))
            if other != index
        )

    def _fits(self, number: int) -> bool:
        chosen = [option for (pool, _), option in self._chosen.items() if pool == number]
        extra = max(option.bytes.peak - option.bytes.rest for option in chosen)
        return self._pools[number].fit_together(self._others_rest(number, -1), extra)
