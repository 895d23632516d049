"""The handles that algorithms call. Each call makes a node and returns a future at once.

How to sample, which loss, which estimator: the recipe's algorithm section says it, the handle adds
it to the call. What a part reads and makes its spec says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rolemesh.coordinator.dataflow.calls.role_calls import PromptBatch, RoleHandle, StepContext
from rolemesh.coordinator.dataflow.calls.scoring import compute_logprobs, dropping
from rolemesh.coordinator.dataflow.errors import RunError
from rolemesh.coordinator.dataflow.futures import (
    CallFuture,
    ExperienceFuture,
    NodeKind,
)
from rolemesh.engine.specs import (
    DistillationLossSpec,
    LossSpec,
    OwnFunctionSpec,
    SftLossSpec,
)
from rolemesh.engine.specs.columns import (
    DATA_COLUMNS,
    ENVIRONMENT_REWARDS,
    INPUT_COLUMNS,
    IS_JUDGED,
    PAIR_COLUMNS,
    PROXIMAL_LOGPROBS,
    ROLLOUT_COLUMNS,
    TEACHER_LOGPROBS,
    TRAJECTORY_COLUMNS,
)
from rolemesh.rpc.calls.result_call import ProgressCallback
from rolemesh.rpc.calls.service_client import ServiceClient, to_algorithm_part
from rolemesh.rpc.experience.references import concat_references
from rolemesh.v1 import (
    data_pb2,
    experience_pb2,
    operation_pb2,
    trainer_pb2,
)

__all__ = [
    "ROLE_HANDLES",
    "ActorHandle",
    "CostHandle",
    "CriticHandle",
    "ExperienceFuture",
    "PromptBatch",
    "ReferenceHandle",
    "RewardHandle",
    "StepContext",
    "TeacherHandle",
]

_Key = operation_pb2.OperationKey
_Ref = experience_pb2.ExperienceRef


class _TrainedRole(RoleHandle):
    """A role whose weights change."""

    def _update(
        self,
        experience: ExperienceFuture,
        loss: LossSpec,
        pretraining: ExperienceFuture | None = None,
    ) -> CallFuture:
        algorithm = self.context.algorithm
        needs = (*INPUT_COLUMNS, *loss.columns())
        reads = experience.select(needs, uses=loss.optional_columns())
        if self.context.is_evaluation:
            return self._compute_loss(reads, loss)
        self.context.trained_on.append(experience)
        # The texts are rows of their own: the node waits for them, but does not join them.
        texts = () if pretraining is None else pretraining.parts

        async def call(client: ServiceClient, key: _Key, ref: _Ref, told: ProgressCallback) -> Any:
            auxiliary = []
            if pretraining is not None:
                auxiliary = [
                    trainer_pb2.AuxiliaryLoss(
                        experience=await pretraining.result(),
                        loss=_part(SftLossSpec()),
                        weight=self.context.parts.pretraining_weight,
                    )
                ]
            return await client.update(
                key,
                ref,
                _part(loss),
                epochs=algorithm.epochs,
                mini_batch_rows=algorithm.mini_batch_rows,
                rows_per_unit=algorithm.rows_per_unit,
                expected_policy_version=self.connection.policy_version,
                auxiliary=auxiliary,
            ).result(told)

        return self.node(NodeKind.UPDATE, "update", call, reads, after=texts)

    def _compute_loss(self, reads: ExperienceFuture, loss: LossSpec) -> CallFuture:
        """What an update of held-out rows is: its loss, and no change."""
        return self.node(
            NodeKind.EVAL,
            "compute_loss",
            lambda client, key, ref, told: client.forward_backward(
                key,
                ref,
                _part(loss),
                rows_per_unit=self.context.algorithm.rows_per_unit,
                without_gradients=True,
            ).result(told),
            reads,
        )

    def _read(
        self,
        prompts: PromptBatch,
        kind: data_pb2.ReadKind.ValueType,
        columns: tuple[str, ...] = DATA_COLUMNS,
        *,
        is_pretraining: bool = False,
    ) -> ExperienceFuture:
        rows = prompts.to_proto(is_pretraining=is_pretraining)
        return self.infer(
            "read",
            lambda client, key, _, told: client.read_batch(key, rows, kind).result(told),
            produces=columns,
        )

    def read_preferences(self, prompts: PromptBatch) -> ExperienceFuture:
        """Pairs of the data: for each row the chosen completion, then the rejected one."""
        kind = data_pb2.READ_KIND_PREFERENCE
        return self._read(prompts, kind, (*DATA_COLUMNS, *PAIR_COLUMNS))


class ActorHandle(_TrainedRole):
    """The policy: samples, estimates advantages, trains."""

    role = "actor"

    def generate(self, prompts: PromptBatch, *, greedy: bool = False) -> ExperienceFuture:
        """Completions of the prompts, sampled as the recipe says.

        Args:
            prompts: What to complete.
            greedy: Takes the likeliest completion instead, one a prompt.
        """
        sampling = self.context.parts.sampling
        if greedy:
            sampling = sampling.model_copy(update={"greedy": True, "samples_per_prompt": 1})
        return self.context.sampler.generate(self.context, prompts, sampling)

    def generate_selected(
        self, prompts: PromptBatch, judge: Callable[[ExperienceFuture], ExperienceFuture]
    ) -> ExperienceFuture:
        """As many groups as there are prompts, all of which the recipe's selection wants.

        Samples and judges further prompts until there are enough (dynamic sampling, arXiv
        2503.14476, section 3.2).

        Args:
            prompts: The first ones to complete.
            judge: Adds rewards, e.g. `reward.compute_reward`.

        Raises in the node:
            RunError: algorithm.max_rounds rounds did not give enough groups.
        """
        max_rounds = self.context.parts.max_rounds

        async def collect() -> experience_pb2.ExperienceRef:
            kept, missing, batch = [], prompts.count, prompts
            for _ in range(max_rounds):
                rollouts = self.generate(batch)
                rollouts |= judge(rollouts)
                chosen = (await self._select(rollouts, missing).outcomes[0]).experience
                if chosen is not None:
                    kept.append(chosen)
                    missing -= chosen.num_rows // self.context.parts.sampling.samples_per_prompt
                if missing == 0:
                    return concat_references(kept)
                batch = prompts.more(prompts.count)
            raise RunError(
                f"step {self.context.step}: {max_rounds} rounds of {prompts.count} prompts gave "
                f"{prompts.count - missing} groups that algorithm.selection wants, not "
                f"{prompts.count}: raise algorithm.max_rounds, or give prompts that the policy "
                "answers sometimes right and sometimes wrong"
            )

        return self.context.dataflow.defer(collect, (*ROLLOUT_COLUMNS, "rewards"))

    def _select(self, rollouts: ExperienceFuture, max_groups: int) -> CallFuture:
        rule = _part(self.context.parts.selection)
        return self.node(
            NodeKind.INFER,
            "select",
            lambda client, key, ref, told: client.select_groups(key, ref, rule, max_groups).result(
                told
            ),
            rollouts,
        )

    def read_demonstrations(self, prompts: PromptBatch) -> ExperienceFuture:
        """Given completions of the data."""
        return self._read(prompts, data_pb2.READ_KIND_DEMONSTRATION)

    def read_judgements(self, prompts: PromptBatch) -> ExperienceFuture:
        """Judged completions of the data, each with a row to estimate the divergence from."""
        kind = data_pb2.READ_KIND_JUDGEMENT
        return self._read(prompts, kind, (*DATA_COLUMNS, *PAIR_COLUMNS))

    def read_pretraining(self, prompts: PromptBatch) -> ExperienceFuture | None:
        """As many pretraining texts; None where algorithm.pretraining_weight is 0."""
        if self.context.parts.pretraining_weight == 0:
            return None
        return self._read(prompts, data_pb2.READ_KIND_DEMONSTRATION, is_pretraining=True)

    def compute_logprobs(self, experience: ExperienceFuture) -> ExperienceFuture:
        """Log-prob of every completion token under the weights that the step begins with."""
        return compute_logprobs(self, experience, PROXIMAL_LOGPROBS)

    def compute_advantages(
        self,
        experience: ExperienceFuture,
        estimator: str | None = None,
        *,
        baseline: ExperienceFuture | None = None,
    ) -> ExperienceFuture:
        """What the estimator makes: advantages, returns where it has a critic, or pairs.

        Args:
            experience: With rewards, and what the estimator reads besides.
            estimator: Its name, e.g. "gae"; its parameters are the recipe's. None: the recipe
                names it, too.
            baseline: Trajectories to compare with, for an estimator that does.

        Raises:
            ValueError: The recipe's estimator is another one.
        """
        spec = self.context.parts.advantages
        if estimator not in (None, spec.type) and not isinstance(spec, OwnFunctionSpec):
            raise ValueError(
                f"the algorithm asks for the estimator {estimator!r}, but algorithm.advantages.type"
                f" is {spec.type!r}: correct the recipe or the algorithm"
            )
        if (baseline is None) != (not spec.baseline_columns()):
            has = "compares with no" if baseline is not None else "compares with a second"
            raise ValueError(
                f"the estimator {spec.type!r} {has} experience: call it "
                f"{'without' if baseline is not None else 'with'} baseline"
            )
        compared = None if baseline is None else baseline.select(spec.baseline_columns())

        async def call(client: ServiceClient, key: _Key, ref: _Ref, told: ProgressCallback) -> Any:
            other = None if compared is None else await compared.result()
            return await client.compute_advantages(key, ref, _part(spec), other).result(told)

        # Groups, whitening and controllers take the whole batch, in one block.
        needs = (*spec.columns(), "prompt_lengths")
        uses = (*spec.optional_columns(), *spec.used_columns())
        reads = experience.select(needs, uses=uses).whole()
        after = () if compared is None else compared.parts
        return self.infer("compute_advantages", call, reads, spec.makes(), after=after)

    def update(
        self, experience: ExperienceFuture, pretraining: ExperienceFuture | None = None
    ) -> CallFuture:
        """Trains the policy with the recipe's policy loss.

        A loss that weighs tokens by the log-probs at the start of the update gets them here, unless
        the experience has them.

        Args:
            experience: What the loss reads.
            pretraining: Texts whose likelihood is kept up beside it.
        """
        loss = self.context.parts.policy_loss
        if PROXIMAL_LOGPROBS in loss.columns() and PROXIMAL_LOGPROBS not in experience.columns:
            experience |= self.compute_logprobs(experience)
        update = self._update(experience, loss, pretraining)
        self.context.policy_updates.append(update)
        return update


class CriticHandle(_TrainedRole):
    """The value function."""

    role = "critic"

    def compute_values(self, experience: ExperienceFuture) -> ExperienceFuture:
        """The value before every completion token."""
        return self.infer(
            "compute_values",
            lambda client, key, ref, told: client.compute_values(key, ref).result(told),
            experience.select(INPUT_COLUMNS),
            ("values",),
        )

    def update(self, experience: ExperienceFuture) -> CallFuture:
        """Trains the values with the recipe's value loss."""
        return self._update(experience, self.context.parts.value_loss)


class ReferenceHandle(RoleHandle):
    """The frozen policy that the KL is taken to: of its own services, or the actor's base."""

    role = "reference"

    def compute_logprobs(self, experience: ExperienceFuture) -> ExperienceFuture:
        """The frozen policy's log-prob of every completion token, at the loss's temperature."""
        return compute_logprobs(self, experience, "reference_logprobs")


class TeacherHandle(RoleHandle):
    """The policy that the trained one is drawn to: of its own services, or that one itself.

    Or several such policies, each of which scores rows of its own.
    """

    role = "teacher"

    def compute_logprobs(self, experience: ExperienceFuture) -> ExperienceFuture:
        """The teacher's log-prob of every completion token, at the loss's temperature.

        Where the policy loss compares distributions, also what the teacher finds likeliest there.
        Of several teachers each row has those of its own.
        """
        loss = self.context.parts.policy_loss
        top_k = loss.top_k if isinstance(loss, DistillationLossSpec) else 0
        return compute_logprobs(self, experience, TEACHER_LOGPROBS, top_k=top_k)


def _part(spec: Any) -> trainer_pb2.AlgorithmPart:
    """A loss, an estimator or a rule of the recipe as it travels."""
    return to_algorithm_part(spec.model_dump(mode="json"))


class _JudgingRole(_TrainedRole):
    """A role that gives every trajectory a number."""

    def _judge(
        self, experience: ExperienceFuture, method: str, column: str, pass_at: tuple[int, ...] = ()
    ) -> ExperienceFuture:
        needs, makes = dropping(self)
        # The parts of a cost have no reader, and would have the names of the reward's.
        parts = self.context.reward_columns if self.role == RewardHandle.role else ()
        uses = (ENVIRONMENT_REWARDS, "prompt_ids", IS_JUDGED)
        reads = experience.select((*TRAJECTORY_COLUMNS, *needs), uses=uses)
        return self.infer(
            method,
            lambda client, key, ref, told: client.compute_reward(key, ref, pass_at=pass_at).result(
                told
            ),
            reads,
            (column, *parts, *makes),
        )


class RewardHandle(_JudgingRole):
    """The judge, and the reward model that is trained."""

    role = "reward"

    def compute_reward(
        self, experience: ExperienceFuture, *, pass_at: tuple[int, ...] = ()
    ) -> ExperienceFuture:
        """One reward a trajectory.

        Args:
            experience: The trajectories.
            pass_at: Also reports pass@k for these k.
        """
        return self._judge(experience, "compute_reward", "rewards", pass_at)

    def update(self, experience: ExperienceFuture) -> CallFuture:
        """Trains the reward model with the recipe's reward loss."""
        return self._update(experience, self.context.parts.reward_loss)


class CostHandle(_JudgingRole):
    """The judge of what is to be kept low."""

    role = "cost"

    def compute_cost(self, experience: ExperienceFuture) -> ExperienceFuture:
        """One cost a trajectory."""
        return self._judge(experience, "compute_cost", "costs")


ROLE_HANDLES: Mapping[str, type[RoleHandle]] = {
    handle.role: handle
    for handle in (
        ActorHandle,
        CriticHandle,
        ReferenceHandle,
        TeacherHandle,
        RewardHandle,
        CostHandle,
    )
}
"""By the name under which an algorithm asks for a role."""
