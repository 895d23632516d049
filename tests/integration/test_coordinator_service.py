"""CoordinatorService over real gRPC, from a store."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest

from rolemesh.coordinator.api.doors.coordinator_service import serve_coordinator
from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.redis import RedisStateStore
from rolemesh.coordinator.state.store import RunRecord, RunState, ServiceLease
from rolemesh.rpc.channel import open_channel
from rolemesh.rpc.errors import (
    InternalError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from rolemesh.v1 import coordinator_pb2, coordinator_pb2_grpc


@pytest.fixture
async def store() -> MemoryStateStore:
    store = MemoryStateStore()
    for run_id, created_at in (("old", 1.5), ("new", 2.5)):
        await store.create_run(
            RunRecord(
                run_id=run_id,
                name="quick",
                num_steps=3,
                directory="/runs/quick",
                created_at=created_at,
                updated_at=created_at,
            )
        )
    return store


@pytest.fixture
async def stub(
    store: MemoryStateStore,
) -> AsyncIterator[coordinator_pb2_grpc.CoordinatorServiceStub]:
    server, port = await serve_coordinator(StoreOperations(store))
    async with open_channel(f"127.0.0.1:{port}") as channel:
        yield coordinator_pb2_grpc.CoordinatorServiceStub(channel)
    await server.stop(None)


async def test_a_run_is_described(
    store: MemoryStateStore, stub: coordinator_pb2_grpc.CoordinatorServiceStub
) -> None:
    await store.update_run("new", state=RunState.RUNNING, step=2, metrics={"reward/mean": 0.5})
    run = (await stub.GetRun(coordinator_pb2.GetRunRequest(run_id="new"))).run
    assert (run.run_id, run.name, run.step, run.num_steps) == ("new", "quick", 2, 3)
    assert run.state == coordinator_pb2.RUN_STATE_RUNNING
    assert (run.created_at.seconds, run.created_at.nanos) == (2, 500_000_000)
    assert dict(run.metrics) == {"reward/mean": 0.5}


async def test_what_nobody_foresaw_is_for_the_log_alone(
    store: MemoryStateStore,
    stub: coordinator_pb2_grpc.CoordinatorServiceStub,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail(run_id: str) -> RunRecord:
        raise OSError("no space left in /private/place")

    monkeypatch.setattr(store, "get_run", fail)
    with pytest.raises(InternalError) as told:
        await stub.GetRun(coordinator_pb2.GetRunRequest(run_id="new"))
    with pytest.raises(InternalError) as watched:
        async for _ in stub.WatchRun(coordinator_pb2.WatchRunRequest(run_id="new")):
            pass
    for error in (told.value, watched.value):
        assert (error.reason, "private" in str(error)) == ("INTERNAL", False)
    assert caplog.text.count("OSError: no space left in /private/place") == 2


async def test_runs_are_listed_newest_first(
    stub: coordinator_pb2_grpc.CoordinatorServiceStub,
) -> None:
    found = await stub.ListRuns(coordinator_pb2.ListRunsRequest())
    assert [run.run_id for run in found.runs] == ["new", "old"]
    one = await stub.ListRuns(coordinator_pb2.ListRunsRequest(page_size=1))
    assert [run.run_id for run in one.runs] == ["new"]


async def test_a_page_size_out_of_range_is_refused(
    stub: coordinator_pb2_grpc.CoordinatorServiceStub,
) -> None:
    with pytest.raises(InvalidRequestError, match="page_size is 1001"):
        await stub.ListRuns(coordinator_pb2.ListRunsRequest(page_size=1001))


async def test_stop_is_a_wish_that_an_ended_run_ignores(
    store: MemoryStateStore, stub: coordinator_pb2_grpc.CoordinatorServiceStub
) -> None:
    await store.update_run("old", state=RunState.SUCCEEDED)
    for run_id, state in (
        ("new", coordinator_pb2.RUN_STATE_STOPPING),
        ("old", coordinator_pb2.RUN_STATE_SUCCEEDED),
    ):
        run = (await stub.StopRun(coordinator_pb2.StopRunRequest(run_id=run_id))).run
        assert run.state == state
    assert (await store.get_run("new")).stop_requested is True
    assert (await store.get_run("old")).stop_requested is False


async def test_an_unknown_run_is_not_found(
    stub: coordinator_pb2_grpc.CoordinatorServiceStub,
) -> None:
    for call in (
        stub.GetRun(coordinator_pb2.GetRunRequest(run_id="ghost")),
        stub.StopRun(coordinator_pb2.StopRunRequest(run_id="ghost")),
    ):
        with pytest.raises(NotFoundError, match="'ghost'") as missing:
            await call
        assert missing.value.reason == "RUN_NOT_FOUND"


async def test_services_are_listed_with_their_leases(
    store: MemoryStateStore, stub: coordinator_pb2_grpc.CoordinatorServiceStub
) -> None:
    lease = ServiceLease(role="actor", address="127.0.0.1:5", pid=7, status="busy")
    entered = await store.register_service(lease, 60)
    (found,) = (await stub.ListServices(coordinator_pb2.ListServicesRequest())).services
    assert (found.role, found.address, found.pid, found.status) == (
        "actor",
        "127.0.0.1:5",
        7,
        "busy",
    )
    assert found.lease_until.seconds == int(entered.lease_until)


async def test_a_call_without_a_deadline_is_refused(store: MemoryStateStore) -> None:
    server, port = await serve_coordinator(StoreOperations(store))
    # A bare channel: ours would add the deadline.
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="no deadline") as refused:
            await stub.ListRuns(coordinator_pb2.ListRunsRequest())
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await server.stop(None)


async def test_an_unreachable_store_reaches_the_client_with_its_url() -> None:
    store = RedisStateStore("redis://127.0.0.1:1/0")
    server, port = await serve_coordinator(StoreOperations(store))
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        with pytest.raises(UnavailableError, match=r"redis://127\.0\.0\.1:1/0") as unavailable:
            await stub.ListRuns(coordinator_pb2.ListRunsRequest())
    assert unavailable.value.reason == "STORE_UNAVAILABLE"
    await server.stop(None)
    await store.close()


async def test_a_port_in_use_is_named(
    store: MemoryStateStore, capfd: pytest.CaptureFixture[str]
) -> None:
    server, port = await serve_coordinator(StoreOperations(store))
    with pytest.raises(ValueError, match=f"port {port} .* cannot be bound"):
        await serve_coordinator(StoreOperations(store), port=port)
    await server.stop(None)
    # A line of gRPC's own would stand above ours.
    assert capfd.readouterr().err == ""
