"""The handles that algorithms call. Each call makes a node and returns a future at once.

How to sample, which loss, which estimator: the recipe's algorithm section says it, the handle adds
it to the call. The columns that a call reads and produces are written down here, once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rolemesh.coordinator.connection import (
    ProgressCallback,
    RoleConnection,
    summarize_reference,
    to_algorithm_part,
)
from rolemesh.coordinator.dataflow import (
    Dataflow,
    ExperienceFuture,
    Node,
    NodeKind,
    Outcome,
    Part,
    UpdateFuture,
)
from rolemesh.coordinator.journal import Journal
from rolemesh.coordinator.recipe import PpoSpec
from rolemesh.engine.specs import SamplingSpec
from rolemesh.v1 import (
    experience_pb2,
    logprob_pb2,
    operation_pb2,
    reward_pb2,
    rollout_pb2,
    trainer_pb2,
    value_pb2,
)

ROLLOUT_COLUMNS = (
    "tokens",
    "prompt_lengths",
    "logprobs",
    "loss_mask",
    "policy_versions",
    "prompt_ids",
    "sample_indexes",
    "finished",
    "prompt_text",
    "completion_text",
    "answer",
    "metadata",
)
_SEQUENCES = ("tokens", "prompt_lengths")


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """Names prompts without holding them: positions in the data that the sampling role loaded."""

    start: int
    count: int
    is_held_out: bool = False

    def to_proto(self) -> rollout_pb2.PromptSlice:
        """As it travels."""
        split = rollout_pb2.SPLIT_HELD_OUT if self.is_held_out else rollout_pb2.SPLIT_TRAIN
        return rollout_pb2.PromptSlice(split=split, start=self.start, count=self.count)


@dataclass(frozen=True)
class StepContext:
    """What the handles of one step share."""

    step: int
    algorithm: PpoSpec
    dataflow: Dataflow
    journal: Journal
    connections: Mapping[str, RoleConnection]
    on_phase: Callable[[str, str, int, int], None]
    """Gets role, stage, units done and units in all."""
    is_evaluation: bool = False
    """Evaluation has nodes and operations of its own, so that training's stay the same."""


_Call = Callable[
    [operation_pb2.OperationKey, experience_pb2.ExperienceRef | None, ProgressCallback],
    Awaitable[Outcome],
]


class RoleHandle:
    """What every role's handle does: name the operation, run it as a node, record the answer."""

    role: str

    def __init__(self, context: StepContext) -> None:
        self._context = context
        self._connection = context.connections[self.role]

    def _node(
        self,
        kind: NodeKind,
        method: str,
        call: _Call,
        reads: ExperienceFuture | None = None,
        produces: tuple[str, ...] = (),
    ) -> Part:
        context = self._context
        operation = f"{self.role}.{method}"
        if context.is_evaluation:
            kind, operation = NodeKind.EVAL, f"evaluate.{operation}"
        key = context.journal.next_key(context.step, operation)

        def on_progress(progress: operation_pb2.Progress) -> None:
            stage = f"{method}: {progress.stage}" if progress.stage else method
            context.on_phase(self.role, stage, progress.done, progress.total)

        async def work(node: Node, experience: experience_pb2.ExperienceRef | None) -> Outcome:
            context.on_phase(self.role, method, 0, 0)
            outcome = await call(key, experience, on_progress)
            if outcome.policy_version is not None:
                self._connection.policy_version = outcome.policy_version
            await context.journal.acknowledge(key, _summarize(outcome))
            context.on_phase(self.role, "", 0, 0)
            return outcome

        return context.dataflow.call(
            kind=kind,
            role=self.role,
            method=method,
            sequence=key.sequence,
            work=work,
            reads=reads,
            produces=produces,
        )

    async def _experience(self, call: Any, on_progress: ProgressCallback) -> Outcome:
        message = await self._connection.finish(call, on_progress)
        return Outcome(report=message.result.report, experience=message.result.experience)


class _TrainedRole(RoleHandle):
    """A role whose weights change: actor and critic."""

    def _update(self, reads: ExperienceFuture, loss: Any) -> UpdateFuture:
        algorithm = self._context.algorithm

        async def call(
            key: operation_pb2.OperationKey,
            experience: experience_pb2.ExperienceRef | None,
            on_progress: ProgressCallback,
        ) -> Outcome:
            request = trainer_pb2.UpdateRequest(
                key=key,
                experience=experience,
                loss=to_algorithm_part(loss),
                epochs=algorithm.epochs,
                mini_batch_rows=algorithm.mini_batch_rows,
                expected_policy_version=self._connection.policy_version,
            )
            stream = self._connection.trainer.Update(request)
            message = await self._connection.finish(stream, on_progress)
            return Outcome(
                report=message.result.report, policy_version=message.result.policy_version
            )

        return UpdateFuture(self._node(NodeKind.UPDATE, "update", call, reads))


class ActorRole(_TrainedRole):
    """The policy: samples, estimates advantages, trains."""

    role = "actor"

    def generate(
        self, prompts: PromptBatch, sampling: SamplingSpec | None = None
    ) -> ExperienceFuture:
        """Completions of the prompts; sampled as the recipe says unless told otherwise."""
        spec = sampling or self._context.algorithm.sampling

        async def call(
            key: operation_pb2.OperationKey,
            _: experience_pb2.ExperienceRef | None,
            on_progress: ProgressCallback,
        ) -> Outcome:
            request = rollout_pb2.GenerateRequest(
                key=key,
                prompts=prompts.to_proto(),
                sampling=rollout_pb2.Sampling(
                    samples_per_prompt=spec.samples_per_prompt,
                    temperature=spec.temperature,
                    top_p=spec.top_p,
                    top_k=spec.top_k,
                    max_new_tokens=spec.max_new_tokens,
                    greedy=spec.greedy,
                ),
            )
            return await self._experience(self._connection.rollout.Generate(request), on_progress)

        part = self._node(NodeKind.SAMPLE, "generate", call, produces=ROLLOUT_COLUMNS)
        return self._context.dataflow.experience(part)

    def compute_advantages(self, experience: ExperienceFuture, estimator: str) -> ExperienceFuture:
        """Advantages, and returns where the estimator has a critic.

        Args:
            experience: With rewards, and what the estimator reads besides.
            estimator: Its name, e.g. "gae"; its parameters are the recipe's.

        Raises:
            ValueError: The recipe's estimator is another one.
        """
        spec = self._context.algorithm.advantages
        if spec.type != estimator:
            raise ValueError(
                f"the algorithm asks for the estimator {estimator!r}, but algorithm.advantages.type"
                f" is {spec.type!r}: correct the recipe or the algorithm"
            )
        needs = (*spec.columns(), "prompt_lengths")

        async def call(
            key: operation_pb2.OperationKey,
            reference: experience_pb2.ExperienceRef | None,
            on_progress: ProgressCallback,
        ) -> Outcome:
            request = trainer_pb2.ComputeAdvantagesRequest(
                key=key, experience=reference, estimator=to_algorithm_part(spec)
            )
            stream = self._connection.trainer.ComputeAdvantages(request)
            return await self._experience(stream, on_progress)

        part = self._node(
            NodeKind.INFER,
            "compute_advantages",
            call,
            # KL is reported wherever both log-probs are there.
            experience.select(needs, uses=("logprobs", "reference_logprobs")),
            spec.makes(),
        )
        return self._context.dataflow.experience(part)

    def update(self, experience: ExperienceFuture) -> UpdateFuture:
        """Trains the policy with the recipe's policy loss."""
        loss = self._context.algorithm.policy_loss
        return self._update(experience.select((*_SEQUENCES, *loss.columns())), loss)


class CriticRole(_TrainedRole):
    """The value function."""

    role = "critic"

    def compute_values(self, experience: ExperienceFuture) -> ExperienceFuture:
        """The value before every completion token."""

        async def call(
            key: operation_pb2.OperationKey,
            reference: experience_pb2.ExperienceRef | None,
            on_progress: ProgressCallback,
        ) -> Outcome:
            request = value_pb2.ComputeValuesRequest(key=key, experience=reference)
            stream = self._connection.value.ComputeValues(request)
            return await self._experience(stream, on_progress)

        reads = experience.select(_SEQUENCES)
        part = self._node(NodeKind.INFER, "compute_values", call, reads, ("values",))
        return self._context.dataflow.experience(part)

    def update(self, experience: ExperienceFuture) -> UpdateFuture:
        """Trains the values with the recipe's value loss."""
        loss = self._context.algorithm.value_loss
        return self._update(experience.select((*_SEQUENCES, *loss.columns())), loss)


class ReferenceRole(RoleHandle):
    """The frozen policy that the KL is taken to."""

    role = "reference"

    def compute_logprobs(self, experience: ExperienceFuture) -> ExperienceFuture:
        """The frozen policy's log-prob of every completion token, at the loss's temperature."""
        temperature = self._context.algorithm.policy_loss.temperature

        async def call(
            key: operation_pb2.OperationKey,
            reference: experience_pb2.ExperienceRef | None,
            on_progress: ProgressCallback,
        ) -> Outcome:
            request = logprob_pb2.ComputeLogprobsRequest(
                key=key,
                experience=reference,
                column="reference_logprobs",
                temperature=temperature,
            )
            stream = self._connection.logprob.ComputeLogprobs(request)
            return await self._experience(stream, on_progress)

        reads = experience.select(_SEQUENCES)
        part = self._node(NodeKind.INFER, "compute_logprobs", call, reads, ("reference_logprobs",))
        return self._context.dataflow.experience(part)


class RewardRole(RoleHandle):
    """The judge."""

    role = "reward"

    def compute_reward(self, experience: ExperienceFuture) -> ExperienceFuture:
        """One reward a trajectory."""

        async def call(
            key: operation_pb2.OperationKey,
            reference: experience_pb2.ExperienceRef | None,
            on_progress: ProgressCallback,
        ) -> Outcome:
            request = reward_pb2.ComputeRewardRequest(key=key, experience=reference)
            stream = self._connection.reward.ComputeReward(request)
            return await self._experience(stream, on_progress)

        reads = experience.select(
            (*_SEQUENCES, "prompt_text", "completion_text", "answer", "metadata")
        )
        part = self._node(NodeKind.INFER, "compute_reward", call, reads, ("rewards",))
        return self._context.dataflow.experience(part)


ROLE_HANDLES: Mapping[str, type[RoleHandle]] = {
    handle.role: handle for handle in (ActorRole, CriticRole, ReferenceRole, RewardRole)
}
"""By the name under which an algorithm asks for a role."""


def _summarize(outcome: Outcome) -> dict[str, Any]:
    summary: dict[str, Any] = {"num_tokens": outcome.report.num_tokens}
    if outcome.policy_version is not None:
        summary["policy_version"] = outcome.policy_version
    if outcome.experience is not None:
        summary |= summarize_reference(outcome.experience)
    return summary
