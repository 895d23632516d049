"""Seconds of a step with the pools and layouts that a recipe already has: nothing is searched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rolemesh.coordinator.mapping.job.job import Job
from rolemesh.coordinator.mapping.job.layouts import Layout
from rolemesh.coordinator.mapping.job.tasks import Timeline
from rolemesh.coordinator.mapping.machines.cluster import DeviceGroup
from rolemesh.coordinator.mapping.search.search import modelless_seconds
from rolemesh.coordinator.mapping.simulators.costs import RoleCosts
from rolemesh.coordinator.recipe.model_sizes import models_of, trained_models
from rolemesh.coordinator.recipe.schema import Recipe


@dataclass(frozen=True, slots=True)
class PlacedStep:
    """The predicted step of a recipe as it stands."""

    seconds: tuple[float, ...]
    """Of each task, in the order of the job's."""
    period: float
    """Of a step."""


def own_layouts(recipe: Recipe, job: Job) -> dict[str, Layout]:
    """How the recipe lays out each role of the job."""
    models, trained = models_of(recipe), trained_models(recipe)
    found = {}
    for role in job.roles:
        section: Any = recipe.section(role.name)
        ranks = section.rank_layout()
        spec = models[role.name][0] if models[role.name] else None
        tokens = int(job.work.longest_row) if spec is None else spec.micro_batch_tokens
        recompute: Any = spec.recompute if role.name in trained and spec is not None else "none"
        found[role.name] = Layout(
            pp=ranks.train.pp,
            tp=ranks.train.tp,
            dp=ranks.train.dp,
            fsdp=ranks.train.fsdp,
            ep=ranks.train.ep,
            cp=ranks.train.cp,
            generate_pp=ranks.generate.pp if role.samples else 1,
            generate_tp=ranks.generate.tp if role.samples else 1,
            micro_batch_tokens=tokens,
            recompute="full" if recompute == "full" else "none",
        )
    return found


def placed_step(
    job: Job, layouts: Mapping[str, Layout], pools: Mapping[str, str], group: DeviceGroup
) -> PlacedStep:
    """Predicts the step of a job that is placed.

    Memory is taken to suffice: roles run there already. On CPUs all ranks share one machine, and
    slow each other.

    Args:
        job: What is placed.
        layouts: Of each role of the job, as `own_layouts` has them.
        pools: Name of its pool, by role.
        group: Devices, as many as the largest role has ranks at least.
    """
    seconds = modelless_seconds(job, group)
    for role in job.roles:
        costs = RoleCosts(job, role, group)
        found = costs.seconds(costs.option(layouts[role.name]), 0)
        if found is None:
            raise ValueError(
                f"{role.name} has no room on a {group.device.name} of "
                f"{group.device.memory_bytes / 2**30:.1f} GiB: it cannot have run there"
            )
        for task, one in zip(costs.tasks, found, strict=True):
            seconds[task.index] = one
    numbers = {name: number for number, name in enumerate(dict.fromkeys(pools.values()))}
    timeline = Timeline(job.step, {role: numbers[pool] for role, pool in pools.items()})
    if group.device.kind == "cpu":
        ranks = {name: layout.world_size for name, layout in layouts.items()}
        # What judges by rules hardly computes.
        at_work = [ranks.get(task.role, 0) for task in job.step.tasks]
        seconds = timeline.crowded(seconds, at_work, group.coefficients.crowd)
    period = timeline.period(seconds) + group.coefficients.step_s
    return PlacedStep(tuple(seconds), period)
