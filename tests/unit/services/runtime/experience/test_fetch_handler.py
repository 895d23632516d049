"""FetchWeights sends bytes as its servicer wrote them, without protobuf's copies."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from rolemesh.rpc.channel import open_channel
from rolemesh.services.runtime.servicers.weights.weights import WeightsServicer
from rolemesh.v1 import weights_pb2, weights_pb2_grpc


class Serialized(WeightsServicer):
    """Answers in bytes, which the generated handler cannot serialize."""

    async def FetchWeights(self, request: Any, context: Any) -> AsyncIterator[bytes]:
        header = weights_pb2.FetchWeightsHeader(total_bytes=7)
        yield weights_pb2.FetchWeightsResponse(header=header).SerializeToString()


async def test_the_handler_that_writes_bytes_answers_and_not_the_generated_one() -> None:
    none: Any = None
    server = grpc.aio.server()
    Serialized(none, none).add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            stub = weights_pb2_grpc.WeightsServiceStub(channel)
            answers = [one async for one in stub.FetchWeights(weights_pb2.FetchWeightsRequest())]
    finally:
        await server.stop(None)
    assert [one.header.total_bytes for one in answers] == [7]
