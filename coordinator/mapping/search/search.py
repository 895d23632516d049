"""Search for the cheapest plan: Algorithms 1 and 2 of the paper, without trying everything.

Over all set partitions, kinds of devices, allocations and layouts (arXiv 2409.19256, section 6).
Allocations are cut into boxes; a box is dropped if its bound, the step with each task at its
fastest anywhere in the box, is no better than what is found already. The step never gets shorter
when a task gets longer (`tasks.Timeline`), so no box with the optimum is dropped.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rolemesh.coordinator.mapping.errors import PlanError
from rolemesh.coordinator.mapping.job.job import Job
from rolemesh.coordinator.mapping.job.tasks import TaskKind, Timeline
from rolemesh.coordinator.mapping.machines.cluster import DeviceGroup
from rolemesh.coordinator.mapping.search.choosing import EQUAL, Chosen
from rolemesh.coordinator.mapping.search.partitions import Sets, pool_numbers, set_partitions
from rolemesh.coordinator.mapping.search.pool_costs import PoolCosts
from rolemesh.coordinator.mapping.simulators.costs import Option, RoleCosts


@dataclass(frozen=True, slots=True)
class Placement:
    """The cheapest plan of one set partition."""

    sets: Sets
    kinds: tuple[int, ...]
    """Group of devices of each pool."""
    options: tuple[tuple[Option, ...], ...]
    """Layouts of the roles of each pool."""
    seconds: tuple[float, ...]
    """Of each task of the step."""
    period: float
    """Of a step."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Devices of each pool that its roles use."""
        return tuple(max(option.world_size for option in one) for one in self.options)


@dataclass(slots=True)
class Found:
    """What a search found, and what it took."""

    placements: list[Placement] = field(default_factory=list)
    """The best of each partition that was followed to its end, cheapest first."""
    bounds: dict[Sets, float] = field(default_factory=dict)
    """At least what a partition takes that was dropped; infinite where it does not fit."""
    boxes: int = 0
    """Boxes of allocations that were looked at."""
    plans: int = 0
    """Allocations whose plans were compared in full."""


class Search:
    """One search. What it has computed of roles and pools is kept for further ones.

    Owner: one thread.
    """

    def __init__(self, job: Job, groups: Sequence[DeviceGroup]) -> None:
        """Prepares.

        Args:
            job: What is placed.
            groups: The cluster: groups of equal devices.

        Raises:
            PlanError: Its wishes contradict each other, or there is no device.
        """
        if not groups:
            raise PlanError("the cluster has no devices: give at least one")
        step = replace(job.step, beside_s=groups[0].coefficients.step_s)
        self.job, self.groups = replace(job, step=step), tuple(groups)
        self._names = tuple(role.name for role in job.roles)
        job.wishes.check(self._names, tuple(group.device.name for group in groups))
        self._roles: dict[tuple[str, int], RoleCosts] = {}
        self._pools: dict[tuple[tuple[str, ...], int], PoolCosts] = {}
        self._beside = modelless_seconds(job, groups[0])

    def costs(self, role: str, kind: int) -> RoleCosts:
        """Of a role on one group."""
        if (role, kind) not in self._roles:
            self._roles[role, kind] = RoleCosts(self.job, self.job.role(role), self.groups[kind])
        return self._roles[role, kind]

    def pool(self, roles: tuple[str, ...], kind: int) -> PoolCosts:
        """Of roles that share devices of one group."""
        if (roles, kind) not in self._pools:
            costs = {role: self.costs(role, kind) for role in roles}
            self._pools[roles, kind] = PoolCosts(self.job, roles, self.groups[kind], costs)
        return self._pools[roles, kind]

    def run(self, kept: int = 5) -> Found:
        """Finds the cheapest plans, each of another partition.

        Args:
            kept: How many are followed to the end.

        Returns:
            Them; no placement where nothing fits (`shortage` says why).
        """
        found = Found()
        wishes = self.job.wishes
        partitions = [sets for sets in set_partitions(self._names) if wishes.allows(sets)]
        # Those with a low bound first: what they find drops others. Coarse ones first, of equals.
        waiting = [(self._root_bound(sets), number, sets) for number, sets in enumerate(partitions)]
        for bound, _, sets in sorted(waiting):
            cutoff = (
                found.placements[kept - 1].period * EQUAL
                if len(found.placements) >= kept
                else math.inf
            )
            best = None if bound >= cutoff else self.best(sets, cutoff, found)
            if best is None:
                found.bounds[sets] = max(bound, cutoff) if cutoff < math.inf else math.inf
                continue
            found.placements.append(best)
            found.placements.sort(key=_order)
        for dropped in found.placements[kept:]:
            found.bounds[dropped.sets] = dropped.period
        del found.placements[kept:]
        return found

    def best(self, sets: Sets, cutoff: float, found: Found) -> Placement | None:
        """The cheapest plan of a partition, where it is cheaper than a bound."""
        best: Placement | None = None
        for kinds in self._kinds(sets):
            boxes = _Boxes(self, sets, kinds, found)
            placement = boxes.best(best.period if best else cutoff)
            best = placement or best
        return best

    def _kinds(self, sets: Sets) -> list[tuple[int, ...]]:
        on = self.job.wishes.on
        names = [group.device.name for group in self.groups]
        return [
            kinds
            for kinds in itertools.product(range(len(self.groups)), repeat=len(sets))
            if all(
                on.get(role, names[kind]) == names[kind]
                for roles, kind in zip(sets, kinds, strict=True)
                for role in roles
            )
        ]

    def _root_bound(self, sets: Sets) -> float:
        quiet = Found()
        bounds = [_Boxes(self, sets, kinds, quiet).root for kinds in self._kinds(sets)]
        return min((one[0] for one in bounds if one is not None), default=math.inf)

    def timeline(self, sets: Sets) -> Timeline:
        """When the tasks of a step start and end in this partition."""
        return Timeline(self.job.step, pool_numbers(sets))

    def most(self, roles: tuple[str, ...], kind: int) -> int:
        """Most devices that a pool may have."""
        wished = [
            self.job.wishes.devices[role] for role in roles if role in self.job.wishes.devices
        ]
        return min([self.groups[kind].count, *wished])

    def beside(self) -> list[float]:
        """Seconds of all tasks, with 0 for those of roles with a model."""
        return list(self._beside)


_Box = tuple[tuple[int, int], ...]
"""For each pool: places of its smallest and largest size among its sizes."""


class _Boxes:
    """Allocations of one partition on given kinds of devices, as boxes of pool sizes."""

    def __init__(self, search: Search, sets: Sets, kinds: tuple[int, ...], found: Found) -> None:
        self._search, self._sets, self._kinds, self._found = search, sets, kinds, found
        self._pools = [search.pool(roles, kind) for roles, kind in zip(sets, kinds, strict=True)]
        self._sizes = [
            pool.sizes(search.most(roles, kind))
            for pool, roles, kind in zip(self._pools, sets, kinds, strict=True)
        ]
        self._timeline = search.timeline(sets)
        self._seconds = search.beside()
        whole = tuple((0, len(sizes) - 1) for sizes in self._sizes)
        self.root = self._bounded(whole) if all(self._sizes) else None

    def best(self, cutoff: float) -> Placement | None:
        """The cheapest plan, where it is cheaper than the cutoff."""
        best: Placement | None = None
        if self.root is None:
            return None
        count = itertools.count()
        heap = [(self.root[0], 0, next(count), self.root[1])]
        while heap:
            bound, _, _, box = heapq.heappop(heap)
            if bound * EQUAL >= cutoff:
                break
            self._found.boxes += 1
            widest = max(range(len(box)), key=lambda pool: box[pool][1] - box[pool][0])
            low, high = box[widest]
            if low == high:
                placement = self._compared(box, cutoff)
                if placement is not None:
                    best, cutoff = placement, placement.period
                continue
            middle = (low + high) // 2
            for half in ((middle + 1, high), (low, middle)):
                part = self._bounded((*box[:widest], half, *box[widest + 1 :]))
                if part is not None and part[0] * EQUAL < cutoff:
                    # Of equal bounds the smallest box first, which comes to an end soonest.
                    width = sum(stop - start for start, stop in part[1])
                    heapq.heappush(heap, (part[0], width, next(count), part[1]))
        return best

    def _bounded(self, box: _Box) -> tuple[float, _Box] | None:
        """A lower bound on the plans of a box, and the box without sizes that there is no room for.

        None: its smallest sizes do not fit.
        """
        used: dict[int, int] = {}
        for kind, sizes, (low, _) in zip(self._kinds, self._sizes, box, strict=True):
            used[kind] = used.get(kind, 0) + sizes[low]
        free = {kind: self._search.groups[kind].count - number for kind, number in used.items()}
        if min(free.values()) < 0:
            return None
        seconds = self._seconds
        tight = []
        for pool, kind, sizes, (low, high) in zip(
            self._pools, self._kinds, self._sizes, box, strict=True
        ):
            most = sizes[low] + free[kind]
            while sizes[high] > most:
                high -= 1
            tight.append((low, high))
            bound = pool.bound(sizes[high])
            if bound is None:
                return None
            for task, value in zip(pool.tasks, bound, strict=True):
                seconds[task] = value
        return self._timeline.period(seconds), tuple(tight)

    def _compared(self, box: _Box, cutoff: float) -> Placement | None:
        """The cheapest plan of one allocation, where it is cheaper than the cutoff."""
        self._found.plans += 1
        sizes = [one[low] for one, (low, _) in zip(self._sizes, box, strict=True)]
        chosen = Chosen(self._pools, sizes, self._timeline, self._search.beside()).best(cutoff)
        if chosen is None:
            return None
        return Placement(
            sets=self._sets,
            kinds=self._kinds,
            options=chosen.options,
            seconds=chosen.seconds,
            period=chosen.period,
        )


def modelless_seconds(job: Job, group: DeviceGroup) -> list[float]:
    """Seconds of tasks of roles without a model; 0 for those of roles with one."""
    placed = {role.name for role in job.roles}
    coefficients = group.coefficients
    return [
        0.0
        if task.role in placed
        else coefficients.call_s
        + (
            coefficients.judge_row_s * job.work.rows * task.share
            if task.kind is TaskKind.SCORE
            else 0.0
        )
        for task in job.step.tasks
    ]


def _order(placement: Placement) -> tuple[float, int, Sets]:
    """Cheap first; of equal ones, the coarser."""
    return float(f"{placement.period:.9g}"), len(placement.sets), placement.sets
