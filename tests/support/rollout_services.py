"""Calls to an actor and to a rollout service beside it, as a coordinator makes them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support import warm_processes
from support.services import operation_key, wait_for_announcement

from rolemesh.engine.experience import Experience
from rolemesh.rpc.calls.service_client import ServiceClient
from rolemesh.rpc.channel import MeshChannel, open_channel
from rolemesh.rpc.experience.tensors import data_type_of
from rolemesh.services.runtime.experience.fetch import fetch_rows
from rolemesh.v1 import (
    exchange_pb2,
    experience_pb2,
    rollout_pb2,
    trainer_pb2,
    weights_pb2,
    worker_pb2,
)

DATA = {"type": "reasoning_gym", "task": "chain_sum", "train_size": 16, "held_out_size": 4}
SEED = 5


class Caller:
    """One service, called with keys of its own."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.channel: MeshChannel = open_channel(address)
        self._client = ServiceClient(self.channel)
        self._sequence = 0

    async def initialize(self, **spec: Any) -> worker_pb2.InitializeResult:
        # A new process on a busy machine may drop the first handshake.
        await self.channel.channel_ready()
        given = {key: value for key, value in {"data": DATA, **spec}.items() if value is not None}
        return await self._client.initialize(self._key("initialize", 0), given, SEED)

    async def generate(
        self,
        step: int,
        *,
        start: int = 0,
        count: int = 4,
        block_rows: int = 0,
        on_block: Callable[[Any], None] | None = None,
        **sampling: Any,
    ) -> experience_pb2.ExperienceResult:
        """Completions of training prompts; tokens follow from weights, step and prompts."""
        usual = {
            "samples_per_prompt": 2,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "max_new_tokens": 12,
        }
        return await self._client.generate(
            self._key("generate", step),
            rollout_pb2.PromptSlice(split=rollout_pb2.SPLIT_TRAIN, start=start, count=count),
            rollout_pb2.Sampling(**{**usual, **sampling}),
            block_rows=block_rows,
        ).result(on_block=on_block)

    async def train(self, batch: experience_pb2.ExperienceRef, *, version: int) -> int:
        """Optimizer steps of two rows each towards what was sampled; returns the new version."""
        result = await self._client.update(
            self._key("update", 0),
            batch,
            trainer_pb2.AlgorithmPart(type="sft"),
            epochs=1,
            mini_batch_rows=-(-batch.num_rows // 3),
            rows_per_unit=0,
            expected_policy_version=version,
        )
        return result.policy_version

    async def publish(self, dtype: str = "float32") -> weights_pb2.PublishWeightsResult:
        return await self._client.publish_weights(self._key("publish", 0), data_type_of(dtype))

    async def take(
        self, weights: weights_pb2.WeightsRef, exchange: str = ""
    ) -> rollout_pb2.UpdateWeightsResult:
        key = self._key("update_weights", 0)
        return await self._client.update_weights(key, weights, exchange=exchange)

    async def offer(
        self, exchange: str, peer: Mapping[str, int], dtype: str = "float32", plan: bytes = b""
    ) -> exchange_pb2.OfferExchangeResponse:
        layout = {name: str(size) for name, size in peer.items()}
        return await self._client.offer_exchange(
            self._key("offer", 0), exchange, layout, data_type_of(dtype), plan
        )

    async def join(
        self, exchange: str, offers: Sequence[bytes]
    ) -> exchange_pb2.JoinExchangeResponse:
        return await self._client.join_exchange(self._key("join", 0), exchange, offers)

    async def send(self, *exchanges: str) -> exchange_pb2.SendWeightsResult:
        return await self._client.send_weights(self._key("send", 0), exchanges)

    async def checksums(self, holder: str = "SAMPLER") -> weights_pb2.GetChecksumsResponse:
        return await self._client.get_checksums(
            weights_pb2.WeightsHolder.Value(f"WEIGHTS_HOLDER_{holder}")
        )

    def _key(self, operation: str, step: int) -> Any:
        self._sequence += 1
        return operation_key(operation, step=step, sequence=self._sequence)


async def rows_of(ref: experience_pb2.ExperienceRef) -> Experience:
    """All columns of a batch that lies in one shard."""
    ((shard,),) = ([*group.shards] for group in ref.groups)
    return await _rows_of_shard(ref, shard)


async def shards_of(ref: experience_pb2.ExperienceRef) -> Experience:
    """All columns of a batch of neighbouring rows in several shards."""
    ((*shards,),) = ([*group.shards] for group in ref.groups)
    shards.sort(key=lambda shard: shard.row_start)
    return Experience.concat([await _rows_of_shard(ref, shard) for shard in shards])


async def _rows_of_shard(
    ref: experience_pb2.ExperienceRef, shard: experience_pb2.Shard
) -> Experience:
    names = [column.name for group in ref.groups for column in group.columns]
    async with open_channel(shard.address) as channel:
        return (await fetch_rows(channel, shard, names, range(shard.num_rows), "")).experience


@contextmanager
def process_of(
    role: str, folder: Path, *flags: str
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A service in processes of its own: its address, and the process to end or kill."""
    announce = folder / f"{role}.json"
    log = (folder / f"{role}.log").open("wb")
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", f"rolemesh.services.{role}"),
            *("--announce", str(announce), "--threads", "1", *flags),
        ],
        env={**os.environ, **warm_processes.services(), "PYTHONSAFEPATH": "1"},
        stderr=log,
    )
    try:
        yield wait_for_announcement(process, announce)["address"], process
    finally:
        process.terminate()
        try:
            process.wait(30)
        finally:
            process.kill()
            log.close()
