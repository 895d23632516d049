"""Roles of several services: which may have them, and whether each has something to do."""

from __future__ import annotations

from typing import Any

from rolemesh.coordinator.recipe.roles.placement import ServiceSpec
from rolemesh.coordinator.recipe.sections.schedule import SyncSamplerSpec


def check_replicas(recipe: Any) -> None:
    """Checks the services of each role with all other sections.

    Raises:
        ValueError: A role cannot have several, or they could not share its calls; names field and
            value.
    """
    for role, spec in recipe.services.items():
        is_several = spec.replicas > 1 or spec.addresses or spec.most_replicas
        if not is_several or role not in recipe.roles:
            continue
        if getattr(recipe.section(role), "optimizer", None) is not None:
            raise ValueError(
                f"services.{role}: has replicas, which only roles that are not trained can have: "
                "give one address or none, and spread the role with its layout"
            )
        if spec.most_replicas is not None:
            _check_changing(recipe, role, spec)
        _check_shares(recipe, role, len(recipe.services_of(role)))


def _check_shares(recipe: Any, role: str, num_services: int) -> None:
    """Each service has devices of its own, and at least one call of a step."""
    if num_services == 1:
        return
    has = f"services.{role} has {num_services} services"
    sampler, num_prompts = recipe.schedule.sampler, recipe.run.prompts_per_step
    # How a client deals out its calls is not known here.
    if role == "rollout" and recipe.algorithm.type != "external":
        num_calls = len(sampler.calls(num_prompts, num_services))
        if num_calls < num_services:
            raise ValueError(
                f"{has}, but a step's {num_prompts} prompts make {num_calls} calls of them: lower "
                "schedule.sampler.batch_size, or have fewer services"
            )
    elif recipe.algorithm.type != "external":
        num_blocks = _num_blocks(recipe)
        if num_blocks < num_services:
            raise ValueError(
                f"{has}, which share the blocks of a step's rows, but there "
                f"{'is 1' if num_blocks == 1 else f'are {num_blocks}'}: lower "
                "schedule.sampler.batch_size or block_rows, or have fewer services"
            )
    pool = recipe.pool_of(role)
    if len(pool.roles) > 1:
        raise ValueError(
            f"{has}, each on devices of its own, but the {role} role shares its pool with "
            f"{', '.join(other for other in pool.roles if other != role)}: give it a pool of its "
            "own"
        )


def _num_blocks(recipe: Any) -> int:
    """Blocks in which the rows of a step come; those who judge and score work on each by itself."""
    if recipe.sampling is None:
        return 1
    sampler = recipe.schedule.sampler
    samplers = 1 if recipe.rollout is None else len(recipe.services_of("rollout"))
    calls = sampler.calls(recipe.run.prompts_per_step, samplers)
    samples = recipe.sampling.samples_per_prompt
    return sum(-(-num * samples // (sampler.block_rows or num * samples)) for num in calls)


def _check_changing(recipe: Any, role: str, spec: ServiceSpec) -> None:
    """Services may come and go where no result depends on who makes which call."""
    given = f"services.{role}.most_replicas is {spec.most_replicas}"
    if recipe.algorithm.type == "external":
        raise ValueError(
            f"{given}, but a client makes the steps of algorithm 'external', and the calls: leave "
            "most_replicas out"
        )
    if role != "rollout":
        return
    sampler = recipe.schedule.sampler
    if not isinstance(sampler, SyncSamplerSpec):
        raise ValueError(
            f"{given}, but schedule.sampler.type is {sampler.type!r}: services join and leave "
            "with the sampler 'sync' alone; set it, or leave most_replicas out"
        )
    if sampler.batch_size is None:
        raise ValueError(
            f"{given}, but schedule.sampler.batch_size is not given, so that prompts would be "
            "cut into calls by the number of services: give it, so that results do not depend "
            "on that number"
        )
    if sampler.weights == "nccl":
        raise ValueError(
            f"{given}, but schedule.sampler.weights is 'nccl', whose exchanges are between "
            "services that stay: set it to 'grpc', or leave most_replicas out"
        )
