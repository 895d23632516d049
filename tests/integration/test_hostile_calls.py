"""What a stranger tries on a service: each call is refused with its reason, and the run goes on."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import torch
from support.service_calls import initialize, last, until, values
from support.services import ToyRole, operation_key, serving

from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.rpc import limits
from rolemesh.rpc.channel import MeshChannel, open_channel
from rolemesh.rpc.errors import (
    CapacityError,
    DeadlineError,
    InvalidRequestError,
    PreconditionError,
    RolemeshError,
)
from rolemesh.rpc.experience.column_fetch import fetch_columns
from rolemesh.rpc.experience.columns import ColumnData, Columns, encode
from rolemesh.services.runtime.calls import service_process
from rolemesh.services.runtime.server import operations
from rolemesh.services.runtime.service_server import ServiceServer
from rolemesh.services.runtime.servicers import put as put_module
from rolemesh.v1 import (
    experience_pb2,
    experience_pb2_grpc,
    value_pb2,
    value_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

CAPACITY_BYTES = 1 << 20
SMALL = Columns({"numbers": ColumnData.row([1.0] * 10_000)})
"""80,000 bytes."""


@pytest.fixture
async def server() -> AsyncIterator[ServiceServer]:
    async with serving(ToyRole(), experience_capacity_bytes=CAPACITY_BYTES) as server:
        yield server


@pytest.fixture
async def channel(server: ServiceServer) -> AsyncIterator[MeshChannel]:
    async with open_channel(server.runtime.address) as channel:
        await initialize(channel)
        yield channel


def experience(channel: MeshChannel) -> Any:
    return experience_pb2_grpc.ExperienceServiceStub(channel)


async def refused(answer: Any) -> RolemeshError:
    with pytest.raises(RolemeshError) as caught:
        await answer
    return caught.value


async def work_goes_on(channel: MeshChannel, step: int, epoch: int = 1) -> None:
    assert (await last(values(channel, step=step, epoch=epoch))).experience.num_rows == 4
    status = await worker_pb2_grpc.WorkerServiceStub(channel).GetStatus(
        worker_pb2.GetStatusRequest(run_id="run")
    )
    assert (status.state, status.failure) == (worker_pb2.WORKER_STATE_READY, "")


# --- bytes and numbers ------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["WorkerService/GetStatus", "ValueService/ComputeValues"])
async def test_bytes_that_are_no_message_are_an_invalid_argument(
    server: ServiceServer, method: str
) -> None:
    async with grpc.aio.insecure_channel(server.runtime.address) as bare:
        call = bare.unary_unary if method.startswith("Worker") else bare.unary_stream
        answer: Any = call(f"/rolemesh.v1.{method}")(b"\xff\xff\xff", timeout=10)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await (answer if method.startswith("Worker") else answer.read())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "cannot be read" in str(caught.value.details())


async def test_a_reference_of_ten_bytes_takes_no_memory(channel: MeshChannel) -> None:
    request = value_pb2.ComputeValuesRequest(
        key=operation_key(), experience=experience_pb2.ExperienceRef(num_rows=2**62)
    )
    error = await refused(last(value_pb2_grpc.ValueServiceStub(channel).ComputeValues(request)))
    assert isinstance(error, InvalidRequestError)
    assert error.reason == "LIMIT_EXCEEDED"
    assert error.metadata["field"] == "experience.num_rows"
    assert error.metadata["value"] == str(2**62)
    await work_goes_on(channel, 1)


async def test_a_shard_without_rows_is_a_wrong_request_and_no_fault_of_the_service(
    channel: MeshChannel,
) -> None:
    made = (await last(values(channel))).experience
    del made.groups[0].shards[0].row_tokens[:]
    made.groups[0].shards[0].num_rows = 0
    request = value_pb2.ComputeValuesRequest(key=operation_key(step=1), experience=made)
    error = await refused(last(value_pb2_grpc.ValueServiceStub(channel).ComputeValues(request)))
    assert isinstance(error, InvalidRequestError)
    await work_goes_on(channel, 2)


async def test_one_row_is_not_fetched_many_times(
    server: ServiceServer, channel: MeshChannel
) -> None:
    row = Column.ragged(ColumnKind.SEQUENCE, [range(4096)], torch.int64)
    held = server.runtime.store.put("run", 0, Experience({"tokens": row}))
    gc.collect()
    tracemalloc.start()
    try:
        request = experience_pb2.FetchRequest(experience_id=held.experience_id, rows=[0] * 8_000)
        error = await refused(anext(aiter(experience(channel).Fetch(request))))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (error.reason, "8000 single rows" in error.message) == ("ROWS_AMBIGUOUS", True)
    assert peak < 8 << 20
    # A column that is named twice is sent once.
    request = experience_pb2.FetchRequest(
        experience_id=held.experience_id, columns=["tokens"] * 200, row_stop=1
    )
    header = (await anext(aiter(experience(channel).Fetch(request)))).header
    assert [one.schema.name for one in header.columns] == ["tokens"]


# --- puts -------------------------------------------------------------------------------------


async def put(
    channel: MeshChannel, columns: Columns, step: int = 0, damage: Any = lambda _: None
) -> experience_pb2.ExperienceRef:
    header, chunks = encode(columns)
    damage(header)
    key = operation_key("client.put", step=step)

    async def requests() -> AsyncIterator[experience_pb2.PutRequest]:
        yield experience_pb2.PutRequest(opening=experience_pb2.PutOpening(key=key, header=header))
        for chunk in chunks:
            yield experience_pb2.PutRequest(chunk=chunk)

    answer: experience_pb2.PutResponse = await experience(channel).Put(requests())
    return answer.experience


async def test_columns_of_a_put_share_no_bytes(server: ServiceServer, channel: MeshChannel) -> None:
    def overlap(header: experience_pb2.PayloadHeader) -> None:
        for number in range(8):
            header.columns.add().CopyFrom(header.columns[0])
            header.columns[-1].schema.name = f"copy_{number}"

    error = await refused(put(channel, SMALL, damage=overlap))
    assert (error.reason, "overlap at byte 0" in error.message) == ("PAYLOAD_MALFORMED", True)
    assert server.runtime.store.held_bytes == 0


async def test_metadata_of_a_put_nests_no_deeper_than_it_may(channel: MeshChannel) -> None:
    error = await refused(put(channel, Columns({"metadata": ColumnData.text(["[" * 5000])})))
    assert (error.reason, error.metadata["field"]) == ("LIMIT_EXCEEDED", "metadata[0]")


async def test_clients_that_put_and_never_release_leave_room_for_the_role(
    server: ServiceServer, channel: MeshChannel
) -> None:
    share_bytes = 3 * CAPACITY_BYTES // 4
    for step in range(share_bytes // 80_000):
        await put(channel, SMALL, step)
    held_bytes = server.runtime.store.held_bytes
    full = await refused(put(channel, SMALL, 20))
    assert isinstance(full, CapacityError)
    assert (full.reason, "raise put_share" in full.message) == ("EXPERIENCE_CAPACITY", True)
    assert full.metadata["held_bytes"] == str(held_bytes)
    await work_goes_on(channel, 30)
    await experience(channel).Release(
        experience_pb2.ReleaseRequest(run_id="run", through_step=30, fencing_epoch=1)
    )
    reference = await put(channel, SMALL, 31)
    fetched = await fetch_columns(lambda _: channel, reference)
    assert len(fetched["numbers"].values) == 10_000


async def test_a_put_that_pauses_gives_its_room_back(
    server: ServiceServer, channel: MeshChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(put_module, "PUT_IDLE_S", 0.3)
    header, _ = encode(SMALL)
    opening = experience_pb2.PutOpening(key=operation_key("client.put"), header=header)

    async def requests() -> AsyncIterator[experience_pb2.PutRequest]:
        yield experience_pb2.PutRequest(opening=opening)
        await asyncio.sleep(60)

    error = await refused(experience(channel).Put(requests()))
    assert isinstance(error, DeadlineError)
    assert "no message of the put came for 0.3 s" in error.message
    assert server.runtime.store.held_bytes == 0


# --- epochs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("epoch", [2**62, 2**53 - 1, limits.MAX_EPOCH_JUMP + 2])
async def test_an_epoch_that_no_store_gave_fences_nobody_off(
    channel: MeshChannel, epoch: int
) -> None:
    error = await refused(last(values(channel, epoch=epoch)))
    assert isinstance(error, InvalidRequestError)
    assert "fencing_epoch" in error.message
    release = experience_pb2.ReleaseRequest(run_id="run", fencing_epoch=epoch)
    assert isinstance(await refused(experience(channel).Release(release)), InvalidRequestError)
    await work_goes_on(channel, 1)


async def test_a_call_that_is_refused_raises_no_epoch(channel: MeshChannel) -> None:
    worker = worker_pb2_grpc.WorkerServiceStub(channel)
    # Another run's call says nothing of the run that it names.
    error = await refused(last(values(channel, run_id="next", epoch=2**52)))
    assert error.reason == "RUN_MISMATCH"
    drain = worker_pb2.DrainRequest(run_id="next", fencing_epoch=2**52)
    assert (await refused(worker.Drain(drain))).reason == "RUN_MISMATCH"
    # Who knows the run's id alone cannot take it over.
    attach = worker_pb2.AttachRequest(key=operation_key("attach", epoch=2**52), run_seed=4)
    assert (await refused(last(worker.Attach(attach)))).reason == "SPEC_CHANGED"
    await work_goes_on(channel, 1)
    initialize_next = worker_pb2.InitializeRequest(
        key=operation_key("initialize", run_id="next", epoch=2**52)
    )
    error = await refused(last(worker.Initialize(initialize_next)))
    assert error.reason == "ALREADY_INITIALIZED"
    await worker.Drain(worker_pb2.DrainRequest(run_id="run", fencing_epoch=1))
    initialize_next.key.fencing_epoch = 1
    await last(worker.Initialize(initialize_next))


async def test_an_initialize_that_fails_raises_no_epoch(server: ServiceServer) -> None:
    async with open_channel(server.runtime.address) as channel:
        assert (await refused(initialize(channel, epoch=2**52, wrong=1))).reason == "SPEC_INVALID"
        await initialize(channel, epoch=1)
        await work_goes_on(channel, 1)


async def test_a_newer_coordinator_still_fences_an_older_one_off(channel: MeshChannel) -> None:
    await work_goes_on(channel, 1, epoch=3)
    error = await refused(last(values(channel, step=2, epoch=2)))
    assert isinstance(error, PreconditionError)
    assert (error.reason, error.metadata["highest_epoch"]) == ("STALE_EPOCH", "3")
    stale = experience_pb2.ReleaseRequest(run_id="run", fencing_epoch=2)
    assert (await refused(experience(channel).Release(stale))).reason == "STALE_EPOCH"


async def test_a_release_without_an_epoch_drops_nothing(
    server: ServiceServer, channel: MeshChannel
) -> None:
    await work_goes_on(channel, 1)
    held_bytes = server.runtime.store.held_bytes
    error = await refused(
        experience(channel).Release(experience_pb2.ReleaseRequest(run_id="run", through_step=9))
    )
    assert (error.reason, server.runtime.store.held_bytes) == ("KEY_INVALID", held_bytes)


# --- load -------------------------------------------------------------------------------------


async def test_more_operations_than_a_service_works_on_are_refused_as_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(operations, "MAX_OPERATIONS", 1)
    async with serving() as server, open_channel(server.runtime.address) as channel:
        await initialize(channel, behaviour="slow", seconds=2.0)
        first = asyncio.create_task(last(values(channel)))
        await until(lambda: bool(server.runtime.ledger.running()))
        error = await refused(last(values(channel, step=1)))
        assert isinstance(error, CapacityError)
        assert (error.reason, error.retryable) == ("TOO_MANY_CALLS", True)
        # A repeat is no further operation.
        assert await last(values(channel)) == await first
        await last(values(channel, step=1))


async def test_channels_to_peers_do_not_pile_up(
    server: ServiceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_process, "MAX_PEERS", 2)
    process = server.process
    first, second = process.peer("127.0.0.1:1"), process.peer("127.0.0.1:2")
    assert process.peer("127.0.0.1:1") is first
    process.peer("127.0.0.1:3")
    assert process.peer("127.0.0.1:1") is first
    assert process.peer("127.0.0.1:2") is not second
