"""A real service that is stopped, cut off, or has no Python to answer with, under watch."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.service_calls import last, values
from support.services import ServiceProcess, operation_key, spawn_service
from support.tcp_proxy import TcpProxy

from rolemesh.coordinator.dataflow.calls.connection import RoleConnection
from rolemesh.coordinator.run.services.watcher import Watcher, WatchSettings
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.rpc.channel import ChannelTraffic
from rolemesh.rpc.errors import UnavailableError

NOTICED_S = 20.0
"""Bound on a busy machine; measured: 7 s. Without WATCHED_OPTIONS it is more than a minute."""

HOLD_S = 32.0
"""Longer than gRPC's server keeps a call that Python does not take, unless told otherwise."""


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    started = spawn_service(tmp_path)
    yield started
    started.end()


@asynccontextmanager
async def watched(
    address: str, losses: asyncio.Queue[str], **spec: object
) -> AsyncIterator[RoleConnection]:
    """A service that was initialised, under the watch of a run."""
    connection = RoleConnection("critic", address, ChannelTraffic())

    async def beat() -> None:
        pass

    watcher = Watcher(
        [connection],
        MemoryStateStore(),
        "run",
        WatchSettings(),
        on_lost=lambda _, reason: losses.put_nowait(reason),
        on_devices=lambda *_: None,
        beat=beat,
    )
    await connection.wait_healthy(30)
    await connection.client.initialize(operation_key("initialize"), spec, 1)
    watcher.ready.add("critic")
    task = asyncio.create_task(watcher.run())
    try:
        # A few looks, so that the connection is as it is in a run.
        await asyncio.sleep(2.5)
        yield connection
    finally:
        task.cancel()
        await asyncio.wait({task})
        await connection.close()


@pytest.mark.slow
async def test_a_stopped_process_is_noticed_within_seconds(service: ServiceProcess) -> None:
    losses: asyncio.Queue[str] = asyncio.Queue()
    async with watched(service.address, losses, behaviour="deaf", seconds=600) as connection:
        call = asyncio.ensure_future(last(values(connection._channel)))
        await asyncio.sleep(1.5)
        os.kill(service.pid, signal.SIGSTOP)
        began = time.monotonic()
        assert "is gone: " in await losses.get()
        seconds = time.monotonic() - began
        print(f"stopped: noticed after {seconds:.1f} s")
        assert seconds < NOTICED_S
        # The call in flight has ended by itself, too.
        with pytest.raises(UnavailableError):
            await call


@pytest.mark.slow
async def test_a_connection_that_passes_nothing_is_noticed_within_seconds(
    service: ServiceProcess,
) -> None:
    proxy = TcpProxy(int(service.address.rpartition(":")[2]))
    await proxy.start()
    losses: asyncio.Queue[str] = asyncio.Queue()
    async with watched(proxy.address, losses):
        proxy.stall()
        began = time.monotonic()
        assert "is gone: " in await losses.get()
        seconds = time.monotonic() - began
        print(f"cut off: noticed after {seconds:.1f} s")
        assert seconds < NOTICED_S
    proxy.resume()
    await proxy.cut()


@pytest.mark.slow
async def test_a_process_whose_python_is_held_for_long_is_no_loss(service: ServiceProcess) -> None:
    losses: asyncio.Queue[str] = asyncio.Queue()
    async with watched(service.address, losses, behaviour="hold", seconds=HOLD_S) as connection:
        asked = time.monotonic()
        holding = asyncio.ensure_future(last(values(connection._channel)))
        await asyncio.sleep(1.0)
        # Python takes this call only when it has been given back.
        status = await connection.client.within(120).get_status("run")
        assert time.monotonic() - asked > HOLD_S - 1
        assert status.run_id == "run"
        assert (await holding).experience.num_rows > 0
        await asyncio.sleep(2.5)
    assert losses.empty()
