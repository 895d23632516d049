"""Generation of a step as calls that are dealt out over services that sample."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rolemesh.coordinator.dataflow.calls.role_calls import PromptBatch, ServiceNodes, StepContext
from rolemesh.coordinator.dataflow.errors import RunError
from rolemesh.coordinator.dataflow.futures import CallFuture, ExperienceFuture
from rolemesh.coordinator.dataflow.graph import OnBlock
from rolemesh.coordinator.recipe.sections.schedule import AsyncSamplerSpec, SamplerSpec
from rolemesh.engine.specs import SamplingSpec
from rolemesh.rpc.calls.result_call import ProgressCallback
from rolemesh.v1 import experience_pb2, operation_pb2, rollout_pb2


@dataclass(frozen=True, slots=True)
class Generation:
    """Completions of prompts, while calls make them."""

    experience: ExperienceFuture
    """Of all calls, in the order of prompts."""
    calls: Mapping[str, Sequence[CallFuture]]
    """By the service that makes them, or makes them where it can."""


class GenerationCalls:
    """Generation as calls of `batch_size` prompts each, dealt out over services."""

    def __init__(
        self,
        spec: SamplerSpec,
        columns: tuple[str, ...],
        *,
        services_change: bool = False,
        rows_vary: bool = False,
    ) -> None:
        """Prepares.

        Args:
            spec: The schedule's sampler.
            columns: Columns of a trajectory.
            services_change: Whether services may leave while calls of them wait.
            rows_vary: Whether a trajectory may have several rows or none, as those of agents.
        """
        self.spec = spec
        self._rows_vary = rows_vary
        self.columns = columns
        self._services_change = services_change

    def may_go_to_another(self, context: StepContext) -> bool:
        """Whether a call goes to another service that is free when its own is not.

        So it is in the asynchronous schedule, where timing decides other things too, and where
        services come and go: then calls have `batch_size` prompts, whichever service makes them.
        """
        is_async = isinstance(self.spec, AsyncSamplerSpec) and not context.is_evaluation
        return is_async or self._services_change

    def make(
        self,
        context: StepContext,
        services: Sequence[str],
        prompts: PromptBatch,
        sampling: SamplingSpec,
        before: Mapping[str, Sequence[CallFuture]],
    ) -> Generation:
        """Makes the calls.

        A prompt goes to the same service whenever a step samples it, so that its cache serves it
        again, and which rows are decoded together does not depend on timing, unless a call may go
        to another service.

        Args:
            context: Of the step.
            services: Who samples.
            prompts: Of the step.
            sampling: How.
            before: By service, what its calls wait for.
        """
        calls: defaultdict[str, list[CallFuture]] = defaultdict(list)
        parts = []
        start = 0
        for number, count in enumerate(self.spec.calls(prompts.count, len(services))):
            # Who is asked first does not change, for the sake of caches.
            service = services[number % len(services)]
            part = prompts.part(start, count)
            start += count
            made = self._call(context, service, part, sampling, before.get(service, ()))
            calls[service].append(made)
            parts.append(made)
        whole = CallFuture(
            nodes=tuple(node for part in parts for node in part.nodes),
            outcomes=tuple(outcome for part in parts for outcome in part.outcomes),
            columns=frozenset(self.columns),
        )
        return Generation(ExperienceFuture(context.dataflow, (whole,)), calls)

    def _call(
        self,
        context: StepContext,
        preferred: str,
        prompts: PromptBatch,
        sampling: SamplingSpec,
        after: Sequence[CallFuture],
    ) -> CallFuture:
        num_rows = prompts.count * sampling.samples_per_prompt
        # Evaluation draws another number of samples, and waits for all of them anyway.
        block_rows = 0 if context.is_evaluation else self.spec.block_rows

        async def call(
            chosen: ServiceNodes,
            key: operation_pb2.OperationKey,
            on_block: OnBlock,
            on_progress: ProgressCallback,
        ) -> experience_pb2.ExperienceResult:
            service = chosen.service

            def take(block: rollout_pb2.GeneratedBlock) -> None:
                index, rows = block.index, block.experience.num_rows
                wanted = min(block_rows, num_rows - index * block_rows)
                if rows != wanted:
                    raise RunError(
                        f"step {context.step}: {service}.generate sent a block {index} of {rows} "
                        f"rows, not {wanted}: a block holds block_rows trajectories in the order "
                        "of prompts, as rollout.proto says"
                    )
                on_block(index, block.experience)

            result = await chosen.client.generate(
                key,
                prompts.to_proto(),
                rollout_pb2.Sampling(**sampling.model_dump()),
                block_rows=block_rows,
            ).result(on_progress, take)
            made = result.experience.num_rows
            if made != num_rows and not (self._rows_vary and made):
                raise RunError(
                    f"step {context.step}: {service}.generate answered with {made} trajectories, "
                    f"not the {num_rows} that were asked for; see the log of the {service}"
                )
            return result

        return ServiceNodes(context, preferred).sample_node(
            call,
            num_blocks=math.ceil(num_rows / block_rows) if 0 < block_rows < num_rows else 1,
            produces=self.columns,
            after=after,
            or_another=self.may_go_to_another(context),
        )
