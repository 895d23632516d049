"""Calls with a key over connections that break: made once, answered in the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.service_calls import until
from support.services import ToyRole, operation_key, serving
from support.tcp_proxy import TcpProxy

from rolemesh.coordinator.dataflow.calls import connection as connection_module
from rolemesh.coordinator.dataflow.calls.connection import RoleConnection
from rolemesh.coordinator.dataflow.journal import Journal
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.rpc.calls.result_call import ProgressCallback, ResultCall
from rolemesh.rpc.channel import ChannelTraffic, open_channel
from rolemesh.rpc.errors import RolemeshError, UnavailableError
from rolemesh.v1 import value_pb2, value_pb2_grpc, worker_pb2, worker_pb2_grpc


class Caller:
    """A connection to the toy service through a proxy, and what its calls told."""

    def __init__(self, proxy: TcpProxy, store: MemoryStateStore, epoch: int) -> None:
        self.proxy = proxy
        self.store = store
        self.journal = Journal(store, "run", epoch)
        self.connection = RoleConnection("critic", proxy.address, ChannelTraffic())
        self.num_calls = 0
        self.phases: list[tuple[str, int]] = []

    async def initialize(self, **spec: Any) -> None:
        await self.connection.wait_healthy(30)
        await self.connection.client.initialize(operation_key("initialize"), spec, 1)

    async def is_heard(self) -> None:
        """Returns when a call tells how far it is."""
        told = len(self.phases)
        await until(lambda: any(done for _, done in self.phases[told:]))

    async def compute(self) -> Any:
        key = self.journal.next_key(1, "critic.compute_values")

        async def call(on_progress: ProgressCallback) -> Any:
            self.num_calls += 1
            stub = value_pb2_grpc.ValueServiceStub(self.connection._channel)
            request = value_pb2.ComputeValuesRequest(key=key)
            made: ResultCall[Any] = ResultCall(stub.ComputeValues(request), "toy")
            return await made.result(on_progress)

        return await self.connection.make(
            key,
            "compute",
            call,
            lambda result: {"rows": result.experience.num_rows},
            journal=self.journal,
            on_phase=lambda _, stage, done, __: self.phases.append((stage, done)),
        )


@pytest.fixture
async def role() -> ToyRole:
    return ToyRole()


@pytest.fixture
async def caller(role: ToyRole) -> AsyncIterator[Caller]:
    store = MemoryStateStore()
    async with serving(role) as server:
        proxy = TcpProxy(int(server.runtime.address.rpartition(":")[2]))
        await proxy.start()
        one = Caller(proxy, store, await store.next_epoch("run"))
        yield one
        await one.connection.close()
        await proxy.cut()


@pytest.mark.slow
async def test_a_long_call_over_connections_that_break_is_made_once_and_answered(
    caller: Caller, role: ToyRole
) -> None:
    await caller.initialize(behaviour="slow", seconds=7.0)
    computing = asyncio.create_task(caller.compute())
    for number in range(1, 4):
        # Each break comes when the call is heard again.
        await caller.is_heard()
        assert caller.num_calls >= number
        await caller.proxy.cut()
        await asyncio.sleep(0.1)
        await caller.proxy.start()
    result = await computing
    assert result.experience.num_rows == role.spec.num_rows
    assert caller.num_calls >= 4
    assert role.num_runs == 1
    (entry,) = await caller.store.read_journal("run")
    assert entry.result == {"rows": role.spec.num_rows}


async def test_an_answer_that_was_lost_is_given_again(caller: Caller, role: ToyRole) -> None:
    await caller.initialize(behaviour="deaf", seconds=0.5)
    computing = asyncio.create_task(caller.compute())
    await until(lambda: role.num_runs == 1)
    await caller.proxy.cut()
    # The call ends while its caller cannot hear it.
    await asyncio.sleep(1.0)
    await caller.proxy.start()
    assert (await computing).experience.num_rows == role.spec.num_rows
    assert role.num_runs == 1


async def test_a_connection_that_passes_nothing_is_made_anew(caller: Caller, role: ToyRole) -> None:
    await caller.initialize(behaviour="deaf", seconds=2.0)
    computing = asyncio.create_task(caller.compute())
    await until(lambda: role.num_runs == 1)
    caller.proxy.stall()
    await until(lambda: caller.num_calls == 2)
    caller.proxy.resume()
    assert (await computing).experience.num_rows == role.spec.num_rows
    assert role.num_runs == 1


async def test_a_connection_that_stays_broken_is_an_error_after_a_time(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "OUTAGE_S", 0.7)
    await caller.initialize(behaviour="deaf", seconds=0.1)
    await caller.proxy.cut()
    with pytest.raises(UnavailableError, match="does not answer") as failed:
        await caller.compute()
    assert failed.value.is_broken_connection
    assert failed.value.role == "critic"
    assert caller.num_calls >= 3


async def test_a_call_to_a_service_that_is_lost_can_be_cancelled(caller: Caller) -> None:
    await caller.initialize(behaviour="deaf", seconds=0.1)
    await caller.proxy.cut()
    computing = asyncio.create_task(caller.compute())
    await until(lambda: caller.num_calls >= 2)
    computing.cancel()
    await asyncio.wait({computing}, timeout=5)
    assert computing.cancelled()


async def test_what_a_service_says_itself_is_not_repeated(
    caller: Caller, role: ToyRole, monkeypatch: pytest.MonkeyPatch
) -> None:
    await caller.initialize()

    def work(*_: Any) -> Any:
        raise UnavailableError("the holder of the experience does not answer")

    monkeypatch.setattr(role, "work", work)
    with pytest.raises(RolemeshError, match="the holder of the experience") as failed:
        await caller.compute()
    assert failed.value.reason == "PEER_UNREACHABLE"
    assert not failed.value.is_broken_connection
    assert caller.num_calls == 1


async def test_a_peer_whose_first_handshake_is_late_is_waited_for(role: ToyRole) -> None:
    """As that of a new process on a busy host, or of one behind a long link."""
    async with serving(role) as server:
        proxy = TcpProxy(int(server.runtime.address.rpartition(":")[2]))
        await proxy.start()
        proxy.stall()
        try:
            async with open_channel(proxy.address, retries=False) as channel:
                stub = worker_pb2_grpc.WorkerServiceStub(channel)
                call = asyncio.ensure_future(stub.GetStatus(worker_pb2.GetStatusRequest()))
                await asyncio.sleep(0.8)
                proxy.resume()
                await call
        finally:
            await proxy.cut()
    assert proxy.num_connections == 1
