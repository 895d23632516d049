"""Tests of which run holds a service: refusals, take-over from a dead coordinator, drains."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from google.protobuf import json_format, struct_pb2
from support.service_calls import initialize, last, until, values
from support.services import ToyRole, operation_key, serving

from rolemesh.coordinator.dataflow.calls.connection import RoleConnection
from rolemesh.coordinator.run.services.watcher import Watcher, WatchSettings
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.rpc.channel import ChannelTraffic, MeshChannel, open_channel
from rolemesh.rpc.errors import DeadlineError, PreconditionError, UnavailableError
from rolemesh.services.runtime.calls.hold import HOLDER_SILENCE_S
from rolemesh.services.runtime.service_server import ServiceServer
from rolemesh.v1 import worker_pb2, worker_pb2_grpc


async def test_another_run_is_refused_until_the_service_is_drained() -> None:
    role = ToyRole()
    async with serving(role) as server, open_channel(server.runtime.address) as channel:
        worker = worker_pb2_grpc.WorkerServiceStub(channel)
        await initialize(channel)
        await last(values(channel))
        other = worker_pb2.InitializeRequest(key=operation_key("initialize", run_id="other"))
        with pytest.raises(PreconditionError) as caught:
            await last(worker.Initialize(other))
        assert caught.value.reason == "ALREADY_INITIALIZED"
        with pytest.raises(PreconditionError) as caught:
            await last(values(channel, run_id="other"))
        assert caught.value.reason == "RUN_MISMATCH"
        await worker.Drain(worker_pb2.DrainRequest())
        assert role.is_closed
        assert server.runtime.store.held_bytes == 0
        await last(worker.Initialize(other))
        assert (await worker.GetStatus(worker_pb2.GetStatusRequest())).run_id == "other"


def make_silent(server: ServiceServer, seconds: float) -> None:
    """As if the coordinator that holds the service had last been heard that long ago."""
    server.runtime.hold._heard_at = time.monotonic() - seconds


async def of_run(channel: MeshChannel, run_id: str, **spec: Any) -> Any:
    request = worker_pb2.InitializeRequest(
        key=operation_key("initialize", run_id=run_id),
        spec=json_format.ParseDict(spec, struct_pb2.Struct()),
    )
    return await last(worker_pb2_grpc.WorkerServiceStub(channel).Initialize(request))


async def test_a_run_whose_coordinator_is_dead_loses_the_service_to_another_run() -> None:
    role = ToyRole()
    async with serving(role) as server, open_channel(server.runtime.address) as channel:
        await initialize(channel, behaviour="slow", seconds=60)
        working = asyncio.create_task(last(values(channel)))
        await asyncio.sleep(0.2)
        make_silent(server, 10 * HOLDER_SILENCE_S)
        # A coordinator that waits for an answer is alive, however little it says.
        with pytest.raises(PreconditionError, match="heard 0 s ago"):
            await of_run(channel, "other")
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working
        await until(lambda: server.runtime.hold.silence_s > HOLDER_SILENCE_S)
        await of_run(channel, "other", num_rows=9)
        assert role.is_closed
        assert server.runtime.hold.run_id == "other"
        assert server.runtime.ledger.running() == []
        assert (await last(values(channel, run_id="other"))).experience.num_rows == 9
        with pytest.raises(PreconditionError) as caught:
            await last(values(channel, sequence=1))
        assert caught.value.reason == "RUN_MISMATCH"


async def test_only_the_holder_s_own_status_calls_keep_its_hold() -> None:
    async with serving() as server, open_channel(server.runtime.address) as channel:
        worker = worker_pb2_grpc.WorkerServiceStub(channel)
        await initialize(channel)
        make_silent(server, HOLDER_SILENCE_S + 1)
        await worker.GetStatus(worker_pb2.GetStatusRequest(run_id="run"))
        with pytest.raises(PreconditionError, match=r"'run' holds the toy.* silent for 30 s"):
            await of_run(channel, "other")
        make_silent(server, HOLDER_SILENCE_S + 1)
        await worker.GetStatus(worker_pb2.GetStatusRequest())
        await worker.GetStatus(worker_pb2.GetStatusRequest(run_id="other"))
        await of_run(channel, "other")
        assert server.runtime.hold.run_id == "other"


async def test_a_coordinator_that_watches_keeps_its_hold() -> None:
    async with serving() as server, open_channel(server.runtime.address) as channel:
        await initialize(channel)
        make_silent(server, HOLDER_SILENCE_S + 1)
        connection = RoleConnection("toy", server.runtime.address, ChannelTraffic())

        async def beat() -> None:
            """Nobody asks anything of this run."""

        watcher = Watcher(
            [connection],
            MemoryStateStore(),
            "run",
            WatchSettings(interval_s=3600.0),
            on_lost=lambda role, cause: None,
            on_devices=lambda service, devices: None,
            beat=beat,
        )
        watching = asyncio.create_task(watcher.run())
        await until(lambda: server.runtime.hold.silence_s < HOLDER_SILENCE_S or watching.done())
        watching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watching
        await connection.close()
        with pytest.raises(PreconditionError) as caught:
            await of_run(channel, "other")
        assert caught.value.reason == "ALREADY_INITIALIZED"


async def test_of_two_runs_that_want_a_silent_run_s_service_one_gets_it() -> None:
    async with serving() as server, open_channel(server.runtime.address) as channel:
        await initialize(channel)
        make_silent(server, HOLDER_SILENCE_S + 1)
        results = await asyncio.gather(
            of_run(channel, "one"), of_run(channel, "two"), return_exceptions=True
        )
        refused = [result for result in results if isinstance(result, BaseException)]
        assert len(refused) == 1
        assert isinstance(refused[0], PreconditionError | UnavailableError), refused
        assert server.runtime.hold.run_id == ("two" if isinstance(results[0], Exception) else "one")
        assert server.runtime.hold.part is not None


async def test_a_drain_that_outlasts_its_call_still_frees_the_service() -> None:
    role = ToyRole()
    async with serving(role) as server, open_channel(server.runtime.address) as channel:
        worker = worker_pb2_grpc.WorkerServiceStub(channel)
        await initialize(channel, behaviour="deaf", seconds=2.5)
        working = asyncio.create_task(last(values(channel)))
        queued = asyncio.create_task(last(values(channel, sequence=1)))
        await until(lambda: role.num_runs == 1)
        with pytest.raises(DeadlineError):
            await worker.Drain(worker_pb2.DrainRequest(), timeout=1.2)
        # The client has left and the work goes on: nobody else may begin.
        assert server.runtime.hold.run_id == "run"
        with pytest.raises(UnavailableError) as caught:
            await of_run(channel, "other")
        assert caught.value.reason == "SERVICE_DRAINING"
        await asyncio.gather(working, queued, return_exceptions=True)
        await until(lambda: server.runtime.hold.run_id == "")
        assert role.is_closed
        # What waited for the compute thread was given up before it began.
        assert role.num_runs == 1
        assert isinstance(queued.exception(), UnavailableError)
        await of_run(channel, "other")


async def test_a_run_that_ends_while_it_waits_for_the_service_does_not_get_it() -> None:
    async with serving() as server, open_channel(server.runtime.address) as channel:
        worker = worker_pb2_grpc.WorkerServiceStub(channel)
        await initialize(channel, behaviour="deaf", seconds=2)
        working = asyncio.create_task(last(values(channel)))
        await asyncio.sleep(0.2)
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        make_silent(server, HOLDER_SILENCE_S + 1)
        await until(lambda: server.runtime.hold.silence_s > HOLDER_SILENCE_S)
        # Waits until the work of the silent run has ended.
        waiting = asyncio.create_task(of_run(channel, "ended"))
        await until(lambda: len(server.runtime.ledger.running()) == 2)
        await worker.Drain(worker_pb2.DrainRequest(run_id="ended", fencing_epoch=1))
        with pytest.raises(UnavailableError) as caught:
            await waiting
        assert caught.value.reason == "SERVICE_DRAINING"
        assert server.runtime.hold.run_id == ""
        await of_run(channel, "next")
        assert server.runtime.hold.run_id == "next"
