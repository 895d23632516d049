"""DataService over any role that holds data of its own: the actor, or a reward that is trained."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from google.protobuf.message import Message

from rolemesh.engine.data.prompts import Split
from rolemesh.engine.data.trajectories import Kind
from rolemesh.engine.experience import Experience
from rolemesh.rpc.errors import InvalidRequestError
from rolemesh.services.runtime.calls.runtime import Call, Context, RoleServicer
from rolemesh.services.runtime.servicers.prompt_slices import check_slice
from rolemesh.v1 import data_pb2, data_pb2_grpc, experience_pb2, rollout_pb2

_SPLITS: dict[int, Split] = {
    rollout_pb2.SPLIT_TRAIN: "train",
    rollout_pb2.SPLIT_HELD_OUT: "held_out",
    rollout_pb2.SPLIT_PRETRAINING: "pretraining",
}

_KINDS: dict[int, Kind] = {
    data_pb2.READ_KIND_DEMONSTRATION: "demonstration",
    data_pb2.READ_KIND_PREFERENCE: "preference",
    data_pb2.READ_KIND_JUDGEMENT: "judgement",
}


class ReadingRole(Protocol):
    """What DataService needs of a role."""

    def read(self, split: Split, start: int, count: int, kind: Kind) -> Experience:
        """Trajectories of the data rows at start..start+count-1; see `read_trajectories`.

        Called on the compute thread. Raises NOT_INITIALIZED before Initialize.
        """


class DataServicer(RoleServicer[ReadingRole], data_pb2_grpc.DataServiceServicer):
    """DataService over a role's data."""

    def ReadBatch(
        self, request: data_pb2.ReadBatchRequest, context: Context
    ) -> AsyncIterator[data_pb2.ReadBatchResponse]:
        """See data.proto."""

        async def work(call: Call) -> Message:
            asked = request.rows
            if asked.split not in _SPLITS:
                raise InvalidRequestError(
                    "rows.split is not set: give SPLIT_TRAIN, SPLIT_HELD_OUT or SPLIT_PRETRAINING",
                    reason="SPLIT_INVALID",
                )
            if request.kind not in _KINDS:
                raise InvalidRequestError(
                    "kind is not set: give READ_KIND_DEMONSTRATION, READ_KIND_PREFERENCE or "
                    "READ_KIND_JUDGEMENT",
                    reason="KIND_INVALID",
                )
            kind = _KINDS[request.kind]
            check_slice(asked, "rows", 1 if kind == "demonstration" else 2)
            batch = await call.compute(
                self._role.read,
                _SPLITS[asked.split],
                asked.start,
                asked.count,
                kind,
            )
            return experience_pb2.ExperienceResult(
                experience=self._runtime.publish(request.key, batch),
                report=call.report({}, batch.num_tokens),
            )

        # Texts become tokens in no time: one rank reads, and all ranks pull their rows of it.
        return self._runtime.keyed(request, data_pb2.ReadBatchResponse, work, on_all_ranks=False)
