"""Costs of a role on a layout: seconds of each of its tasks, and bytes of each of its devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from rolemesh.coordinator.mapping.job.job import Job, Role
from rolemesh.coordinator.mapping.job.layouts import Layout, layouts
from rolemesh.coordinator.mapping.job.systems import plain_transformers
from rolemesh.coordinator.mapping.job.tasks import Task, TaskKind
from rolemesh.coordinator.mapping.machines.cluster import DeviceGroup
from rolemesh.coordinator.mapping.simulators.generation import (
    GenerationSeconds,
    NoRoomError,
    Sampling,
    sampler_bytes,
)
from rolemesh.coordinator.mapping.simulators.memory import RankBytes, scored_bytes, trained_bytes
from rolemesh.coordinator.mapping.simulators.moves import (
    experience_seconds,
    publish_seconds,
    reshard_seconds,
    take_seconds,
)
from rolemesh.coordinator.mapping.simulators.passes import scoring_seconds, update_seconds

_BUDGET_STEP = 64 << 20
"""Budgets of samplers are rounded down to this, so that equal ones are computed once."""

INFEASIBLE = float("inf")


@dataclass(frozen=True, slots=True)
class Option:
    """A layout of a role, and what follows from it wherever the role stands.

    `seconds` has an entry for each task of the role; that of a generation is 0 here, since it
    depends on the memory that other roles leave (`RoleCosts.generation`).
    """

    layout: Layout
    bytes: RankBytes
    seconds: tuple[float, ...]

    @property
    def world_size(self) -> int:
        """Devices that it takes."""
        return self.layout.world_size

    @property
    def sampling(self) -> tuple[int, int, int]:
        """What the seconds of a generation depend on, beside memory: stages, slices, replicas."""
        return self.layout.generate_pp, self.layout.generate_tp, self.layout.replicas


class RoleCosts:
    """Options of one role on one group of devices.

    Invariant: pure; the same questions get the same answers.
    """

    def __init__(self, job: Job, role: Role, group: DeviceGroup) -> None:
        """Prepares; nothing is computed yet.

        Args:
            job: What is placed.
            role: Whose costs.
            group: The devices.
        """
        self.role, self.group = role, group
        self.tasks = job.step.of(role.name)
        self._job = job
        self._system = job.system
        if role.frozen_bytes is not None:
            self._system = replace(job.system, frozen_bytes=role.frozen_bytes)
        if role.has_muon:
            moments = self._system.moment_bytes - 4 * role.model.layers_share
            self._system = replace(self._system, moment_bytes=moments)
        self._generations: dict[tuple[tuple[int, int, int], int], GenerationSeconds | None] = {}
        self.usable_bytes = group.device.memory_bytes * (1 - job.system.spare)

    @cached_property
    def options(self) -> list[Option]:
        """All layouts that are worth a thought, the smallest first.

        One that another one beats in devices, in bytes and in every task is left out, where both
        sample in the same way: no plan needs it.
        """
        found: list[Option] = []
        role = self.role
        for layout in layouts(
            role.model,
            self.group.count,
            role.freedom,
            trains=role.trains,
            samples=role.samples,
        ):
            held = self._bytes(layout)
            if held.peak + self._job.system.process_bytes > self.usable_bytes:
                continue
            found.append(self.option(layout, held))
        return _undominated(found)

    def option(self, layout: Layout, held: RankBytes | None = None) -> Option:
        """What follows from a layout, whether or not it fits.

        Args:
            layout: Of the role.
            held: Its bytes, where they are known already.
        """
        seconds = tuple(self._task_s(task, layout) for task in self.tasks)
        return Option(layout, held or self._bytes(layout), seconds)

    def _bytes(self, layout: Layout) -> RankBytes:
        role, system = self.role, self._system
        if role.trains:
            return trained_bytes(role.model, layout, system, averages=role.averages)
        if role.samples:
            fixed = sampler_bytes(role.model, layout, system, role.most_rows).fixed
            return RankBytes(rest=fixed, peak=fixed)
        return scored_bytes(role.model, layout, system)

    def _task_s(self, task: Task, layout: Layout) -> float:
        """Seconds of a task; of a generation, what does not depend on memory."""
        job, role, group = self._job, self.role, self.group
        model, work, system = role.model, job.work, self._system
        coming = experience_seconds(work, layout, group) * task.share
        match task.kind:
            case TaskKind.UPDATE:
                return coming + update_seconds(model, layout, work, group, system).total
            case TaskKind.SCORE:
                scoring = scoring_seconds(model, layout, work, group, system).total
                return coming + scoring * task.share
            case TaskKind.GENERATE:
                first = next(one for one in self.tasks if one.kind is TaskKind.GENERATE)
                if role.only_samples or task != first:
                    # A second generation of a step finds the weights where they are.
                    return group.coefficients.call_s
                moved = reshard_seconds(model, layout, group, system)
                return moved + group.coefficients.call_s
            case TaskKind.PUBLISH:
                return publish_seconds(model, layout, group, system)
            case TaskKind.TAKE:
                return take_seconds(model, layout, group, system)
            case _:
                return coming

    def budget(self, option: Option, others_bytes: float) -> int:
        """Bytes of each device that the role's sampler may take.

        Args:
            option: Of the role.
            others_bytes: What other roles hold there meanwhile.
        """
        system = self._job.system
        free = self.usable_bytes - others_bytes - system.process_bytes
        if not self.role.only_samples:
            free -= option.bytes.rest
        return int(free) // _BUDGET_STEP * _BUDGET_STEP

    def generation(self, option: Option, others_bytes: float) -> GenerationSeconds | None:
        """How the role samples; None where its devices have no room for a row."""
        key = (option.sampling, self.budget(option, others_bytes))
        if key not in self._generations:
            try:
                self._generations[key] = self.sampling(option.layout).seconds(key[1])
            except NoRoomError:
                self._generations[key] = None
        return self._generations[key]

    def sampling(self, layout: Layout) -> Sampling:
        """How the role samples on a layout."""
        work, system = self._job.work, self._system
        if self.role.is_plain:
            work, system = replace(work, shares_prompts=False), plain_transformers(system)
        return Sampling(self.role.model, layout, work, self.group, system, self.role.most_rows)

    def fits(self, option: Option, others_bytes: float) -> bool:
        """Whether the role can work beside what others hold on its devices."""
        own = option.bytes.peak + self._job.system.process_bytes
        return own + others_bytes <= self.usable_bytes

    def seconds(self, option: Option, others_bytes: float) -> tuple[float, ...] | None:
        """Seconds of each task beside others; None where the role cannot work there."""
        if not self.fits(option, others_bytes):
            return None
        if not self.role.samples:
            return option.seconds
        generated = self.generation(option, others_bytes)
        if generated is None:
            return None
        return tuple(
            base + (generated.total * task.share if task.kind is TaskKind.GENERATE else 0.0)
            for base, task in zip(option.seconds, self.tasks, strict=True)
        )


def beats(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether no number of the one is larger than the other's."""
    return all(a <= b for a, b in zip(one, other, strict=True))


def _undominated(options: list[Option]) -> list[Option]:
    """Options that no other one beats, by devices, in an order that depends on nothing else."""
    kept: list[Option] = []
    by_sampling: dict[tuple[int, int, int], list[tuple[float, ...]]] = {}
    ordered = sorted(
        options, key=lambda one: (one.world_size, one.seconds, one.bytes.peak, one.layout)
    )
    for option in ordered:
        numbers = (*option.seconds, option.bytes.rest, option.bytes.peak)
        rivals = by_sampling.setdefault(option.sampling, [])
        if any(beats(rival, numbers) for rival in rivals):
            continue
        rivals.append(numbers)
        kept.append(option)
    return kept
