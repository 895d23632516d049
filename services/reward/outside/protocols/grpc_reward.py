"""A reward service from outside that speaks rolemesh.v1.RewardService."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Sequence

from rolemesh.engine.specs import GrpcRewardSpec
from rolemesh.rpc.errors import RolemeshError
from rolemesh.services.reward.outside.base import (
    Judgement,
    RewardAnswerInvalidError,
    RewardClient,
    RewardRow,
    checked_metrics,
    checked_rewards,
    current_step,
)
from rolemesh.services.reward.outside.protocols.grpc_channel import GrpcEndpoint, reward_error
from rolemesh.v1 import operation_pb2, reward_pb2, reward_pb2_grpc


class GrpcRewardClient(RewardClient):
    """Calls ComputeReward with inline trajectories, as a service from outside takes them.

    The key of a request follows from its content and the step, under this client's own run. A try
    that is sent again has the same key, so a service that keeps keys judges it once.
    """

    def __init__(self, url: str, spec: GrpcRewardSpec) -> None:
        """Prepares; raises ValueError if the URL or the token's variable is wrong."""
        self.endpoint = url
        self._spec = spec
        self._run_id = f"reward-{uuid.uuid4().hex}"
        self._grpc = GrpcEndpoint(url, spec)

    async def ask(self, rows: Sequence[RewardRow]) -> Judgement:
        """See `RewardClient.ask`."""
        batch = reward_pb2.TrajectoryBatch(trajectories=[_trajectory(row) for row in rows])
        digest = hashlib.sha256(batch.SerializeToString(deterministic=True)).hexdigest()
        request = reward_pb2.ComputeRewardRequest(
            key=operation_pb2.OperationKey(
                run_id=self._run_id,
                fencing_epoch=1,
                step=current_step.get() or 0,
                operation=f"reward.{digest[:32]}",
            ),
            trajectories=batch,
        )
        stub = reward_pb2_grpc.RewardServiceStub(self._grpc.channel)
        found: reward_pb2.Rewards | None = None
        try:
            async for message in stub.ComputeReward(
                request, timeout=self._spec.timeout_s, metadata=self._grpc.metadata
            ):
                if message is None:  # gRPC gives None for bytes that it cannot read
                    raise self._invalid("bytes that are no ComputeRewardResponse")
                event = message.WhichOneof("event")
                if found is not None:
                    raise self._invalid(f"a further message, {event}, after the rewards")
                if event == "rewards":
                    found = message.rewards
                elif event != "progress":
                    raise self._invalid(f"a message with {event or 'nothing in it'}")
        except RolemeshError as error:
            raise reward_error(self.endpoint, error) from error
        if found is None:
            raise self._invalid("the end of the stream before the rewards")
        rewards = checked_rewards(
            list(found.rewards),
            len(rows),
            self.endpoint,
            minimum=self._spec.minimum,
            maximum=self._spec.maximum,
        )
        return Judgement(
            rewards=rewards, metrics=checked_metrics(dict(found.metrics), self.endpoint)
        )

    def sent(self, row: RewardRow) -> bytes:
        """See `RewardClient.sent`."""
        return _trajectory(row).SerializeToString(deterministic=True)

    async def close(self) -> None:
        """Closes the connection."""
        await self._grpc.close()

    def _invalid(self, found: str) -> RewardAnswerInvalidError:
        return RewardAnswerInvalidError(
            self.endpoint,
            expected="any number of progress messages, then one with rewards",
            found=found,
            remedy="answer trajectories as protos/rolemesh/v1/reward.proto says",
        )


def _trajectory(row: RewardRow) -> reward_pb2.Trajectory:
    return reward_pb2.Trajectory(
        prompt=_utf8(row.prompt),
        completion=_utf8(row.completion),
        prompt_tokens=row.prompt_tokens,
        completion_tokens=row.completion_tokens,
        answer=_utf8(row.answer),
        metadata_json=json.dumps(dict(row.metadata)) if row.metadata else "",
    )


def _utf8(text: str) -> str:
    """The text with lone surrogates replaced, which UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()
