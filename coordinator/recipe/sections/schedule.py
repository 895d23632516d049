"""Schedules: what of a run may overlap, as templates of a recipe."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rolemesh.coordinator.recipe.algorithm.algorithms import SampledSpec
from rolemesh.engine.specs import AgentSpec, Spec


class _SamplerSpec(Spec):
    """What all samplers have."""

    batch_size: int | None = Field(default=None, ge=1)
    """Prompts of one call to a sampling service; None: a step's prompts, dealt out evenly over the
    services."""
    block_rows: int = Field(default=0, ge=0)
    """Trajectories that go on together to reference, critic and reward as soon as all of them are
    finished, while the others still decode; a multiple of sampling.samples_per_prompt. 0: all go
    on together. It decides which rows are computed together, so keep it when placements are
    compared bit for bit."""
    weights: Literal["grpc", "nccl"] = "grpc"
    """How weights go from the actor to rollout services. "grpc": services fetch them, on one host
    through shared memory. "nccl": straight from GPU to GPU, where all ranks of both services can;
    otherwise they are fetched, and an event says why. The bits are the same. No GPU has shown the
    second way yet."""

    def calls(self, num_prompts: int, num_services: int) -> list[int]:
        """Prompts of each call of a step, in their order."""
        if self.batch_size is not None:
            cuts = [*range(0, num_prompts, self.batch_size), num_prompts]
        else:
            num_calls = min(num_prompts, num_services)
            # The first ones get one more, where it does not come out even.
            cuts = [-(-number * num_prompts // num_calls) for number in range(num_calls + 1)]
        return [stop - start for start, stop in pairwise(cuts)]


class SyncSamplerSpec(_SamplerSpec):
    """On-policy: a step samples with the weights of the step before."""

    type: Literal["sync"] = "sync"


class OneStepAheadSpec(_SamplerSpec):
    """Samples the next step's trajectories while this one trains: weights are one step old.

    Repeatable: which weights sample which step does not depend on timing.
    """

    type: Literal["one_step_ahead"] = "one_step_ahead"


class AsyncSamplerSpec(_SamplerSpec):
    """Samples without waiting for training, within a bound (arXiv 2505.24298, section 5.1).

    The trajectories of step s are begun as soon as step s - 1 - max_staleness is made. Which
    weights sample which token depends on timing.
    """

    type: Literal["async"] = "async"
    max_staleness: int = Field(default=2, ge=1)
    """Steps by which the weights that sampled a token may be behind those that train on it."""
    partial_rollouts: bool = True
    """New weights come between two tokens of running completions; false: they wait until what runs
    is finished."""


SamplerSpec = Annotated[
    SyncSamplerSpec | OneStepAheadSpec | AsyncSamplerSpec, Field(discriminator="type")
]


class UpdaterSpec(Spec):
    """How a step's updates are made."""

    type: Literal["sync"] = "sync"

    @model_validator(mode="before")
    @classmethod
    def _check_moved(cls, values: Any) -> Any:
        if not isinstance(values, dict) or "micro_batch_tokens" not in values:
            return values
        if values["micro_batch_tokens"] is not None:
            raise ValueError(
                "micro_batch_tokens is a setting of each model: give it as "
                "actor.model.micro_batch_tokens and critic.model.micro_batch_tokens"
            )
        # A run of an earlier version has saved its recipe with the empty setting.
        return {name: value for name, value in values.items() if name != "micro_batch_tokens"}


class ScheduleSpec(Spec):
    """What of a run may overlap."""

    sampler: SamplerSpec = SyncSamplerSpec()
    """When a step's trajectories are sampled: before it, or while others train."""
    updater: UpdaterSpec = UpdaterSpec()


def check_schedule(recipe: Any) -> None:
    """Checks the section with all others.

    Raises:
        ValueError: A setting has no effect, or cannot be run with; names field and value.
    """
    sampler = recipe.schedule.sampler
    if isinstance(sampler, OneStepAheadSpec | AsyncSamplerSpec):
        if recipe.rollout is None:
            raise ValueError(
                f"schedule.sampler.type is {sampler.type!r}, which samples while the actor "
                "trains, but there is no rollout section: add one, or set the type to 'sync'"
            )
        mates = recipe.pool_of("rollout").roles
        if len(mates) > 1:
            raise ValueError(
                f"schedule.sampler.type is {sampler.type!r}, but the rollout role shares its "
                f"pool with {', '.join(r for r in mates if r != 'rollout')}: give it a pool "
                "of its own"
            )
        if not isinstance(recipe.algorithm, SampledSpec) or recipe.algorithm.chooses_prompts:
            raise ValueError(
                f"schedule.sampler.type is {sampler.type!r}, which algorithm "
                f"{recipe.algorithm.type!r} cannot be run with: set the type to 'sync'"
            )
    _check_sampler(recipe)
    _check_agents(recipe)
    if sampler.weights == "nccl":
        _check_exchanges(recipe)


def _check_sampler(recipe: Any) -> None:
    """Numbers of the sampler that are given have to have an effect, and one that works."""
    sampler, num_prompts = recipe.schedule.sampler, recipe.run.prompts_per_step
    sampling = recipe.sampling
    for name, given in (
        ("batch_size", sampler.batch_size is not None),
        ("block_rows", sampler.block_rows > 0),
    ):
        if given and sampling is None:
            raise ValueError(
                f"schedule.sampler.{name} is given, but algorithm {recipe.algorithm.type!r} "
                "samples nothing: leave it out"
            )
    if sampling is not None and sampler.block_rows % sampling.samples_per_prompt:
        raise ValueError(
            f"schedule.sampler.block_rows is {sampler.block_rows} and "
            f"algorithm.sampling.samples_per_prompt is {sampling.samples_per_prompt}: give a "
            "multiple, so that a block holds whole groups"
        )
    if sampler.batch_size is not None and sampler.batch_size > num_prompts:
        raise ValueError(
            f"schedule.sampler.batch_size is {sampler.batch_size}, but run.prompts_per_step is "
            f"{num_prompts}: give at most that, or leave it out"
        )


def _check_exchanges(recipe: Any) -> None:
    """Weights can go by exchanges where the actor and rollout services work side by side."""
    given = "schedule.sampler.weights is 'nccl'"
    if recipe.rollout is None or recipe.actor is None:
        raise ValueError(
            f"{given}, but there is no rollout section: the actor samples with its own "
            "weights; add one, or leave weights out"
        )
    if recipe.sampling is None:
        raise ValueError(
            f"{given}, but algorithm {recipe.algorithm.type!r} samples nothing by itself: leave "
            "weights out"
        )
    if any({"actor", "rollout"} <= set(pool.roles) for pool in recipe.pools.values()):
        raise ValueError(
            f"{given}, but the actor and the rollout role share a pool, so that they never "
            "work at the same time: give the rollout role a pool of its own"
        )
    sampler, num_ranks = recipe.schedule.sampler, recipe.layout("rollout").world_size
    if isinstance(sampler, AsyncSamplerSpec) and sampler.partial_rollouts and num_ranks > 1:
        raise ValueError(
            f"{given}, but rollout.layout has {num_ranks} ranks, which exchange activations by "
            "NCCL while new weights come: set schedule.sampler.partial_rollouts to false, "
            "give each rollout service one rank, or leave weights out"
        )


def _check_agents(recipe: Any) -> None:
    """Refuses what deals out a known number of rows: trajectories of agents have any number."""
    environment = None if recipe.actor is None else recipe.actor.environment
    if not isinstance(environment, AgentSpec):
        return
    why = f"actor.environment.type is {environment.type!r}, whose trajectories have any number of "
    if recipe.schedule.sampler.block_rows:
        raise ValueError(
            f"schedule.sampler.block_rows is {recipe.schedule.sampler.block_rows}, but {why}rows: "
            "leave block_rows out"
        )
    if recipe.algorithm.type == "dapo":
        raise ValueError(
            f"algorithm.type is {recipe.algorithm.type!r}, which selects whole groups of "
            f"samples_per_prompt rows, but {why}rows: give 'grpo' or 'rloo'"
        )
