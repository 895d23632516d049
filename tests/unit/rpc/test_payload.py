"""Bytes that are cut into chunks."""

from __future__ import annotations

import random

import pytest

from rolemesh.engine.layout.payload import plan_payload
from rolemesh.rpc.errors import OutOfRangeError
from rolemesh.rpc.experience.payload import (
    ChunkCutter,
    part_asked_for,
    part_chunks,
    payload_chunks,
    placed_arrays,
)
from rolemesh.rpc.experience.payload_stream import encode_chunk
from rolemesh.v1 import experience_pb2, weights_pb2


def test_chunks_are_full_but_for_the_last_whatever_comes_in() -> None:
    generator = random.Random(7)
    for _ in range(50):
        contents = [generator.randbytes(generator.randint(0, 30)) for _ in range(6)]
        cutter = ChunkCutter(8)
        cut = [pieces for content in contents for pieces in cutter.add(content)]
        cut += cutter.rest()
        chunks = [b"".join(pieces) for pieces in cut]
        assert b"".join(chunks) == b"".join(contents)
        assert all(len(chunk) == 8 for chunk in chunks[:-1])
        assert all(chunks), "no chunk is empty"
        assert not [*cutter.rest()], "nothing is left"


def test_arrays_are_sent_in_the_order_in_which_they_lie_with_zeros_between() -> None:
    layout = plan_payload(1, [("text", "text", "uint8", 1, 3), ("rewards", "row", "float32", 1, 1)])
    offsets, values = bytes(range(1, 17)), b"abc"
    arrays = {
        "text": [memoryview(values), memoryview(offsets)],
        "rewards": [memoryview(b"wxyz")],
    }
    sent = b"".join(b"".join(pieces) for pieces in payload_chunks(layout, arrays, 50))
    assert sent == offsets + bytes(48) + values + bytes(61) + b"wxyz" + bytes(60)


def test_parts_of_a_payload_are_its_bytes_wherever_they_are_cut() -> None:
    layout = plan_payload(1, [("text", "text", "uint8", 1, 3), ("rewards", "row", "float32", 1, 1)])
    arrays = {
        "text": [memoryview(b"abc"), memoryview(bytes(range(1, 17)))],
        "rewards": [memoryview(b"wxyz")],
    }
    whole = b"".join(b"".join(pieces) for pieces in payload_chunks(layout, arrays))
    placed = placed_arrays(layout, arrays)
    for start in range(layout.num_bytes + 1):
        for stop in range(start, layout.num_bytes + 1):
            chunks = [b"".join(pieces) for pieces in part_chunks(placed, start, stop, 40)]
            assert b"".join(chunks) == whole[start:stop]
            assert all(len(chunk) == 40 for chunk in chunks[:-1])


@pytest.mark.parametrize(
    ("start", "stop", "part"),
    [(0, 0, (0, 90)), (0, 10, (0, 10)), (10, 200, (10, 90)), (90, 0, (90, 90))],
)
def test_a_part_ends_with_the_payload_at_the_latest(
    start: int, stop: int, part: tuple[int, int]
) -> None:
    assert part_asked_for(start, stop, 90) == part


@pytest.mark.parametrize(("start", "stop"), [(-1, 0), (91, 0), (20, 10), (0, -1)])
def test_a_part_that_is_not_there_is_refused(start: int, stop: int) -> None:
    with pytest.raises(OutOfRangeError, match=f"bytes {start} to {stop} were asked for") as caught:
        part_asked_for(start, stop, 90)
    assert caught.value.reason == "BYTES_OUT_OF_RANGE"


def test_a_chunk_is_the_same_message_in_every_stream() -> None:
    chunk = encode_chunk([b"ab", b"cd"])
    for stream in (
        experience_pb2.FetchResponse,
        experience_pb2.PutRequest,
        weights_pb2.FetchWeightsResponse,
    ):
        assert stream(chunk=b"abcd").SerializeToString() == chunk
