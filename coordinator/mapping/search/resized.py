"""Factors by which calls take longer with other micro-batches, or rows decoded together."""

from __future__ import annotations

from collections.abc import Sequence

from rolemesh.coordinator.mapping.job.from_recipe import job_of, one_call_a_role, work_of
from rolemesh.coordinator.mapping.job.tasks import RecordedNode
from rolemesh.coordinator.mapping.machines.cluster import group_of
from rolemesh.coordinator.mapping.machines.coefficients import Coefficients
from rolemesh.coordinator.mapping.machines.devices import Device
from rolemesh.coordinator.mapping.search.placed import own_layouts, placed_step
from rolemesh.coordinator.mapping.search.rearranged import Factor
from rolemesh.coordinator.recipe.schema import Recipe


class Resized:
    """What the simulators say of sizes, as ratios. Of GPUs, whose kind no recipe says, nothing."""

    def __init__(
        self,
        recipe: Recipe,
        nodes: Sequence[RecordedNode],
        cpu: Device,
        coefficients: Coefficients,
    ) -> None:
        """Prepares.

        Args:
            recipe: Whose sizes are changed.
            nodes: Of a step that it made, one a call.
            cpu: Of this machine.
            coefficients: Of it.
        """
        self._nodes = nodes
        self._cpu, self._coefficients = cpu, coefficients
        self._own = self._seconds(recipe)

    def factor(self, recipe: Recipe) -> Factor:
        """Of a recipe with other sizes; 1 where nothing is known."""
        changed = self._seconds(recipe)

        def of(role: str, method: str) -> float:
            before, after = self._own.get((role, method)), changed.get((role, method))
            return after / before if before and after else 1.0

        return of

    def _seconds(self, recipe: Recipe) -> dict[tuple[str, str], float]:
        if any(set(pool.devices) != {"cpu"} for pool in recipe.pools.values()):
            return {}
        try:
            single = one_call_a_role(recipe)
            job = job_of(single, self._nodes, work_of(single), on_gpus=False)
            layouts = own_layouts(recipe, job)
            ranks = max(layout.world_size for layout in layouts.values())
            group = group_of(self._cpu, ranks, coefficients=self._coefficients, per_machine=ranks)
            pools = {role: name for name, pool in recipe.pools.items() for role in pool.roles}
            step = placed_step(job, layouts, pools, group)
        except (ValueError, OSError):
            # A model of which nothing is known, or rows of which no length is: it can be tried.
            return {}
        found: dict[tuple[str, str], float] = {}
        for task, seconds in zip(job.step.tasks, step.seconds, strict=True):
            found[task.role, task.method] = found.get((task.role, task.method), 0.0) + seconds
        return found
