"""Calls to a reward service as tests of its training make them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from support.services import operation_key

from rolemesh.rpc.calls.service_client import ServiceClient
from rolemesh.rpc.channel import MeshChannel
from rolemesh.v1 import data_pb2, experience_pb2, rollout_pb2, trainer_pb2

NUM_PAIRS = 8
BRADLEY_TERRY = trainer_pb2.AlgorithmPart(type="bradley_terry")


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_pairs(path: Path) -> Path:
    """Longer is better."""
    return write_rows(
        path,
        [
            {"prompt": f"say {number}", "chosen": "yes " * (2 + number), "rejected": "no"}
            for number in range(NUM_PAIRS)
        ],
    )


def trained(llama: Path, data: Path, **model: Any) -> dict[str, Any]:
    """The spec of a reward that learns."""
    return {
        "source": {
            "type": "classifier",
            "new_head": True,
            "model": {"path": str(llama), "compute_dtype": "float32", **model},
        },
        "optimizer": {"learning_rate": 3e-3},
        "data": {"type": "jsonl", "path": str(data)},
    }


async def result_of(stream: AsyncIterator[Any]) -> Any:
    last = [message async for message in stream][-1]
    return getattr(last, last.WhichOneof("event"))


class RewardClient:
    """Calls one service under keys of their own."""

    def __init__(self, channel: MeshChannel) -> None:
        self._channel = channel
        self._client = ServiceClient(channel)
        self._number = 0

    def key(self) -> Any:
        self._number += 1
        return operation_key("call", sequence=self._number)

    async def initialize(self, spec: Mapping[str, Any]) -> Any:
        await self._channel.channel_ready()
        return await self._client.initialize(self.key(), spec, 3)

    async def read(
        self,
        *,
        count: int = NUM_PAIRS,
        split: rollout_pb2.Split.ValueType = rollout_pb2.SPLIT_TRAIN,
        kind: data_pb2.ReadKind.ValueType = data_pb2.READ_KIND_PREFERENCE,
    ) -> experience_pb2.ExperienceRef:
        rows = rollout_pb2.PromptSlice(split=split, start=0, count=count)
        return (await self._client.read_batch(self.key(), rows, kind)).experience

    async def update(
        self, batch: experience_pb2.ExperienceRef, *, version: int = 0, rows_per_unit: int = 2
    ) -> trainer_pb2.UpdateResult:
        return await self._client.update(
            self.key(),
            batch,
            BRADLEY_TERRY,
            epochs=1,
            mini_batch_rows=NUM_PAIRS,
            rows_per_unit=rows_per_unit,
            expected_policy_version=version,
        )

    async def judge(self, batch: experience_pb2.ExperienceRef, pass_at: Sequence[int] = ()) -> Any:
        return await self._client.compute_reward(self.key(), batch, pass_at=pass_at)

    async def export(self, directory: Path) -> Any:
        return await self._client.export(self.key(), str(directory))
