"""Settings that make a recipe run as a plan says, and the plan as a section of that recipe."""

from __future__ import annotations

import math

from rolemesh.coordinator.mapping.report.report import Plan, PlannedPool, PlannedRole
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.recipe.sections.plan_section import (
    PlannedPoolSpec,
    PlannedTaskSpec,
    PlanSpec,
)
from rolemesh.engine.specs import HfSpec, VllmSpec

_GIB = 2**30


def settings_of(recipe: Recipe, plan: Plan) -> list[str]:
    """Texts for `--set` that give a recipe the pools, layouts and sizes of a plan.

    Devices are numbered through, group by group; those of a CPU are called cpu.
    """
    firsts = _first_numbers(plan)
    placed = {role.role for pool in plan.pools for role in pool.roles}
    pools = [
        f"{pool.name}: {{devices: [{_devices(pool, firsts)}], "
        f"roles: [{', '.join(role.role for role in pool.roles)}]}}"
        for pool in plan.pools
    ]
    others = [role for role in recipe.roles if role not in placed]
    if others:
        pools.append(f"{others[0]}: {{devices: [cpu], roles: [{', '.join(others)}]}}")
    settings = [f"pools={{{', '.join(pools)}}}"]
    for pool in plan.pools:
        for role in pool.roles:
            settings += _role_settings(recipe, pool, role)
    return settings


def plan_section(planned: Recipe, plan: Plan) -> PlanSpec:
    """What a run tells of its plan.

    Args:
        planned: The recipe with the settings of the plan.
        plan: The plan.
    """
    kinds = {pool.name: f"{pool.size} {pool.device}" for pool in plan.pools}
    return PlanSpec(
        step_s=plan.period,
        tokens=plan.tokens,
        rows=plan.rows,
        basis=plan.basis,
        pools={
            name: PlannedPoolSpec(
                # Roles without a model lie where no device was planned.
                devices=kinds.get(name) or ", ".join(pool.devices),
                roles=planned.layouts_in(name),
            )
            for name, pool in planned.pools.items()
        },
        tasks=tuple(
            PlannedTaskSpec(
                name=task.name,
                pool=task.pool or None,
                start_s=task.start,
                end_s=task.end,
                is_ahead=task.is_ahead,
            )
            for task in plan.tasks
        ),
    )


def _role_settings(recipe: Recipe, pool: PlannedPool, role: PlannedRole) -> list[str]:
    name, layout = role.role, role.option.layout
    section = recipe.section(name)
    cut = {"pp": layout.pp, "tp": layout.tp, "dp": layout.dp, "fsdp": layout.fsdp}
    if layout.ep > 1:
        cut["ep"] = layout.ep
    if layout.cp > 1:
        cut["cp"] = layout.cp
    if name == "rollout":
        del cut["fsdp"]
    values = ", ".join(f"{key}: {value}" for key, value in cut.items())
    settings = [f"{name}.{'train' if hasattr(section, 'train') else 'layout'}={{{values}}}"]
    if len(recipe.services_of(name)) > 1:
        settings.append(f"services.{name}.replicas=1")
    model = f"{name}.source.model" if hasattr(section, "source") else f"{name}.model"
    if name != "rollout":
        settings.append(f"{model}.micro_batch_tokens={layout.micro_batch_tokens}")
    is_on_gpu = pool.device != "cpu"
    if getattr(section, "optimizer", None) is not None and is_on_gpu:
        settings.append(f"{model}.recompute={layout.recompute}")
        settings.append(f"{name}.optimizer.offload={str(layout.offload).lower()}")
    sampler = getattr(section, "rollout", None)
    if not role.sampler_bytes or sampler is None:
        return settings
    if name == "actor":
        settings.append(f"actor.generate={{pp: {layout.generate_pp}, tp: {layout.generate_tp}}}")
    if isinstance(sampler, VllmSpec):
        if is_on_gpu:
            share = math.floor(100 * role.sampler_bytes / pool.device_bytes) / 100
            settings.append(f"{name}.rollout.gpu_memory_utilization={share:g}")
        if sampler.max_num_seqs is None:
            settings.append(f"{name}.rollout.max_num_seqs={role.rows_together}")
    elif isinstance(sampler, HfSpec) and role.rows_together < sampler.max_num_seqs:
        settings.append(f"{name}.rollout.max_num_seqs={role.rows_together}")
    return settings


def _first_numbers(plan: Plan) -> dict[int, int]:
    """Number of the first device of each group: groups follow one another."""
    sizes: dict[int, int] = {}
    for pool in plan.pools:
        sizes[pool.kind] = max(sizes.get(pool.kind, 0), pool.first + pool.size)
    firsts, number = {}, 0
    for kind in sorted(sizes):
        firsts[kind] = number
        number += sizes[kind]
    return firsts


def _devices(pool: PlannedPool, firsts: dict[int, int]) -> str:
    if pool.device == "cpu":
        return "cpu"
    first = firsts[pool.kind] + pool.first
    return ", ".join(f"'cuda:{number}'" for number in range(first, first + pool.size))
