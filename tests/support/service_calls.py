"""Calls to the toy service, as tests of the runtime make them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from google.protobuf import json_format, struct_pb2
from support.services import operation_key

from rolemesh.engine.experience import Experience
from rolemesh.rpc.channel import MeshChannel
from rolemesh.rpc.experience.references import names_of
from rolemesh.services.runtime.calls.runtime import Runtime
from rolemesh.v1 import experience_pb2, value_pb2, value_pb2_grpc, worker_pb2, worker_pb2_grpc


async def initialize(channel: MeshChannel, epoch: int = 1, **spec: Any) -> Any:
    # A new process on a busy machine may drop the first handshake.
    await channel.channel_ready()
    request = worker_pb2.InitializeRequest(
        key=operation_key("initialize", epoch=epoch),
        spec=json_format.ParseDict(spec, struct_pb2.Struct()),
        run_seed=3,
    )
    return await last(worker_pb2_grpc.WorkerServiceStub(channel).Initialize(request))


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - the state of the server says no event
        await asyncio.sleep(0.02)


async def last(call: Any) -> Any:
    message = None
    async for message in call:  # noqa: B007
        pass
    assert message is not None
    return message.result


def values(channel: MeshChannel, **key: Any) -> Any:
    return value_pb2_grpc.ValueServiceStub(channel).ComputeValues(
        value_pb2.ComputeValuesRequest(key=operation_key(**key))
    )


class RecordingCall:
    """The part of Call that pull uses."""

    def __init__(self) -> None:
        self.fetched: dict[str, int] = {}

    def phase(self, name: str) -> Any:
        assert name == "fetch"
        return nullcontext()

    def add_fetched(self, transport: str, num_bytes: int) -> None:
        self.fetched[transport] = self.fetched.get(transport, 0) + num_bytes


async def pulled(runtime: Runtime, ref: experience_pb2.ExperienceRef) -> Experience:
    """All columns of a batch, as the service's own calls pull them."""
    return await runtime.pull(ref, names_of(ref), RecordingCall())  # type: ignore[arg-type]
