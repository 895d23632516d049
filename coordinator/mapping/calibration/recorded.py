"""A run that was made: what its calls took, beside what the simulators say of its placement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial

from rolemesh.coordinator.mapping.calibration.fitting import Observation
from rolemesh.coordinator.mapping.job.job import Job
from rolemesh.coordinator.mapping.job.layouts import Layout
from rolemesh.coordinator.mapping.machines.cluster import DeviceGroup, group_of
from rolemesh.coordinator.mapping.machines.coefficients import Coefficients
from rolemesh.coordinator.mapping.machines.devices import Device
from rolemesh.coordinator.mapping.search.placed import PlacedStep, placed_step


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """Medians over the steps of a run."""

    name: str
    job: Job
    """With the graph that was recorded as its step, and rows as long as they were."""
    layouts: Mapping[str, Layout]
    """Of each role of the job."""
    pools: Mapping[str, str]
    """Name of its pool, by role."""
    seconds: tuple[float, ...]
    """Of each task of the job's step."""
    step_s: float
    """Of a step, to its commit."""
    beside_s: float
    """What a step took beside the calls that it had to wait for."""

    def predicted(self, device: Device, coefficients: Coefficients) -> PlacedStep:
        """The step as the simulators have it."""
        return placed_step(self.job, self.layouts, self.pools, self._group(device, coefficients))

    def observations(self, device: Device) -> list[Observation]:
        """Its calls, and the rest of a step. What counts is their part of the step.

        A call that takes a hundredth of the step may be far off, and says little.
        """

        # All calls of a run are asked for with the same coefficients, one after another.
        @lru_cache(maxsize=2)
        def step(coefficients: Coefficients) -> PlacedStep:
            return self.predicted(device, coefficients)

        def seconds_of(index: int, coefficients: Coefficients) -> float:
            return step(coefficients).seconds[index]

        found = [
            Observation(
                f"{self.name}: {task.name}",
                seconds,
                partial(seconds_of, task.index),
                weight=seconds / self.step_s,
            )
            for task, seconds in zip(self.job.step.tasks, self.seconds, strict=True)
            if seconds > 0
        ]
        if self.beside_s > 0:
            weight = self.beside_s / self.step_s
            name = f"{self.name}: beside its calls"
            found.append(Observation(name, self.beside_s, lambda one: one.step_s, weight))
        return found

    def _group(self, device: Device, coefficients: Coefficients) -> DeviceGroup:
        ranks = max((layout.world_size for layout in self.layouts.values()), default=1)
        return group_of(
            device,
            ranks,
            coefficients=coefficients,
            # Ranks of a service run on one host, and a CPU's are no devices of a machine's own.
            per_machine=ranks if device.kind == "cpu" else max(ranks, device.per_machine),
        )
