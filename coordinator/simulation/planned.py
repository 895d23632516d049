"""A plan as what is simulated: the recipe with its pools and samplers, and the seconds of calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rolemesh.coordinator.mapping.job.layouts import Layout
from rolemesh.coordinator.mapping.job.tasks import TaskKind
from rolemesh.coordinator.mapping.report.report import Plan
from rolemesh.coordinator.mapping.search.search import Search
from rolemesh.coordinator.mapping.simulators.costs import RoleCosts
from rolemesh.coordinator.mapping.simulators.moves import switch_seconds
from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.simulation.timing import RowEnds, Timing


def simulated_recipe(
    recipe: Recipe, plan: Plan, *, steps: int, num_samplers: int | None = None
) -> Recipe:
    """The recipe as a simulated mesh runs it.

    Its pools are the plan's. Where rollout has a pool of its own, each replica of its sampler is a
    service of its own.
    What only people and disks see is switched off: evaluation, kept completions, trackers.

    Args:
        recipe: The recipe.
        plan: Where its roles go.
        steps: Steps to make.
        num_samplers: Rollout services, where rollout has a pool of its own; None: as many as the
            plan has replicas.

    Raises:
        RecipeError: It is to have several rollout services, but no such role with a pool of its
            own, or too few prompts in a step for them.
    """
    tree: dict[str, Any] = recipe.model_dump(mode="json", exclude_unset=True)
    placed = {role.role for pool in plan.pools for role in pool.roles}
    pools = {
        pool.name: {
            "roles": [role.role for role in pool.roles],
            "sleep": "always" if len(pool.roles) > 1 and pool.device != "cpu" else "never",
        }
        for pool in plan.pools
    }
    others = [role for role in recipe.roles if role not in placed]
    if others:
        pools["without models"] = {"roles": others, "sleep": "never"}
    replicas = [
        role.option.layout.replicas
        for pool in plan.pools
        for role in pool.roles
        if role.role == "rollout" and len(pool.roles) == 1
    ]
    services: dict[str, Any] = {}
    if replicas:
        number = num_samplers or min(replicas[0], recipe.run.prompts_per_step)
        if number > recipe.run.prompts_per_step:
            raise RecipeError(
                f"--samplers is {number}, but run.prompts_per_step is "
                f"{recipe.run.prompts_per_step}: give at most that, or more prompts "
                "(--set run.prompts_per_step=N)"
            )
        services["rollout"] = {"replicas": number}
    elif num_samplers is not None:
        raise RecipeError(
            f"--samplers is {num_samplers}, but no rollout role has a pool of its own: add a "
            "rollout section, or leave --samplers out"
        )
    for section in ("trackers", "tracing", "certificates", "plan"):
        tree.pop(section, None)
    run = tree["run"] | {
        "steps": steps,
        "samples": 0,
        "evaluation": {"num_prompts": 0},
        "checkpoint": {"every_steps": recipe.run.checkpoint.every_steps},
    }
    run.pop("early_stopping", None)
    tree |= {"run": run, "pools": pools, "services": services, "store": {"type": "memory"}}
    for role in recipe.roles:
        # One process a service: how it is cut into ranks is in its seconds.
        for cut in ("train", "layout", "generate"):
            tree.get(role, {}).pop(cut, None)
    return Recipe.model_validate(tree)


def timing_of(search: Search, plan: Plan) -> Timing:
    """Seconds of the calls of a plan, as its search counted them.

    Args:
        search: That has found the plan.
        plan: Its best one.
    """
    job = search.job
    calls: dict[tuple[str, str], tuple[float, ...]] = {}
    decoding: dict[str, RowEnds] = {}
    state: dict[str, float] = {}
    beside = search.beside()
    placed = {role.name for role in job.roles}
    for task in job.step.tasks:
        if task.role not in placed:
            seconds = beside[task.index] / task.share
            calls[task.role, task.method] = (*calls.get((task.role, task.method), ()), seconds)
    for pool in plan.pools:
        group = search.groups[pool.kind]
        for planned in pool.roles:
            role, option = job.role(planned.role), planned.option
            state[role.name] = switch_seconds(option.bytes.rest, group)
            for task, seconds in zip(job.step.of(role.name), option.seconds, strict=True):
                # Rows are counted when the call is made; a generation's are in its decoding.
                share = 1.0 if task.kind is TaskKind.GENERATE else task.share
                known = calls.get((role.name, task.method), ())
                calls[role.name, task.method] = (*known, seconds / share)
            if role.samples:
                is_split = role.name == "rollout" and len(pool.roles) == 1
                replicas = 1 if is_split else option.layout.replicas
                costs = search.costs(role.name, pool.kind)
                decoding[role.name] = _decoding(
                    costs, option.layout, planned.sampler_bytes, replicas
                )
    return Timing(
        calls=calls,
        tokens=job.work.rows * job.work.row_tokens,
        decoding=decoding,
        state_s=state,
    )


def _decoding(costs: RoleCosts, layout: Layout, budget: int, replicas: int) -> RowEnds:
    """When the rows of a service are finished that has so many replicas of the sampler."""

    def ends(lengths: Sequence[float]) -> list[float]:
        found: list[float] = []
        number = min(replicas, len(lengths))
        for part in range(number):
            own = lengths[part * len(lengths) // number : (part + 1) * len(lengths) // number]
            found += costs.sampling(layout).row_ends(budget, own)
        return found

    return ends
