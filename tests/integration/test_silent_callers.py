"""Callers who say nothing, or half of it: the doors of coordinator and services stay open."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from support.fake_run import fill_store
from support.rest_servers import served, tokens_of
from support.services import serving

from rolemesh.coordinator.api.doors import coordinator_service
from rolemesh.coordinator.api.doors.coordinator_service import serve_coordinator
from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.rpc.errors import from_rpc_error
from rolemesh.rpc.http import server as http_server
from rolemesh.services.runtime import service_server
from rolemesh.services.runtime.server import metrics as metrics_module
from rolemesh.services.runtime.server.metrics import MetricsPage, ServiceMetrics
from rolemesh.v1 import coordinator_pb2

SOON_S = 30.0
"""Far beyond what a busy machine takes, and far below the bounds that were not shortened."""

BOUND_S = 1.0
FEW = 8
GET_RUN = "/rolemesh.v1.CoordinatorService/GetRun"
WATCH_RUN = "/rolemesh.v1.CoordinatorService/WatchRun"
RIGHT = (("authorization", "Bearer s3cret"),)


def operations() -> StoreOperations:
    return StoreOperations(MemoryStateStore())


# --- HTTP: REST, and the page of a service's metrics ------------------------------------------

HALF_SENT = {
    "nothing": b"",
    "half of a head": b"GET /healthz HTTP/1.1\r\nhost: local",
    "half of a second head": b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\nGET /heal",
    "half of a body": (
        b"POST /api/v1/runs HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{"
    ),
}


async def opened(client: httpx.AsyncClient) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(client.base_url.host, client.base_url.port)


async def closed(reader: asyncio.StreamReader) -> None:
    """Returns when the server has closed the connection."""
    with contextlib.suppress(ConnectionError):
        await reader.read()


@asynccontextmanager
async def pages_of(kind: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server that waits BOUND_S for a head, and serves FEW connections at a time."""
    module = http_server if kind == "coordinator" else metrics_module
    monkeypatch.setattr(module, "MAX_CONNECTIONS", FEW)
    if kind == "coordinator":
        async with served(operations(), head_s=BOUND_S, tokens=tokens_of("s3cret")) as (client, _):
            yield client
        return
    listener = socket.create_server(("127.0.0.1", 0))
    page = MetricsPage(ServiceMetrics("toy", 0), listener, head_s=BOUND_S)
    page.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{page.port}", timeout=30) as client:
        yield client
    await page.stop()


@pytest.mark.parametrize("sent", HALF_SENT.values(), ids=HALF_SENT)
@pytest.mark.parametrize("kind", ["coordinator", "metrics of a service"])
async def test_connections_that_send_no_whole_request_make_room_again(
    kind: str, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asyncio.timeout(SOON_S), pages_of(kind, monkeypatch) as client:
        silent = [await opened(client) for _ in range(FEW)]
        for _, writer in silent:
            writer.write(sent)
        # All are closed by the server, although their other ends stay.
        for reader, _ in silent:
            await closed(reader)
        assert (await client.get("/healthz")).status_code == 200
        for _, writer in silent:
            writer.close()


async def test_a_head_that_comes_byte_by_byte_is_not_waited_for_anew() -> None:
    async with (
        asyncio.timeout(SOON_S),
        served(operations(), head_s=BOUND_S) as (client, _),
    ):
        reader, writer = await opened(client)
        ended = asyncio.create_task(closed(reader))
        while not ended.done():
            writer.write(b"G")
            await asyncio.wait((ended,), timeout=BOUND_S / 5)
        writer.close()


async def test_requests_in_progress_and_kept_connections_outlive_the_bound(
    tmp_path: Path,
) -> None:
    store = MemoryStateStore()
    await fill_store(store, "live-1", tmp_path, num_steps=1, is_live=True)
    async with (
        asyncio.timeout(SOON_S),
        served(StoreOperations(store), head_s=2 * BOUND_S, heartbeat_s=0.05) as (client, _),
        client.stream("GET", "/api/v1/runs/live-1/events") as response,
    ):
        reader, writer = await opened(client)
        lines = response.aiter_lines()
        loop = asyncio.get_running_loop()
        began = loop.time()
        while loop.time() < began + 3 * BOUND_S:
            await anext(lines)
            writer.write(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert b" 200 " in await reader.readuntil(b"\r\n")
            await reader.readuntil(b"\r\n\r\n")
        # Where a head stays half sent after all of these, the connection ends as others do.
        writer.write(b"GET /heal")
        await closed(reader)
        writer.close()
        await anext(lines)


# --- gRPC -------------------------------------------------------------------------------------


@asynccontextmanager
async def service(request_s: float, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """A channel to a service without an identity."""
    monkeypatch.setattr(service_server, "REQUEST_S", request_s)
    async with (
        asyncio.timeout(SOON_S),
        serving() as server,
        grpc.aio.insecure_channel(server.runtime.address) as channel,
    ):
        yield channel


@asynccontextmanager
async def door(request_s: float) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a coordinator that asks for a token."""
    server, port = await serve_coordinator(
        operations(), tokens=tokens_of("s3cret"), request_s=request_s
    )
    try:
        async with (
            asyncio.timeout(SOON_S),
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        ):
            yield channel
    finally:
        await server.stop(None)


async def is_healthy(channel: grpc.aio.Channel) -> bool:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def silent_call(channel: grpc.aio.Channel, method: str, metadata: Any = None) -> Any:
    """A call that sends no message, and says of none that it is the last."""
    return channel.stream_stream(method)(metadata=metadata, timeout=10 * SOON_S)


async def reason_of(call: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await call.read()
    return from_rpc_error(ended.value).reason


@pytest.mark.parametrize("kind", ["coordinator", "service"])
async def test_health_cannot_be_watched(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = door(SOON_S) if kind == "coordinator" else service(SOON_S, monkeypatch)
    async with opened as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await watch.read()
        # What the protocol has for servers that have no Watch: clients do without it.
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert await is_healthy(channel)


@pytest.mark.parametrize("method", [GET_RUN, WATCH_RUN])
async def test_a_call_without_the_token_is_refused_before_its_request_comes(method: str) -> None:
    # A request is waited for longer than this test may take.
    async with door(10 * SOON_S) as channel:
        wrong = (("authorization", "Bearer of nothing"),)
        assert await reason_of(silent_call(channel, method)) == "TOKEN_MISSING"
        assert await reason_of(silent_call(channel, method, wrong)) == "TOKEN_INVALID"


CHECK = "/grpc.health.v1.Health/Check"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


@pytest.mark.parametrize(
    ("kind", "method", "metadata"),
    [
        ("coordinator", CHECK, None),
        ("coordinator", REFLECTION, None),
        ("coordinator", GET_RUN, RIGHT),
        ("service", CHECK, None),
        ("service", REFLECTION, None),
        ("service", "/rolemesh.v1.WorkerService/GetStatus", None),
        ("service", "/rolemesh.v1.ValueService/ComputeValues", None),
    ],
)
async def test_calls_that_send_no_request_make_room_again(
    kind: str, method: str, metadata: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (coordinator_service, service_server):
        monkeypatch.setattr(module, "MAX_CALLS", FEW)
    opened = door(BOUND_S) if kind == "coordinator" else service(BOUND_S, monkeypatch)
    async with opened as channel:
        silent = [silent_call(channel, method, metadata) for _ in range(FEW)]
        for call in silent:
            assert await reason_of(call) == "DEADLINE_EXCEEDED"
        assert await is_healthy(channel)


async def test_reflection_that_goes_on_asking_ends() -> None:
    async with door(BOUND_S) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()

        async def ask() -> reflection_pb2.ServerReflectionResponse:
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            return await call.read()

        assert len((await ask()).list_services_response.service) == 3
        # Without an end this goes on until the test's own. What grpc.aio raises, and whether it
        # tells the server's status, depends on whether the end meets a write.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await ask()
        assert await call.code() is not grpc.StatusCode.OK


async def test_a_call_without_a_message_is_told_so() -> None:
    async with door(SOON_S) as channel:
        for method, metadata in ((CHECK, None), (GET_RUN, RIGHT)):
            call = silent_call(channel, method, metadata)
            await call.done_writing()
            assert await reason_of(call) == "MESSAGE_MALFORMED"
        unread = channel.unary_unary(CHECK)(b"\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await unread
        assert from_rpc_error(refused.value).reason == "MESSAGE_MALFORMED"
        # The token alone decides; nothing of the run is there.
        get = channel.unary_unary(
            GET_RUN, request_serializer=coordinator_pb2.GetRunRequest.SerializeToString
        )
        with pytest.raises(grpc.aio.AioRpcError) as missing:
            await get(coordinator_pb2.GetRunRequest(run_id="none"), metadata=RIGHT, timeout=SOON_S)
        assert missing.value.code() is grpc.StatusCode.NOT_FOUND
