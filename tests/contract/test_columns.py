"""The light codec against the engine's: the same bytes, and the same columns from them."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from support.services import assert_same, make_experience, operation_key, serving

from rolemesh.coordinator.sdk import AsyncMesh
from rolemesh.coordinator.sdk import Experience as HeldExperience
from rolemesh.engine.experience import (
    Column,
    ColumnKind,
    Experience,
    payload_layout,
    read_payload,
    write_payload,
)
from rolemesh.rpc.channel import CHUNK_BYTES, ChannelTraffic, MeshChannel, open_channel
from rolemesh.rpc.errors import CapacityError, DeadlineError, InvalidRequestError, NotFoundError
from rolemesh.rpc.experience import columns as light
from rolemesh.rpc.experience.column_fetch import fetch_columns
from rolemesh.rpc.experience.columns import ColumnData, Columns, decode, encode
from rolemesh.rpc.experience.payload import header_of, layout_of
from rolemesh.rpc.experience.payload_stream import PayloadMalformedError
from rolemesh.rpc.experience.references import join_parts
from rolemesh.services.runtime.calls.runtime import Share
from rolemesh.v1 import experience_pb2, experience_pb2_grpc

LONG_S = 30.0
"""Nothing of a test may take that long: a hang."""


def to_light(batch: Experience) -> Columns:
    """The oracle: array by array, without a payload."""
    return Columns(
        {
            name: ColumnData(
                light.ColumnKind[column.kind.name],
                # numpy has no bfloat16; float32 holds each exactly.
                (
                    column.values.float()
                    if column.values.dtype is torch.bfloat16
                    else column.values
                ).numpy(),
                None if column.offsets is None else column.offsets.numpy(),
            )
            for name, column in batch.columns.items()
        }
    )


def assert_equal(left: Columns, right: Columns) -> None:
    assert list(left) == list(right)
    for name, column in left.items():
        assert column.kind is right[name].kind
        assert column.values.dtype == right[name].values.dtype
        np.testing.assert_array_equal(column.values, right[name].values, err_msg=name)
        np.testing.assert_array_equal(column.lengths(), right[name].lengths(), err_msg=name)


def payload_of(batch: Experience) -> tuple[experience_pb2.PayloadHeader, bytearray]:
    layout = payload_layout(batch)
    payload = bytearray(layout.num_bytes)
    write_payload(batch, layout, memoryview(payload))
    return header_of(layout), payload


@pytest.mark.parametrize("num_rows", [0, 1, 40])
def test_a_service_s_payload_is_read_as_the_engine_reads_it(num_rows: int) -> None:
    batch = make_experience(max(num_rows, 1), seed=num_rows).slice(0, num_rows)
    assert_equal(decode(*payload_of(batch)), to_light(batch))


@pytest.mark.parametrize("num_rows", [0, 1, 40, 9000])
def test_bytes_are_those_that_the_engine_writes(num_rows: int) -> None:
    batch = make_experience(max(num_rows, 1), seed=num_rows).slice(0, num_rows)
    batch = batch.require([name for name in batch.columns if name != "half"])
    header, chunks = encode(to_light(batch))
    sent = list(chunks)
    engine_header, engine_bytes = payload_of(batch)
    assert header == engine_header
    assert b"".join(sent) == engine_bytes
    assert all(len(chunk) == CHUNK_BYTES for chunk in sent[:-1])
    assert_same(
        read_payload(layout_of(header), torch.frombuffer(engine_bytes, dtype=torch.uint8))
        if engine_bytes
        else batch,
        batch,
    )


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float16,
        torch.float64,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
    ],
    ids=str,
)
def test_every_dtype_of_numpy_travels_bit_for_bit(dtype: torch.dtype) -> None:
    batch = Experience({"column": Column(ColumnKind.ROW, torch.arange(-3, 4).to(dtype))})
    header, chunks = encode(decode(*payload_of(batch)))
    assert (header, b"".join(chunks)) == payload_of(batch)


def test_bfloat16_is_read_as_the_same_float32() -> None:
    values = torch.tensor([0.0, -1.5, 3.14159, 1e38, float("inf")]).to(torch.bfloat16)
    batch = Experience({"column": Column(ColumnKind.ROW, values)})
    read = decode(*payload_of(batch))["column"].values
    assert read.dtype == np.float32
    np.testing.assert_array_equal(read, values.float().numpy())


def test_a_dtype_that_may_not_travel_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'a' has dtype uint16") as refused:
        encode(Columns({"a": ColumnData.row([1, 2], np.uint16)}))
    assert "bfloat16" not in str(refused.value)  # which numpy cannot write


def test_texts_and_rows_come_back_as_they_went_in() -> None:
    batch = Columns(
        {
            "text": ColumnData.text(["", "ä", "two words"]),
            "tokens": ColumnData.sequence([[1, 2], [], [3]]),
            "loss_mask": ColumnData.completion([[True], [False, True], []], bool),
        }
    )
    assert batch["text"].strings() == ["", "ä", "two words"]
    assert [row.tolist() for row in batch["tokens"].rows()] == [[1, 2], [], [3]]
    chosen = batch.select([2, 0])
    assert chosen["text"].strings() == ["two words", ""]
    assert [row.tolist() for row in chosen["loss_mask"].rows()] == [[], [True]]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda h: setattr(h, "num_rows", -1), "claims -1 rows"),
        (lambda h: h.ClearField("columns"), "in 0 columns"),
        (lambda h: setattr(h, "shared_memory_name", "x"), "not offered"),
        (lambda h: setattr(h.columns[0].schema, "kind", 9), "kind 9"),
        (lambda h: setattr(h.columns[0].schema, "dtype", 0), "dtype 0"),
        (lambda h: h.columns[0].ClearField("offsets_at"), "lacks offsets"),
        (lambda h: setattr(h.columns[1], "offsets_at", 0), "must not have offsets"),
        (lambda h: setattr(h.columns[1], "num_values", 3), "3 values for 6 rows"),
        (lambda h: setattr(h.columns[0], "num_values", 1 << 40), "bytes and shape do not fit"),
        (lambda h: setattr(h.columns[0], "values_at", -64), "bytes and shape do not fit"),
        (lambda h: setattr(h.columns[0], "values_at", 8), "bytes and shape do not fit"),
        (lambda h: setattr(h.columns[1].schema, "name", "tokens"), "names a column twice"),
        (lambda h: setattr(h, "num_bytes", h.num_bytes + 1), "but"),
    ],
)  # fmt: skip
def test_a_header_that_does_not_fit_its_bytes_is_refused(damage: object, says: str) -> None:
    header, payload = payload_of(make_experience(6))
    damage(header)  # type: ignore[operator]
    with pytest.raises(PayloadMalformedError, match=says):
        decode(header, payload)


def test_offsets_that_decrease_are_refused() -> None:
    header, payload = payload_of(make_experience(6))
    offsets = np.frombuffer(payload, "<i8", 7, header.columns[0].offsets_at)
    offsets[2] = offsets[-1]
    offsets[3] = 0
    with pytest.raises(PayloadMalformedError, match="'tokens': offsets decrease"):
        decode(header, payload)


class Channels:
    """Opens each address once."""

    def __init__(self) -> None:
        self.opened: dict[str, MeshChannel] = {}
        self.traffic = ChannelTraffic()

    def __call__(self, address: str) -> MeshChannel:
        if address not in self.opened:
            self.opened[address] = open_channel(address, traffic=self.traffic)
        return self.opened[address]

    async def close(self) -> None:
        for channel in self.opened.values():
            await channel.close()


async def moved_to(
    servicer: experience_pb2_grpc.ExperienceServiceServicer, reference: Any
) -> tuple[grpc.aio.Server, str]:
    """Starts a server with the servicer, and has the reference say that it holds all shards."""
    server = grpc.aio.server()
    experience_pb2_grpc.add_ExperienceServiceServicer_to_server(servicer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    for group in reference.groups:
        for shard in group.shards:
            shard.address = address
    return server, address


async def test_rows_of_many_ranks_come_in_the_order_of_the_batch_or_as_asked() -> None:
    batch = make_experience(30, seed=8)
    shares = ([0, 3, 4, 9, 20, 29], sorted({*range(30)} - {0, 3, 4, 9, 20, 29}))
    channels = Channels()
    # Shared memory is on: the client must not be offered it.
    async with serving(shared_memory_threshold_bytes=1) as first, serving() as second:
        reference = join_parts(
            [
                server.runtime.publish(
                    operation_key(),
                    batch.select(torch.tensor(rows)),
                    share=Share(rows=rows, num_rows=30, counts=True),
                )
                for server, rows in zip((first, second), shares, strict=True)
            ]
        )
        texts = Experience({"prompt_text": Column.text([f"later {row}" for row in range(30)])})
        reference.groups.extend(second.runtime.publish(operation_key(), texts).groups)
        whole = await fetch_columns(channels, reference)
        wanted = [29, 1, 1, 0, 28]
        some = await fetch_columns(channels, reference, ["half", "tokens"], wanted)
        await channels.close()
    expected = to_light(batch | texts)
    assert sorted(whole) == sorted(expected)
    assert_equal(Columns({name: whole[name] for name in expected}), expected)
    assert_equal(
        some, Columns({name: expected[name] for name in ("half", "tokens")}).select(wanted)
    )


async def test_columns_of_two_services_are_fetched_side_by_side() -> None:
    both_asked = asyncio.Barrier(2)

    class Waiting(experience_pb2_grpc.ExperienceServiceServicer):
        async def Fetch(self, request: Any, context: Any) -> AsyncIterator[object]:
            await both_asked.wait()
            await context.abort(grpc.StatusCode.NOT_FOUND, "both were asked")
            yield experience_pb2.FetchResponse()

    channels = Channels()
    async with serving() as server:
        reference = server.runtime.publish(operation_key(), make_experience(5))
        texts = Experience({"prompt_text": Column.text([f"later {row}" for row in range(5)])})
        reference.groups.extend(server.runtime.publish(operation_key(), texts).groups)
    waiting, _ = await moved_to(Waiting(), reference)
    async with asyncio.timeout(LONG_S / 2):
        with pytest.raises(NotFoundError, match="both were asked"):
            await fetch_columns(channels, reference)
    await channels.close()
    await waiting.stop(None)


@pytest.mark.parametrize("host", ["::1", "[::1]"])
async def test_a_service_listens_on_an_ipv6_host_with_brackets_or_without(host: str) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    channels = Channels()
    async with serving(host=host) as server:
        assert server.runtime.address.startswith("[::1]:")
        batch = make_experience(5)
        reference = server.runtime.publish(operation_key(), batch)
        assert_equal(await fetch_columns(channels, reference), to_light(batch))
        await channels.close()


async def test_a_fetch_beyond_its_bound_or_of_what_is_not_there_is_refused() -> None:
    channels = Channels()
    async with serving() as server:
        reference = server.runtime.publish(operation_key(), make_experience(5))
        with pytest.raises(CapacityError, match="raise max_bytes") as too_large:
            await fetch_columns(channels, reference, max_bytes=100)
        with pytest.raises(InvalidRequestError, match="'rewards' is missing") as no_column:
            await fetch_columns(channels, reference, ["rewards"])
        with pytest.raises(InvalidRequestError, match=r"rows wanted are \[5\]"):
            await fetch_columns(channels, reference, rows=[5])
        server.runtime.store.close()
        with pytest.raises(NotFoundError) as released:
            await fetch_columns(channels, reference)
        await channels.close()
    assert too_large.value.reason == "FETCH_TOO_LARGE"
    # A bound of this side is no fault of the producer, which is not named.
    assert too_large.value.message.startswith("the columns asked for")
    assert "peer" not in too_large.value.metadata
    assert no_column.value.reason == "COLUMN_MISSING"
    assert released.value.reason == "EXPERIENCE_NOT_FOUND"
    assert released.value.metadata["peer"] == server.runtime.address


async def test_a_mesh_waits_for_a_fetch_no_longer_than_its_deadline() -> None:
    class Hanging(experience_pb2_grpc.ExperienceServiceServicer):
        async def Fetch(self, request: object, context: object) -> AsyncIterator[object]:
            await asyncio.sleep(LONG_S)
            yield experience_pb2.FetchResponse()

    async with serving() as server:
        reference = server.runtime.publish(operation_key(), make_experience(5))
    hanging, address = await moved_to(Hanging(), reference)
    async with AsyncMesh({"actor": address}, run_id="run", deadline_s=1.0) as mesh:
        async with asyncio.timeout(LONG_S / 2):
            with pytest.raises(DeadlineError):
                await mesh.fetch(HeldExperience(reference))
    await hanging.stop(None)


def test_columns_import_no_torch() -> None:
    program = (
        "import sys; import rolemesh.rpc.experience.column_fetch; "
        "print(sorted({'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ended.stdout.strip() == "[]"


def test_strided_and_big_endian_arrays_travel_by_value() -> None:
    strided = np.arange(10, dtype=np.float32)[::3]
    swapped = np.array([1, -2, 3, 4], dtype=">i4")
    header, chunks = encode(
        Columns({"strided": ColumnData.row(strided), "swapped": ColumnData.row(swapped)})
    )
    read = decode(header, b"".join(chunks))
    assert read["strided"].values.tolist() == [0, 3, 6, 9]
    assert read["swapped"].values.tolist() == [1, -2, 3, 4]
    assert read["swapped"].values.dtype == np.int32
