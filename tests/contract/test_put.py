"""ExperienceService.Put against a real service: what is put is held as what ranks make."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from support.services import ToyRole, operation_key, serving

from rolemesh.rpc.channel import MeshChannel, open_channel
from rolemesh.rpc.errors import (
    CapacityError,
    InvalidRequestError,
    PreconditionError,
    RolemeshError,
)
from rolemesh.rpc.experience.column_fetch import fetch_columns
from rolemesh.rpc.experience.columns import ColumnData, Columns, encode
from rolemesh.rpc.experience.references import row_tokens
from rolemesh.services.runtime.service_server import ServiceServer
from rolemesh.v1 import (
    experience_pb2,
    experience_pb2_grpc,
    operation_pb2,
    value_pb2,
    value_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

CAPACITY_BYTES = 4 << 20
"""Room for two payloads of more than one chunk, not for three."""

BATCH = Columns(
    {
        "tokens": ColumnData.sequence([[1, 2, 3], [4, 5], [6, 7, 8, 9]]),
        "prompt_lengths": ColumnData.row([1, 2, 1], np.int64),
        "advantages": ColumnData.completion([[0.5, 1.5], [], [-1, -2, -3]]),
        "loss_mask": ColumnData.completion([[True, False], [], [True] * 3], bool),
        "prompt_text": ColumnData.text(["a", "ä", ""]),
    }
)


@pytest.fixture
async def server() -> AsyncIterator[ServiceServer]:
    async with (
        serving(ToyRole(), experience_capacity_bytes=CAPACITY_BYTES, put_share=1.0) as server,
        open_channel(server.runtime.address) as channel,
    ):
        request = worker_pb2.InitializeRequest(key=operation_key("initialize"))
        async for _ in worker_pb2_grpc.WorkerServiceStub(channel).Initialize(request):
            pass
        yield server


@pytest.fixture
async def channel(server: ServiceServer) -> AsyncIterator[MeshChannel]:
    async with open_channel(server.runtime.address) as channel:
        yield channel


async def put(
    channel: MeshChannel,
    columns: Columns,
    key: operation_pb2.OperationKey | None = None,
    damage: Callable[[experience_pb2.PayloadHeader], object] = lambda _: None,
    change: Callable[[Iterator[bytes]], Iterable[bytes]] = iter,
) -> experience_pb2.ExperienceRef:
    header, chunks = encode(columns)
    damage(header)
    opening = experience_pb2.PutOpening(key=key or operation_key("client.put"), header=header)

    async def requests() -> AsyncIterator[experience_pb2.PutRequest]:
        yield experience_pb2.PutRequest(opening=opening)
        for chunk in change(chunks):
            yield experience_pb2.PutRequest(chunk=chunk)

    stub: Any = experience_pb2_grpc.ExperienceServiceStub(channel)
    return (await stub.Put(requests())).experience


def assert_equal(left: Columns, right: Columns) -> None:
    assert list(left) == list(right)
    for name, column in left.items():
        np.testing.assert_array_equal(column.values, right[name].values, err_msg=name)
        np.testing.assert_array_equal(column.lengths(), right[name].lengths(), err_msg=name)


async def test_what_was_put_is_fetched_and_worked_on_like_what_a_rank_made(
    server: ServiceServer, channel: MeshChannel
) -> None:
    reference = await put(channel, BATCH, operation_key("client.put", step=3))
    assert (reference.run_id, reference.step, reference.num_rows) == ("run", 3, 3)
    assert row_tokens(reference) == [3, 2, 4]
    assert_equal(await fetch_columns(lambda _: channel, reference), BATCH)

    request = value_pb2.ComputeValuesRequest(key=operation_key(step=3), experience=reference)
    async for message in value_pb2_grpc.ValueServiceStub(channel).ComputeValues(request):
        made = message.result.experience
    values = await fetch_columns(lambda _: channel, made)
    np.testing.assert_array_equal(values["values"].values, BATCH["tokens"].values + 1)

    await experience_pb2_grpc.ExperienceServiceStub(channel).Release(
        experience_pb2.ReleaseRequest(run_id="run", through_step=3, fencing_epoch=1)
    )
    assert server.runtime.store.held_bytes == 0


async def test_a_payload_of_many_chunks_arrives_whole(channel: MeshChannel) -> None:
    numbers = np.arange(300_000, dtype=np.float64)
    reference = await put(channel, Columns({"numbers": ColumnData.row(numbers)}))
    fetched = await fetch_columns(lambda _: channel, reference)
    np.testing.assert_array_equal(fetched["numbers"].values, numbers)


async def test_a_repeat_returns_the_first_answer_and_holds_nothing_twice(
    server: ServiceServer, channel: MeshChannel
) -> None:
    first = await put(channel, BATCH)
    held_bytes = server.runtime.store.held_bytes
    assert await put(channel, BATCH) == first
    assert server.runtime.store.held_bytes == held_bytes
    other = BATCH | {"prompt_lengths": ColumnData.row([1, 2, 1], np.int64)}
    assert await put(channel, other) == first
    changed = BATCH | {"prompt_text": ColumnData.text(["b", "ä", ""])}
    with pytest.raises(InvalidRequestError) as refused:
        await put(channel, changed)
    assert refused.value.reason == "KEY_REUSED"


async def test_a_put_beyond_the_capacity_is_refused_before_its_bytes_are_taken(
    server: ServiceServer, channel: MeshChannel
) -> None:
    large = Columns({"numbers": ColumnData.row(np.zeros(200_000))})
    await put(channel, large, operation_key("client.put", sequence=1))
    await put(channel, large, operation_key("client.put", sequence=2))
    with pytest.raises(CapacityError) as refused:
        await put(channel, large, operation_key("client.put", sequence=3))
    assert refused.value.reason == "EXPERIENCE_CAPACITY"
    # A repeat has its answer already, and needs no room for a second copy.
    assert (await put(channel, large, operation_key("client.put", sequence=2))).num_rows == 200_000
    with pytest.raises(CapacityError):
        await put(
            channel,
            BATCH,
            operation_key("client.put", sequence=4),
            damage=lambda header: setattr(header, "num_bytes", 1 << 50),
        )
    assert server.runtime.store.held_bytes == 2 * 200_000 * 8


def cut_short(chunks: Iterator[bytes]) -> Iterator[bytes]:
    yield next(chunks)[:-1]


def one_too_many(chunks: Iterator[bytes]) -> Iterator[bytes]:
    yield from chunks
    yield b"x"


@pytest.mark.parametrize(
    ("columns", "damage", "change", "says"),
    [
        (BATCH, lambda _: None, cut_short, "but only"),
        (BATCH, lambda _: None, one_too_many, "arrived"),
        (BATCH, lambda h: setattr(h.columns[0], "num_values", 1 << 40), iter, "'tokens' claims"),
        (BATCH, lambda h: setattr(h.columns[0].schema, "dtype", 99), iter, "dtype 99"),
        (BATCH, lambda h: setattr(h.columns[0].schema, "name", "Tokens!"), iter, "lower_snake"),
        (BATCH, lambda h: h.ClearField("columns"), iter, "at least one column"),
        (BATCH | {"prompt_lengths": ColumnData.row([3, 2, 1], np.int64)}, lambda _: None, iter,
         "disagree on completion lengths"),
        (Columns({"loss_mask": ColumnData.row([0, 2, 1], np.uint8)}),
         lambda h: setattr(h.columns[0].schema, "dtype", 8), iter, "other than 0 and 1"),
        (Columns({"prompt_text": ColumnData.text(["ä"])}), lambda _: None,
         lambda chunks: [next(chunks).replace(b"\xa4", b"\xff")], "no UTF-8"),
        (Columns({"rewards": ColumnData.row([], np.float32)}), lambda _: None, iter, "num_rows"),
    ],
)  # fmt: skip
async def test_a_payload_that_does_not_fit_its_header_is_refused(
    server: ServiceServer, channel: MeshChannel, columns: Columns, damage: Any, change: Any,
    says: str,
) -> None:  # fmt: skip
    with pytest.raises(InvalidRequestError, match=says) as refused:
        await put(channel, columns, damage=damage, change=change)
    assert refused.value.reason == "PAYLOAD_MALFORMED"
    assert server.runtime.store.held_bytes == 0


async def test_a_put_of_a_stale_epoch_of_another_run_or_in_shared_memory_is_refused(
    channel: MeshChannel,
) -> None:
    async def reason_of(**changes: Any) -> str:
        with pytest.raises(RolemeshError) as refused:
            await put(channel, BATCH, **changes)
        return refused.value.reason

    await put(channel, BATCH, operation_key("client.put", epoch=2))
    assert await reason_of(key=operation_key("client.put", epoch=1)) == "STALE_EPOCH"
    assert await reason_of(key=operation_key("client.put", run_id="other")) == "RUN_MISMATCH"
    assert (
        await reason_of(
            key=operation_key("client.put", epoch=2, sequence=1),
            damage=lambda header: setattr(header, "shared_memory_name", "x"),
        )
        == "INPUT_UNSUPPORTED"
    )


async def test_a_stream_without_an_opening_is_refused(channel: MeshChannel) -> None:
    async def requests() -> AsyncIterator[experience_pb2.PutRequest]:
        yield experience_pb2.PutRequest(chunk=b"abc")

    stub: Any = experience_pb2_grpc.ExperienceServiceStub(channel)
    with pytest.raises(InvalidRequestError, match="begin with an opening"):
        await stub.Put(requests())


async def test_a_service_without_a_run_takes_nothing() -> None:
    async with serving() as idle, open_channel(idle.runtime.address) as channel:
        with pytest.raises(PreconditionError) as refused:
            await put(channel, BATCH)
    assert refused.value.reason == "NOT_INITIALIZED"
