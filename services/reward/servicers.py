"""The reward: judges trajectories, pulled by reference or sent inline, and may learn to."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import ClassVar, TypeVar

import grpc
import torch
from google.protobuf.message import Message

from rolemesh.engine.data.prompts import Split
from rolemesh.engine.data.trajectories import Kind, read_trajectories
from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.mesh import RankMesh
from rolemesh.engine.models.reward_model import RewardModel
from rolemesh.engine.rewards.pass_at import pass_at
from rolemesh.engine.rewards.sources import (
    ClassifierReward,
    RewardSource,
    checked,
    make_reward,
    reward_metrics,
)
from rolemesh.engine.specs import (
    ClassifierRewardSpec,
    OutsideRewardSpec,
    RewardSpec,
    WeightedSumSpec,
)
from rolemesh.engine.train.trainer import Trainer
from rolemesh.rpc.errors import InvalidRequestError, PreconditionError
from rolemesh.services.runtime.data_servicer import DataServicer
from rolemesh.services.runtime.device import rank_device
from rolemesh.services.runtime.model_role import ModelRole
from rolemesh.services.runtime.model_servicers import TrainerServicer
from rolemesh.services.runtime.role import InitializeResult, ProgressCallback
from rolemesh.services.runtime.rollout_servicer import PromptSource
from rolemesh.services.runtime.rows import row_tokens
from rolemesh.services.runtime.runtime import Call, Context, Runtime
from rolemesh.services.runtime.weights_servicer import WeightsServicer
from rolemesh.v1 import (
    data_pb2_grpc,
    experience_pb2,
    reward_pb2,
    reward_pb2_grpc,
    trainer_pb2_grpc,
)

T = TypeVar("T")


class RewardRole(ModelRole):
    """Holds one reward source, and its trainer where the recipe gives it optimizer and data.

    Invariant: a source that is trained scores with the weights that its trainer has.
    """

    name = "reward"
    spec_class = RewardSpec
    column: ClassVar[str] = "rewards"
    """The column that it produces."""

    def __init__(self) -> None:
        super().__init__()
        self._source: RewardSource | None = None
        self._learner: ClassifierReward | None = None
        self._data: PromptSource | None = None

    @property
    def source(self) -> RewardSource:
        """The reward source; raises NOT_INITIALIZED before Initialize."""
        return self.initialized(self._source)

    @property
    def trainer(self) -> Trainer:
        """The trainer; raises NOT_INITIALIZED, or NOT_TRAINABLE where there is none."""
        return self._trained(self._trainer)

    def initialize(
        self, spec: RewardSpec, run_seed: int, progress: ProgressCallback, mesh: RankMesh
    ) -> InitializeResult:
        """Builds the source, and loads its model when it has one."""
        progress("load reward", 0, 1)
        facts = {f"{self.name}.source": spec.source.type}
        if (
            spec.optimizer is None
            or spec.data is None
            or not isinstance(spec.source, ClassifierRewardSpec)
        ):
            if isinstance(spec.source, OutsideRewardSpec | WeightedSumSpec):
                raise InvalidRequestError(
                    f"source.type is {spec.source.type!r}, which this service cannot serve yet",
                    reason="SPEC_INVALID",
                )
            self._source = make_reward(spec.source, rank_device(), mesh)
            progress("load reward", 1, 1)
            return InitializeResult(facts=facts)
        self._data = PromptSource(spec.source.model, spec.data, run_seed)
        model = RewardModel(spec.source, device=rank_device(), mesh=mesh)
        result = self.train_with(model, spec.optimizer, run_seed)
        self._source = self._learner = ClassifierReward(
            spec.source, rank_device(), mesh, trained=super().trainer.rank_model
        )
        progress("load reward", 1, 1)
        return InitializeResult(
            policy_version=result.policy_version,
            num_parameters=result.num_parameters,
            facts={**facts, **self._data.facts},
        )

    def register(self, server: grpc.aio.Server, runtime: Runtime) -> list[str]:
        """Serves rewards; and training, weights and data, which refuse where nothing is trained."""
        reward_pb2_grpc.add_RewardServiceServicer_to_server(RewardServicer(self, runtime), server)
        trainer_pb2_grpc.add_TrainerServiceServicer_to_server(
            TrainerServicer(self, runtime), server
        )
        WeightsServicer(self, runtime).add_to(server)
        data_pb2_grpc.add_DataServiceServicer_to_server(DataServicer(self, runtime), server)
        return [
            f"rolemesh.v1.{family}Service" for family in ("Reward", "Trainer", "Weights", "Data")
        ]

    def read(self, split: Split, start: int, count: int, kind: Kind) -> Experience:
        """Trajectories to train on, in the tokens that this reward judges."""
        learner, data = self._trained(self._learner), self._trained(self._data)
        batch = read_trajectories(
            data.prompts, split, start, count, kind, max_tokens=learner.max_tokens
        )
        return learner.as_scored(batch)

    def sleep(self) -> int:
        """Moves what is trained to host memory; other rewards stay, their weights are small."""
        return 0 if self._trainer is None else super().sleep()

    def wake(self) -> int:
        """Brings back what sleep has moved."""
        return 0 if self._trainer is None else super().wake()

    def close(self) -> None:
        """Drops source, trainer and data."""
        self._source = self._learner = self._data = None
        super().close()

    def _trained(self, part: T | None) -> T:
        """The part; NOT_INITIALIZED before Initialize, NOT_TRAINABLE where nothing is trained."""
        self.initialized(self._source)
        if part is None:
            raise PreconditionError(
                f"the {self.name} of this run is not trained: give {self.name} a source of type "
                "'classifier', an optimizer and data",
                reason="NOT_TRAINABLE",
            )
        return part


class RewardServicer(reward_pb2_grpc.RewardServiceServicer):
    """RewardService over a reward source."""

    def __init__(self, role: RewardRole, runtime: Runtime) -> None:
        self._role = role
        self._runtime = runtime

    async def ComputeReward(
        self,
        request: reward_pb2.ComputeRewardRequest,
        context: Context,
    ) -> AsyncIterator[reward_pb2.ComputeRewardResponse]:
        """See reward.proto."""

        async def by_reference(call: Call) -> Message:
            source = self._role.source
            if request.pass_at and source.full_score is None:
                raise InvalidRequestError(
                    f"pass_at is {list(request.pass_at)}, but this {self._role.name} has no full "
                    "score that a row could reach: leave pass_at out, or take a source that has",
                    reason="PASS_AT_INVALID",
                )
            share = self._runtime.share("3D_PROTO", row_tokens(request.experience))
            batch = await self._runtime.pull(
                request.experience, source.columns, call, rows=share.rows
            )
            scores = await call.compute(source.score, batch, call.progress)
            if share.counts:
                scores = checked(scores, len(batch))
            column = Experience({self._role.column: Column(ColumnKind.ROW, scores)})
            return experience_pb2.ExperienceResult(
                experience=self._runtime.publish(request.key, column, share=share),
                report=call.report({}, 0),
            )

        async def summarise(result: experience_pb2.ExperienceResult, call: Call) -> None:
            column = self._role.column
            judged = await self._runtime.pull(result.experience, [column], call)
            rewards = judged[column].values
            result.report.metrics.update(call.finite(metrics(rewards)))
            full_score = self._role.source.full_score
            if request.pass_at and full_score is not None:
                prompts = await self._runtime.pull(request.experience, ["prompt_ids"], call)
                prompt_ids = prompts["prompt_ids"].values
                found = pass_at(rewards >= full_score, prompt_ids, request.pass_at)
                result.report.metrics.update(call.finite(found))

        def metrics(rewards: torch.Tensor) -> dict[str, float]:
            return reward_metrics(rewards, self._role.source.full_score, self._role.name)

        async def inline(call: Call) -> Message:
            source = self._role.source
            batch = _experience_of(request.trajectories)
            scores = await call.compute(source.score, batch, call.progress)
            if not self._runtime.mesh.pp.is_last:
                return reward_pb2.Rewards()  # a classifier's scores come out of its last stage
            rewards = checked(scores, len(batch))
            return reward_pb2.Rewards(rewards=rewards.tolist(), metrics=metrics(rewards))

        kind = request.WhichOneof("input")
        if kind is None or (kind == "trajectories" and not request.trajectories.trajectories):
            raise InvalidRequestError(
                "the request holds no trajectories: set experience or trajectories",
                reason="INPUT_MISSING",
            )
        is_reference = kind == "experience"
        if request.pass_at and not is_reference:
            raise InvalidRequestError(
                "pass_at is set with trajectories, which do not say which are of one prompt: send "
                "an experience, or leave it out",
                reason="PASS_AT_INVALID",
            )
        stream = self._runtime.keyed(
            request,
            context,
            reward_pb2.ComputeRewardResponse,
            by_reference if is_reference else inline,
            finish=summarise if is_reference else None,
        )
        async for response in stream:
            yield response


def _experience_of(batch: reward_pb2.TrajectoryBatch) -> Experience:
    rows = batch.trajectories
    return Experience(
        {
            "tokens": Column.ragged(
                ColumnKind.SEQUENCE,
                [[*row.prompt_tokens, *row.completion_tokens] for row in rows],
                torch.int64,
            ),
            "prompt_lengths": Column(
                ColumnKind.ROW, torch.tensor([len(row.prompt_tokens) for row in rows])
            ),
            "prompt_text": Column.text([row.prompt for row in rows]),
            "completion_text": Column.text([row.completion for row in rows]),
            "answer": Column.text([row.answer for row in rows]),
            "metadata": Column.text([row.metadata_json for row in rows]),
        }
    )
