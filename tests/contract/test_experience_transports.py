"""One suite for every way that experience travels: what arrives is what was published."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import grpc
import pytest
import torch
from prometheus_client import generate_latest
from support.service_calls import RecordingCall
from support.services import assert_same, make_experience, operation_key, serving

from rolemesh.engine.experience import Column, ColumnKind, Experience, payload_layout
from rolemesh.engine.transport.slots.shm import Segment
from rolemesh.rpc.channel import CHUNK_BYTES, open_channel
from rolemesh.rpc.errors import (
    InvalidRequestError,
    NotFoundError,
    OutOfRangeError,
    RolemeshError,
)
from rolemesh.rpc.experience import pull
from rolemesh.rpc.experience.references import join_parts, row_tokens
from rolemesh.services.runtime.calls.runtime import Share
from rolemesh.services.runtime.experience.fetch import ExperienceServicer, Fetched, fetch_rows
from rolemesh.services.runtime.experience.store import ExperienceStore
from rolemesh.services.runtime.service_server import ServiceServer
from rolemesh.v1 import experience_pb2, experience_pb2_grpc, tensor_pb2

ALWAYS_SHARED = 1
"""Threshold in bytes that sends every batch through shared memory."""

TRANSPORTS = ["shm", "grpc"]


@pytest.fixture
async def producer() -> AsyncIterator[ServiceServer]:
    async with serving(shared_memory_threshold_bytes=ALWAYS_SHARED) as server:
        yield server


async def fetch(
    server: ServiceServer,
    batch: Experience,
    transport: str,
    columns: list[str] | None = None,
    rows: tuple[int, int] | None = None,
) -> Fetched:
    reference = server.runtime.publish(operation_key(), batch)
    names = list(batch.columns) if columns is None else columns
    start, stop = (0, batch.num_rows) if rows is None else rows
    host_id = server.runtime.process.host_id if transport == "shm" else ""
    async with open_channel(server.runtime.address) as channel:
        return await fetch_rows(
            channel, reference.groups[0].shards[0], names, range(start, stop), host_id
        )


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("num_rows", [1, 5, 3000])
async def test_what_arrives_is_what_was_published(
    producer: ServiceServer, transport: str, num_rows: int
) -> None:
    batch = make_experience(num_rows, seed=num_rows)
    fetched = await fetch(producer, batch, transport)
    assert fetched.transport == transport
    assert fetched.num_bytes == batch.num_bytes
    assert_same(fetched.experience, batch)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("rows", [(0, 1), (3, 17), (19, 20), (4, 4)], ids=str)
async def test_a_sub_range_of_rows_and_columns_arrives_in_the_order_asked_for(
    producer: ServiceServer, transport: str, rows: tuple[int, int]
) -> None:
    batch = make_experience(20, seed=1)
    names = ["logprobs", "tokens", "prompt_lengths"]
    fetched = await fetch(producer, batch, transport, names, rows)
    assert_same(fetched.experience, batch.require(names).slice(*rows))
    if rows[0] < rows[1]:
        # Only what was asked for was taken.
        assert fetched.num_bytes < batch.num_bytes


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_rows_without_a_completion_arrive(producer: ServiceServer, transport: str) -> None:
    nothing = torch.empty(0)
    batch = Experience(
        {
            "logprobs": Column.ragged(ColumnKind.COMPLETION, [nothing] * 3, torch.float32),
            "completion_text": Column.text(["", "", ""]),
        }
    )
    assert_same((await fetch(producer, batch, transport)).experience, batch)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
    ],
    ids=str,
)
async def test_every_dtype_arrives_bit_for_bit(
    producer: ServiceServer, transport: str, dtype: torch.dtype
) -> None:
    values = torch.arange(-3, 4).to(dtype)
    batch = Experience({"column": Column(ColumnKind.ROW, values)})
    fetched = (await fetch(producer, batch, transport)).experience
    assert fetched["column"].values.dtype is dtype
    assert torch.equal(fetched["column"].values, values)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_what_arrived_stays_valid_after_release(
    producer: ServiceServer, transport: str
) -> None:
    batch = make_experience(50)
    fetched = await fetch(producer, batch, transport)
    assert producer.runtime.store.release_through("run", 0) == batch.num_bytes
    assert_same(fetched.experience, batch)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_column_that_is_not_there_is_refused(
    producer: ServiceServer, transport: str
) -> None:
    with pytest.raises(NotFoundError, match="no column 'nothing'") as caught:
        await fetch(producer, make_experience(3), transport, ["tokens", "nothing"])
    assert caught.value.reason == "COLUMN_NOT_FOUND"


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("rows", [(-1, 2), (2, 1), (0, 4)], ids=str)
async def test_rows_beyond_what_is_held_are_refused(
    producer: ServiceServer, transport: str, rows: tuple[int, int]
) -> None:
    with pytest.raises(OutOfRangeError) as caught:
        await fetch(producer, make_experience(3), transport, None, rows)
    assert caught.value.reason == "ROWS_OUT_OF_RANGE"


async def test_a_segment_that_cannot_be_opened_is_replaced_by_a_stream(
    producer: ServiceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str, num_bytes: int) -> torch.Tensor:
        raise PermissionError(f"no {name}")

    monkeypatch.setattr("rolemesh.services.runtime.experience.fetch.open_segment", refuse)
    batch = make_experience(30)
    fetched = await fetch(producer, batch, "shm")
    assert fetched.transport == "grpc"
    assert_same(fetched.experience, batch)


async def test_a_full_shared_memory_falls_back_to_process_memory(
    producer: ServiceServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(num_bytes: int) -> Segment:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Segment, "create", staticmethod(full))
    batch = make_experience(30)
    fetched = await fetch(producer, batch, "shm")
    assert fetched.transport == "grpc"
    assert_same(fetched.experience, batch)
    assert "enlarge /dev/shm" in caplog.text


def test_the_store_frees_the_bytes_of_a_batch_that_it_could_not_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = ExperienceStore(1 << 20, shared_memory=True, shared_memory_threshold_bytes=1)

    def fail(*arguments: object) -> None:
        raise RuntimeError("torn")

    monkeypatch.setattr("rolemesh.services.runtime.experience.store.write_payload", fail)
    with pytest.raises(RuntimeError, match="torn"):
        store.put("run", 0, make_experience(10))
    assert store.held_bytes == 0


# --- wire compatibility --------------------------------------------------------------------


async def test_the_generated_stub_reads_our_stream(producer: ServiceServer) -> None:
    batch = make_experience(3000, seed=2)
    reference = producer.runtime.publish(operation_key(), batch)
    async with grpc.aio.insecure_channel(producer.runtime.address) as channel:
        call = experience_pb2_grpc.ExperienceServiceStub(channel).Fetch(
            experience_pb2.FetchRequest(
                experience_id=reference.groups[0].shards[0].experience_id, row_stop=3000
            ),
            timeout=30,
        )
        parts = [part async for part in call]
    assert [part.WhichOneof("part") for part in parts] == ["header"] + ["chunk"] * (len(parts) - 1)
    payload = b"".join(part.chunk for part in parts[1:])
    header = parts[0].header
    assert len(payload) == header.num_bytes == payload_layout(batch).num_bytes
    assert all(len(part.chunk) == CHUNK_BYTES for part in parts[1:-1])
    tokens = header.columns[0]
    assert tokens.schema.name == "tokens"
    assert tokens.schema.dtype == tensor_pb2.DATA_TYPE_INT64
    got = torch.frombuffer(
        bytearray(payload), dtype=torch.int64, count=tokens.num_values, offset=tokens.values_at
    )
    assert torch.equal(got, batch["tokens"].values)


async def test_pull_joins_groups_and_stacks_shards() -> None:
    batch = make_experience(30, seed=8)
    async with (
        serving(shared_memory_threshold_bytes=ALWAYS_SHARED) as first,
        serving(shared_memory=False) as second,
        serving() as consumer,
    ):
        ref = experience_pb2.ExperienceRef(run_id="run", num_rows=30)
        rows = experience_pb2.ColumnGroup()
        for server, start, stop in ((first, 0, 12), (second, 12, 30)):
            part = server.runtime.publish(
                operation_key(), batch.require(["tokens", "logprobs"]).slice(start, stop)
            )
            del rows.columns[:]
            rows.columns.extend(part.groups[0].columns)
            shard = part.groups[0].shards[0]
            shard.row_start = start
            rows.shards.append(shard)
        ref.groups.append(rows)
        lengths = consumer.runtime.publish(operation_key(), batch.require(["prompt_lengths"]))
        ref.groups.append(lengths.groups[0])
        names = ["prompt_lengths", "logprobs", "tokens"]
        call = RecordingCall()
        pulled = await consumer.runtime.pull(ref, names, call)  # type: ignore[arg-type]
        middle = await consumer.runtime.pull(  # type: ignore[call-arg]
            ref,
            names,
            RecordingCall(),  # type: ignore[arg-type]
            rows=range(10, 15),
        )
    assert_same(pulled, batch.require(names))
    assert_same(middle, batch.require(names).slice(10, 15))
    assert set(call.fetched) == {"shm", "grpc", "local"}
    assert sum(call.fetched.values()) > 0


async def test_ranks_publish_scattered_rows_and_a_consumer_pulls_any_of_them() -> None:
    batch = make_experience(30, seed=8)
    shares = ([0, 3, 4, 9, 20, 29], sorted({*range(30)} - {0, 3, 4, 9, 20, 29}))
    async with (
        serving(shared_memory_threshold_bytes=ALWAYS_SHARED) as first,
        serving(shared_memory=False) as second,
        serving() as consumer,
    ):
        parts = [
            server.runtime.publish(
                operation_key(),
                batch.select(torch.tensor(rows)),
                share=Share(rows=rows, num_rows=30, counts=True),
            )
            for server, rows in zip((first, second), shares, strict=True)
        ]
        ref = join_parts(parts[::-1])
        assert row_tokens(ref) == batch["tokens"].lengths().tolist()
        call = RecordingCall()
        names = list(batch.columns)
        whole = await consumer.runtime.pull(ref, names, call)  # type: ignore[arg-type]
        wanted = [29, 1, 2, 3, 0, 28]
        some = await consumer.runtime.pull(ref, names, call, rows=wanted)  # type: ignore[arg-type]
    assert_same(whole, batch)
    assert_same(some, batch.select(torch.tensor(wanted)))
    assert set(call.fetched) == {"shm", "grpc"}


async def test_a_rank_sends_only_the_rows_that_were_asked_for() -> None:
    batch = make_experience(400, seed=3)
    async with serving(shared_memory=False) as server, serving() as consumer:
        ref = server.runtime.publish(operation_key(), batch)
        call = RecordingCall()
        await consumer.runtime.pull(ref, ["tokens"], call, rows=[7, 300])  # type: ignore[arg-type]
    expected = batch.require(["tokens"]).select(torch.tensor([7, 300])).num_bytes
    assert call.fetched == {"grpc": expected}


@pytest.mark.parametrize(
    "rows", [range(5, 380), [7, *range(390, 100, -1), 3]], ids=["range", "single"]
)
async def test_what_is_large_comes_over_connections_of_its_own(
    rows: Sequence[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pull, "FIRST_PART_BYTES", 5_000)
    monkeypatch.setattr(pull, "LEAST_PART_BYTES", 1_000)
    peers: set[str] = set()
    answer = ExperienceServicer.fetch

    async def noted(
        self: ExperienceServicer, request: object, context: object
    ) -> AsyncIterator[bytes]:
        peers.add(context.peer())  # type: ignore[attr-defined]
        async for message in answer(self, request, context):  # type: ignore[arg-type]
            yield message

    monkeypatch.setattr(ExperienceServicer, "fetch", noted)
    batch = make_experience(400, seed=3)
    async with serving(shared_memory=False) as server, serving() as consumer:
        ref = server.runtime.publish(operation_key(), batch)
        call = RecordingCall()
        names = list(batch.columns)
        with caplog.at_level("INFO"):
            for _ in range(2):
                pulled = await consumer.runtime.pull(ref, names, call, rows=rows)  # type: ignore[arg-type]
        counted = generate_latest(consumer.runtime.process.metrics.registry).decode()
    expected = batch.select(torch.tensor([*rows]))
    assert_same(pulled, expected)
    way = pull.grpc_over(pull.MAX_CONNECTIONS)
    assert call.fetched == {way: 2 * expected.num_bytes}
    assert len(peers) == pull.MAX_CONNECTIONS, "connections are kept for the next pull"
    # Each pair of ranks shows its way: in the log once, and in the metrics.
    address = server.runtime.address
    assert caplog.text.count(f"bytes of {address} come by {way}") == 1
    (line,) = [one for one in counted.splitlines() if one.startswith("rolemesh_pulled_bytes_total")]
    assert f'peer="{address}"' in line
    assert f'way="{way}"' in line
    assert float(line.split()[-1]) == 2 * expected.num_bytes


async def test_fetch_refuses_a_part_beyond_the_end(producer: ServiceServer) -> None:
    reference = producer.runtime.publish(operation_key(), make_experience(4))
    request = experience_pb2.FetchRequest(
        experience_id=reference.groups[0].shards[0].experience_id, row_stop=4, byte_start=1 << 40
    )
    async with open_channel(producer.runtime.address) as channel:
        with pytest.raises(OutOfRangeError, match="bytes 1099511627776 to 0"):
            async for _ in experience_pb2_grpc.ExperienceServiceStub(channel).Fetch(request):
                pass


@pytest.mark.parametrize(
    ("rows", "row_stop", "error", "says"),
    [
        ([3, 4], 0, OutOfRangeError, "rows 3 to 5 were asked for"),
        ([1, 2], 2, InvalidRequestError, "both single rows and the range 0 to 2"),
    ],
)
async def test_fetch_refuses_rows_that_are_not_there(
    producer: ServiceServer,
    rows: list[int],
    row_stop: int,
    error: type[RolemeshError],
    says: str,
) -> None:
    reference = producer.runtime.publish(operation_key(), make_experience(4))
    request = experience_pb2.FetchRequest(
        experience_id=reference.groups[0].shards[0].experience_id, rows=rows, row_stop=row_stop
    )
    async with open_channel(producer.runtime.address) as channel:
        with pytest.raises(error, match=says):
            async for _ in experience_pb2_grpc.ExperienceServiceStub(channel).Fetch(request):
                pass


async def test_pull_refuses_a_batch_with_a_row_that_nobody_holds() -> None:
    async with serving() as server:
        ref = server.runtime.publish(operation_key(), make_experience(4))
        ref.num_rows = 6
        with pytest.raises(ValueError, match=r"rows \[4, 5\] \(2 of 6\) lie in no shard"):
            await server.runtime.pull(ref, ["tokens"], RecordingCall())  # type: ignore[arg-type]


async def test_many_pulls_at_once_get_their_own_rows(producer: ServiceServer) -> None:
    batch = make_experience(64, seed=9)
    reference = producer.runtime.publish(operation_key(), batch)
    shard = reference.groups[0].shards[0]
    names = list(batch.columns)
    async with open_channel(producer.runtime.address) as channel:
        fetched = await asyncio.gather(
            *(
                fetch_rows(
                    channel,
                    shard,
                    names,
                    range(start, start + 8),
                    producer.runtime.process.host_id if start % 16 else "",
                )
                for start in range(0, 64, 8)
            )
        )
    assert_same(Experience.concat([part.experience for part in fetched]), batch)
