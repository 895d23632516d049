"""Answers of Fetch as messages: those of the generated class, and those that do not fit."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from support.services import assert_same, make_experience

from rolemesh.engine.experience import Experience, payload_layout
from rolemesh.engine.transport.slots.shm import Segment
from rolemesh.rpc.channel import CHUNK_BYTES, open_channel
from rolemesh.rpc.experience.payload import header_of, payload_chunks
from rolemesh.rpc.experience.payload_stream import (
    PayloadMalformedError,
    encode_chunk,
    encode_header,
)
from rolemesh.services.runtime.experience.fetch import Fetched, arrays_of, fetch_rows
from rolemesh.v1 import experience_pb2, experience_pb2_grpc, tensor_pb2


class GeneratedServicer(experience_pb2_grpc.ExperienceServiceServicer):
    """Answers with whatever messages it was given, through the generated serializers."""

    def __init__(self, parts: list[experience_pb2.FetchResponse]) -> None:
        self._parts = parts

    async def Fetch(self, request: Any, context: Any) -> Any:
        for part in self._parts:
            yield part


async def fetch_from(
    parts: list[experience_pb2.FetchResponse], names: list[str], num_rows: int, host_id: str = ""
) -> Fetched:
    server = grpc.aio.server()
    experience_pb2_grpc.add_ExperienceServiceServicer_to_server(GeneratedServicer(parts), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    shard = experience_pb2.Shard(experience_id="x", address=address, role="fake", num_rows=num_rows)
    try:
        async with open_channel(address) as channel:
            return await fetch_rows(channel, shard, names, range(num_rows), host_id)
    finally:
        await server.stop(0)


def as_parts(batch: Experience, chunk_bytes: int = 1000) -> list[experience_pb2.FetchResponse]:
    layout = payload_layout(batch)
    chunks = payload_chunks(layout, arrays_of(batch), chunk_bytes)
    return [
        experience_pb2.FetchResponse(header=header_of(layout)),
        *(experience_pb2.FetchResponse(chunk=b"".join(pieces)) for pieces in chunks),
    ]


async def test_our_client_reads_a_generated_servicer() -> None:
    batch = make_experience(40, seed=3)
    fetched = await fetch_from(as_parts(batch), list(batch.columns), 40)
    assert_same(fetched.experience, batch)


def test_hand_made_messages_are_the_bytes_of_the_generated_class() -> None:
    header = header_of(payload_layout(make_experience(5)))
    expected = experience_pb2.FetchResponse(header=header).SerializeToString()
    assert encode_header(header) == expected
    for length in (0, 1, 127, 128, 16_383, 16_384, CHUNK_BYTES):
        data = bytes(range(256)) * (length // 256 + 1)
        expected = experience_pb2.FetchResponse(chunk=data[:length]).SerializeToString()
        pieces = [memoryview(data)[: length // 3], data[length // 3 : length]]
        assert encode_chunk(pieces) == expected


# --- malformed answers ---------------------------------------------------------------------


def broken(change: str) -> list[experience_pb2.FetchResponse]:
    """A good answer for four rows, with one thing wrong."""
    parts = as_parts(make_experience(4))
    header = parts[0].header
    tokens = header.columns[0]
    if change == "no header":
        return parts[1:]
    if change == "second header":
        return [parts[0], *parts]
    if change == "nothing":
        return []
    if change == "empty message":
        return [parts[0], experience_pb2.FetchResponse()]
    if change == "bytes missing":
        return parts[:-1]
    if change == "bytes too many":
        return [*parts, parts[-1]]
    if change == "column missing":
        del header.columns[-1]
    if change == "dtype unknown":
        tokens.schema.dtype = tensor_pb2.DATA_TYPE_UNSPECIFIED
    if change == "shape too large":
        tokens.num_values += 10_000
    if change == "shape overflows":
        tokens.num_values = 2**62
    if change == "negative offset":
        tokens.values_at = -64
    if change == "not aligned":
        tokens.values_at += 1
    if change == "offsets missing":
        tokens.ClearField("offsets_at")
    if change == "rows wrong":
        header.num_rows = header.row_stop = 5
    if change == "payload huge":
        header.num_bytes = 1 << 60
    if change == "segment not offered":
        header.shared_memory_name = "rolemesh-1-" + "0" * 32
    return parts


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("no header", "does not begin with a header"),
        ("nothing", "does not begin with a header"),
        ("second header", "second header"),
        ("empty message", "neither a header nor a chunk"),
        ("bytes missing", "only .* arrived"),
        ("bytes too many", "were? announced|was announced"),
        ("column missing", "were asked for, but"),
        ("dtype unknown", "does not know"),
        ("shape too large", "bytes and shape do not fit"),
        ("shape overflows", "bytes and shape do not fit"),
        ("negative offset", "bytes and shape do not fit"),
        ("not aligned", "bytes and shape do not fit"),
        ("offsets missing", "lacks offsets"),
        ("rows wrong", "for 5 rows|rows were asked for"),
        ("payload huge", "fetch fewer rows"),
        ("segment not offered", "was not offered"),
    ],
    ids=lambda value: value.replace(" ", "-") if "|" not in value else "",
)
async def test_an_answer_that_does_not_fit_is_refused_and_its_peer_named(
    change: str, message: str
) -> None:
    names = list(make_experience(4).columns)
    with pytest.raises(PayloadMalformedError, match=message) as caught:
        await fetch_from(broken(change), names, 4)
    assert str(caught.value).startswith("fake rank 0 at 127.0.0.1:")


@pytest.mark.parametrize(
    "name",
    ["../etc/passwd", "rolemesh-1-" + "g" * 32, "psm_abcdef", "rolemesh-1-" + "0" * 32 + "/x", ""],
)
async def test_a_shared_memory_name_of_another_form_is_never_opened(name: str) -> None:
    batch = make_experience(4)
    parts = as_parts(batch)[:1]
    parts[0].header.shared_memory_name = name
    with pytest.raises(PayloadMalformedError, match="is not of the form"):
        await fetch_from(parts, list(batch.columns), 4, host_id="here")


async def test_a_segment_of_another_size_is_refused() -> None:
    batch = make_experience(4)
    segment = Segment.create(4096)
    try:
        parts = as_parts(batch)[:1]
        parts[0].header.shared_memory_name = segment.name
        with pytest.raises(PayloadMalformedError, match="has 4096 bytes"):
            await fetch_from(parts, list(batch.columns), 4, host_id="here")
    finally:
        segment.unlink()
