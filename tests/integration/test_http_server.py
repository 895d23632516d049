"""REST behind uvicorn on a real socket."""

import asyncio
import json
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from google.protobuf import timestamp_pb2
from support.fake_run import append_step, fill_store
from support.rest_servers import NO_PAGES, served, tokens_of

from rolemesh.coordinator.api.http.app import make_app
from rolemesh.coordinator.api.http.server import serve_http
from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.store import RunRecord, RunStream, StateStore
from rolemesh.v1 import coordinator_pb2

EVENTS = "/api/v1/runs/live-1/events"
SOON_S = 20.0


async def live_run(store: StateStore, folder: Path, num_steps: int = 3) -> RunRecord:
    return await fill_store(store, "live-1", folder, num_steps=num_steps, is_live=True)


async def read_events(response: httpx.Response) -> AsyncIterator[tuple[str, dict[str, object]]]:
    event_id = ""
    async for line in response.aiter_lines():
        name, _, value = line.partition(": ")
        if name == "id":
            event_id = value
        elif name == "data":
            yield event_id, json.loads(value)


async def test_a_reader_gets_every_event_once_through_cuts_and_restarts_of_the_coordinator(
    tmp_path: Path,
) -> None:
    store = MemoryStateStore()
    record = await live_run(store, tmp_path)
    seen: list[str] = []
    for step in range(4, 10):
        await append_step(store, record, step)
        headers = {"last-event-id": seen[-1]} if seen else {}
        async with (
            asyncio.timeout(SOON_S),
            # A coordinator that was started anew, on another port.
            served(StoreOperations(store)) as (client, _),
            client.stream("GET", EVENTS, headers=headers) as response,
        ):
            async for event_id, event in read_events(response):
                seen.append(event_id)
                if event["step"] == step and "step_made" in event:
                    # Cut in the middle of the stream.
                    break

    kept = [entry.entry_id for entry in await store.read_entries("live-1", RunStream.EVENTS)]
    assert seen == kept[: len(seen)]
    assert len(kept) - len(seen) <= 2


async def test_a_stopped_server_ends_its_streams_and_leaves_no_task(tmp_path: Path) -> None:
    store = MemoryStateStore()
    await live_run(store, tmp_path)
    before = asyncio.all_tasks()
    async with asyncio.timeout(SOON_S):
        app = make_app(StoreOperations(store), pages=NO_PAGES)
        server, port = await serve_http(app, "127.0.0.1", 0)
        async with (
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
            client.stream("GET", EVENTS) as response,
        ):
            events = read_events(response)
            await anext(events)
            await server.stop()
            async for _ in events:
                pass
        await server.stop()
    assert asyncio.all_tasks() == before
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_a_reader_that_takes_nothing_is_given_up(tmp_path: Path) -> None:
    store = MemoryStateStore()
    await live_run(store, tmp_path)
    # More bytes than all the buffers in between hold.
    line = coordinator_pb2.Note(text="x" * 2**20)
    event = coordinator_pb2.RunEvent(note=line, time=timestamp_pb2.Timestamp(seconds=1))
    for _ in range(32):
        await store.append_entry("live-1", RunStream.EVENTS, event.SerializeToString())
    async with (
        asyncio.timeout(SOON_S),
        served(StoreOperations(store), stuck_reader_s=0.5, heartbeat_s=0.1) as (client, _),
    ):
        stuck = socket.socket()
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.setblocking(False)
        address = (client.base_url.host, client.base_url.port)
        await asyncio.get_running_loop().sock_connect(stuck, address)
        request = f"GET {EVENTS} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()
        await asyncio.get_running_loop().sock_sendall(stuck, request)
        await streams_are(client, 1.0)
        await streams_are(client, 0.0)
        stuck.close()


async def streams_are(client: httpx.AsyncClient, num_open: float) -> None:
    """Waits until so many streams are open."""
    while True:
        text = (await client.get("/metrics")).text
        if f"\nrolemesh_http_event_streams {num_open}\n" in text:
            return
        await asyncio.sleep(0.05)


async def test_a_port_in_use_says_what_to_do() -> None:
    app = make_app(StoreOperations(MemoryStateStore()), pages=NO_PAGES)
    async with served(StoreOperations(MemoryStateStore())) as (client, _):
        port = client.base_url.port
        assert port is not None
        with pytest.raises(ValueError, match=f"port {port} on 127.0.0.1 cannot be bound.*or 0"):
            await serve_http(app, "127.0.0.1", port)
    with pytest.raises(ValueError, match=r"port 0 on no\.such\.host\.invalid cannot be bound"):
        await serve_http(app, "no.such.host.invalid", 0)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
async def test_without_a_token_it_is_served_on_loopback_alone(host: str) -> None:
    operations = StoreOperations(MemoryStateStore())
    with pytest.raises(ValueError, match=f"host {host} can be reached from elsewhere"):
        await serve_http(make_app(operations, pages=NO_PAGES), host, 0)
    app = make_app(operations, pages=NO_PAGES, tokens=tokens_of("t"))
    server, port = await serve_http(app, "0.0.0.0", 0)
    async with httpx.AsyncClient() as client:
        answer = await client.get(f"http://127.0.0.1:{port}/api/v1/runs")
    assert answer.status_code == 401
    await server.stop()


async def test_signals_stay_with_the_process_that_serves() -> None:
    handlers = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    async with served(StoreOperations(MemoryStateStore())) as (client, _):
        assert (await client.get("/healthz")).status_code == 200
        assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == handlers


async def test_ipv6_is_served_as_well() -> None:
    app = make_app(StoreOperations(MemoryStateStore()), pages=NO_PAGES)
    try:
        server, port = await serve_http(app, "::1", 0)
    except ValueError as error:
        pytest.skip(f"no IPv6 here: {error}")
    async with httpx.AsyncClient() as client:
        assert (await client.get(f"http://[::1]:{port}/healthz")).status_code == 200
    await server.stop()
