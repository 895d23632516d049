"""The reward: judges trajectories, pulled by reference or sent inline."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import torch
from google.protobuf.message import Message

from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.mesh import RankMesh
from rolemesh.engine.rewards.sources import RewardSource, checked, make_reward, reward_metrics
from rolemesh.engine.specs import RewardSpec
from rolemesh.rpc.errors import InvalidRequestError, PreconditionError
from rolemesh.services.runtime.device import rank_device
from rolemesh.services.runtime.role import InitializeResult, ProgressCallback, Role
from rolemesh.services.runtime.rows import row_tokens
from rolemesh.services.runtime.runtime import Call, Context, Runtime
from rolemesh.v1 import experience_pb2, reward_pb2, reward_pb2_grpc

REWARDS = "rewards"
"""The column that a reward produces."""


class RewardRole(Role):
    """Holds one reward source."""

    name = "reward"
    spec_class = RewardSpec

    def __init__(self) -> None:
        self._source: RewardSource | None = None

    @property
    def source(self) -> RewardSource:
        """The reward source; raises NOT_INITIALIZED before Initialize."""
        if self._source is None:
            raise PreconditionError(
                "the reward holds no run yet: call Initialize first", reason="NOT_INITIALIZED"
            )
        return self._source

    def initialize(
        self, spec: RewardSpec, run_seed: int, progress: ProgressCallback, mesh: RankMesh
    ) -> InitializeResult:
        """Builds the source, and loads its model when it has one."""
        progress("load reward", 0, 1)
        self._source = make_reward(spec.source, rank_device(), mesh)
        progress("load reward", 1, 1)
        return InitializeResult(facts={"reward.source": spec.source.type})

    def register(self, server: grpc.aio.Server, runtime: Runtime) -> list[str]:
        """Serves RewardService."""
        reward_pb2_grpc.add_RewardServiceServicer_to_server(RewardServicer(self, runtime), server)
        return [reward_pb2.DESCRIPTOR.services_by_name["RewardService"].full_name]

    def policy_version(self) -> int:
        """A reward is not trained."""
        return 0

    def sleep(self) -> int:
        """Rewards stay where they are; a classifier's weights are small."""
        return 0

    def wake(self) -> int:
        """Nothing was moved."""
        return 0

    def close(self) -> None:
        """Drops the source."""
        self._source = None


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
            share = self._runtime.share("3D_PROTO", row_tokens(request.experience))
            batch = await self._runtime.pull(
                request.experience, source.columns, call, rows=share.rows
            )
            scores = await call.compute(source.score, batch, call.progress)
            if share.counts:
                scores = checked(scores, len(batch))
            column = Experience({REWARDS: Column(ColumnKind.ROW, scores)})
            return experience_pb2.ExperienceResult(
                experience=self._runtime.publish(request.key, column, share=share),
                report=call.report({}, 0),
            )

        async def summarise(result: experience_pb2.ExperienceResult, call: Call) -> None:
            rewards = await self._runtime.pull(result.experience, [REWARDS], call)
            metrics = reward_metrics(rewards[REWARDS].values, self._role.source.full_score)
            result.report.metrics.update(metrics)

        async def inline(call: Call) -> Message:
            source = self._role.source
            batch = _experience_of(request.trajectories)
            scores = await call.compute(source.score, batch, call.progress)
            if not self._runtime.mesh.pp.is_last:
                return reward_pb2.Rewards()  # a classifier's scores come out of its last stage
            rewards = checked(scores, len(batch))
            return reward_pb2.Rewards(
                rewards=rewards.tolist(), metrics=reward_metrics(rewards, source.full_score)
            )

        kind = request.WhichOneof("input")
        if kind is None or (kind == "trajectories" and not request.trajectories.trajectories):
            raise InvalidRequestError(
                "the request holds no trajectories: set experience or trajectories",
                reason="INPUT_MISSING",
            )
        is_reference = kind == "experience"
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
