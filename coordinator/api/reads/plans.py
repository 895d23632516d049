"""A run's plan beside what was measured: seconds of the step and of its calls, tokens, pools."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.recipe.sections.plan_section import PlannedTaskSpec, PlanSpec
from rolemesh.v1 import coordinator_pb2

WARMUP_STEPS = 2
"""First steps, which do not count: caches fill, and libraries compile and allocate."""

MEASURED_STEPS = 32
"""Newest steps whose median counts: a run whose rows grow longer is shown as it is now, and graphs
of hundreds of services are read in a fraction of a second."""


def kept_plan(recipe: Recipe) -> dict[str, Any]:
    """What a run's record has of its plan: the prediction, and the pools that it really has.

    Returns:
        Plain JSON values for `plan_message`; empty where the recipe has no plan.
    """
    if recipe.plan is None:
        return {}
    pools = {
        name: {"devices": list(pool.devices), "layouts": recipe.layouts_in(name)}
        for name, pool in recipe.pools.items()
    }
    return {"predicted": recipe.plan.model_dump(mode="json"), "pools": pools}


def counted(steps: Iterable[int]) -> list[int]:
    """Steps whose median counts: the newest, without the first ones of the run."""
    return sorted(step for step in steps if step > WARMUP_STEPS)[-MEASURED_STEPS:]


def usual(values: Mapping[int, float]) -> float | None:
    """The median of a value over the steps that count, by step; None where there are none."""
    found = [values[step] for step in counted(values)]
    return statistics.median(found) if found else None


def plan_message(
    kept: Mapping[str, Any],
    calls: Mapping[int, Mapping[str, float]],
    step_s: Mapping[int, float],
    tokens: Mapping[int, float],
) -> coordinator_pb2.RunPlan:
    """The plan of a run beside its medians.

    Args:
        kept: What `kept_plan` gave, not empty.
        calls: Seconds by name of the call, as `call_seconds` gives them, by step.
        step_s: Seconds of the step, by step.
        tokens: Tokens of the step, prompts included, by step.
    """
    plan = PlanSpec.model_validate(kept["predicted"])
    planned: dict[str, list[PlannedTaskSpec]] = {task.name: [] for task in plan.tasks}
    for task in plan.tasks:
        planned[task.name].append(task)
    names = dict.fromkeys([*planned, *(name for step in counted(calls) for name in calls[step])])
    measured = {
        name: usual({step: found[name] for step, found in calls.items() if name in found})
        for name in names
    }
    return coordinator_pb2.RunPlan(
        step_s=plan.step_s,
        measured_step_s=usual(step_s),
        num_steps=len(counted(step_s)),
        tokens=plan.tokens,
        measured_tokens=usual(tokens),
        rows=plan.rows,
        basis=plan.basis,
        tasks=[_task(name, planned.get(name, ()), measured[name]) for name in names],
        pools=[_pool(name, plan, kept["pools"]) for name in {**plan.pools, **kept["pools"]}],
    )


def _task(
    name: str, planned: Sequence[PlannedTaskSpec], measured_s: float | None
) -> coordinator_pb2.PlannedTask:
    return coordinator_pb2.PlannedTask(
        name=name,
        pool=next((task.pool for task in planned if task.pool), ""),
        is_ahead=any(task.is_ahead for task in planned),
        start_s=min((task.start_s for task in planned), default=None),
        predicted_s=sum(task.end_s - task.start_s for task in planned) if planned else None,
        measured_s=measured_s,
    )


def _pool(
    name: str, plan: PlanSpec, pools: Mapping[str, Mapping[str, Any]]
) -> coordinator_pb2.PlannedPool:
    planned, actual = plan.pools.get(name), pools.get(name, {})
    return coordinator_pb2.PlannedPool(
        name=name,
        planned_devices="" if planned is None else planned.devices,
        planned_roles=_told({} if planned is None else planned.roles),
        devices=actual.get("devices", ()),
        roles=_told(actual.get("layouts", {})),
    )


def _told(layouts: Mapping[str, str]) -> list[str]:
    return [f"{role} {layout}" for role, layout in layouts.items()]
