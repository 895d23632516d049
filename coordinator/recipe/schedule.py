"""Schedules: what of a run may overlap, as templates of a recipe."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rolemesh.engine.specs import Spec


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
