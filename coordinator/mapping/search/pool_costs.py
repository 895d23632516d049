"""Costs of roles that share a pool: what each pool size makes possible, and a bound on it.

A pool's roles share its memory. Where they sleep, a role that does not compute keeps its process
alone there, and each change of roles moves what both hold to host memory and back; otherwise all
stay, and the sampler gets what is left. A role may take fewer devices than its pool has.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping

from rolemesh.coordinator.mapping.job.job import Job
from rolemesh.coordinator.mapping.machines.cluster import DeviceGroup
from rolemesh.coordinator.mapping.simulators.costs import INFEASIBLE, Option, RoleCosts, beats
from rolemesh.coordinator.mapping.simulators.moves import switch_seconds

Seconds = tuple[float, ...]

Way = tuple[Seconds, Option]
"""What a role can do: seconds of each of its tasks, and the layout."""


class PoolCosts:
    """One pool: some roles on one group of devices.

    Invariant: `bound(n)` is at most, task for task, what any choice of `ways` takes, and it does
    not grow with n.
    """

    def __init__(
        self, job: Job, roles: tuple[str, ...], group: DeviceGroup, costs: Mapping[str, RoleCosts]
    ) -> None:
        """Prepares.

        Args:
            job: What is placed.
            roles: Of the pool, in the order of the job's.
            group: Where it is.
            costs: Of each role on that group.
        """
        self.roles, self.group = roles, group
        self._job, self._costs = job, [costs[role] for role in roles]
        tasks = [task for task in job.step.tasks if task.role in roles]
        self.tasks = tuple(task.index for task in tasks)
        sleeps = job.system.sleeps and group.device.kind == "gpu" and len(roles) > 1
        self._sleeps = sleeps
        # Moves that a task pays for: its role comes before it, or leaves after it.
        self._moves = [
            sum(
                tasks[other % len(tasks)].role != task.role
                for other in (place - 1, place + 1)
                if sleeps
            )
            for place, task in enumerate(tasks)
        ]
        self._places = {
            role: [place for place, task in enumerate(tasks) if task.role == role] for role in roles
        }
        self._ways: dict[tuple[int, int], tuple[Way, ...]] = {}
        self._bounds: dict[int, Seconds | None] = {}
        self._tables = [self._table(index) for index in range(len(roles))]

    def _others_least(self, index: int, size: int) -> float:
        """Least bytes that the other roles hold on a device beside a role."""
        process = self._job.system.process_bytes * (len(self.roles) - 1)
        if self._sleeps or len(self.roles) == 1:
            return process
        total = float(process)
        for other, costs in enumerate(self._costs):
            if other != index:
                rests = [one.bytes.rest for one in costs.options if one.world_size <= size]
                total += min(rests, default=INFEASIBLE)
        return total

    def _table(self, index: int) -> tuple[list[int], list[list[float]]]:
        """Sizes at which a role can do something faster, and the least seconds of its tasks."""
        costs = self._costs[index]
        others = self._others_least(index, self.group.count)
        role = self.roles[index]
        sizes: list[int] = []
        table: list[list[float]] = []
        if others == INFEASIBLE:
            return sizes, table
        least = [INFEASIBLE] * len(costs.tasks)
        for option in costs.options:
            seconds = costs.seconds(option, others)
            if seconds is None:
                continue
            seconds = self._with_moves(role, option, seconds)
            improved = [min(pair) for pair in zip(least, seconds, strict=True)]
            if improved == least:
                continue
            least = improved
            if sizes and sizes[-1] == option.world_size:
                table[-1] = improved
            else:
                sizes.append(option.world_size)
                table.append(improved)
        return sizes, table

    def _with_moves(self, role: str, option: Option, seconds: Seconds) -> Seconds:
        if not self._sleeps:
            return seconds
        move = switch_seconds(option.bytes.rest, self.group)
        places = self._places[role]
        return tuple(
            one + self._moves[place] * move for one, place in zip(seconds, places, strict=True)
        )

    @property
    def least_size(self) -> int | None:
        """Fewest devices with which the bound exists; None: no number does."""
        starts = [sizes[0] if sizes else None for sizes, _ in self._tables]
        return None if None in starts else max(one for one in starts if one is not None)

    def sizes(self, most: int) -> list[int]:
        """Numbers of devices, up to so many, at which a role can do something else.

        Those at which the bound changes are not enough: a layout may be the fastest in no task, and
        still be what a plan needs, as a compromise or for what it holds.
        """
        least = self.least_size
        if least is None or least > most:
            return []
        found = {option.world_size for costs in self._costs for option in costs.options}
        return sorted({least, *(size for size in found if least <= size <= most)})

    def bound(self, size: int) -> Seconds | None:
        """Least seconds of each task with so many devices; None where a role does not fit."""
        if size not in self._bounds:
            self._bounds[size] = self._bound(size)
        return self._bounds[size]

    def _bound(self, size: int) -> Seconds | None:
        seconds = [0.0] * len(self.tasks)
        for role, (sizes, table) in zip(self.roles, self._tables, strict=True):
            at = bisect.bisect_right(sizes, size) - 1
            if at < 0:
                return None
            for place, value in zip(self._places[role], table[at], strict=True):
                seconds[place] = value
        return tuple(seconds)

    def ways(self, index: int, size: int) -> tuple[Way, ...]:
        """What a role can do with so many devices; what another way beats is left out.

        Where roles stay, one that takes less memory is a way of its own, and the seconds of a
        sampler are those beside the smallest others: `beside` says what it takes beside given ones.
        """
        key = (index, size)
        if key not in self._ways:
            self._ways[key] = tuple(self._all_ways(index, size))
        return self._ways[key]

    def _all_ways(self, index: int, size: int) -> list[Way]:
        costs, others = self._costs[index], self._others_least(index, size)
        ways: list[Way] = []
        for option in costs.options:
            if option.world_size > size:
                break
            seconds = costs.seconds(option, others)
            if seconds is not None:
                ways.append((self._with_moves(self.roles[index], option, seconds), option))
        kept: list[Way] = []
        beaten_by: list[Seconds] = []
        for way in sorted(ways, key=lambda one: (one[0], one[1].world_size, one[1].layout)):
            numbers, held = way[0], way[1].bytes
            if not self.is_separable:
                numbers = (*numbers, held.rest, held.peak - held.rest)
            if not any(beats(other, numbers) for other in beaten_by):
                beaten_by.append(numbers)
                kept.append(way)
        return kept

    @property
    def is_separable(self) -> bool:
        """Whether a role's choice changes nothing for the others."""
        return self._sleeps or len(self.roles) == 1

    def samples(self, index: int) -> bool:
        """Whether a role generates."""
        return self._costs[index].role.samples

    def least_rest(self, index: int, size: int) -> int:
        """Least bytes that a role holds between calls, on so many devices."""
        return min(way[1].bytes.rest for way in self.ways(index, size))

    def fit_together(self, rest_bytes: int, extra_bytes: int) -> bool:
        """Whether roles that all stay fit.

        Args:
            rest_bytes: What they hold between calls.
            extra_bytes: Most that one of them takes besides while it computes.
        """
        process = self._job.system.process_bytes * len(self.roles)
        return rest_bytes + extra_bytes + process <= self._costs[0].usable_bytes

    def beside(self, index: int, option: Option, others_rest: int) -> Seconds | None:
        """Seconds of a role's tasks beside what the others hold; None: it has no room."""
        process = self._job.system.process_bytes * (len(self.roles) - 1)
        return self._costs[index].seconds(option, others_rest + process)

    def places(self, index: int) -> tuple[int, ...]:
        """The role's tasks, by their place in the step."""
        return tuple(self.tasks[place] for place in self._places[self.roles[index]])
