"""Published weights on the wire: what is refused, and what answers look like."""

from __future__ import annotations

import functools
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch

from rolemesh.engine.layout.boxes import whole_layout
from rolemesh.engine.layout.manifest import Parameter, WeightLayout
from rolemesh.engine.layout.ranks import TrainLayout
from rolemesh.engine.transport.slots.shm_directory import SHM_DIRECTORY
from rolemesh.engine.weights.exchanges.publication_memory import PublicationMemory
from rolemesh.engine.weights.exchanges.published import Publication
from rolemesh.rpc.channel import CHUNK_BYTES
from rolemesh.rpc.errors import InvalidRequestError, OutOfRangeError, PreconditionError
from rolemesh.rpc.experience.payload_stream import PayloadMalformedError, encode_chunk
from rolemesh.rpc.experience.pull import FETCH_WEIGHTS, receive
from rolemesh.services.runtime.experience.published_weights import (
    FetchedBoxes,
    PublishedWeights,
    answer_fetch,
    layout_of,
    manifest_of,
    reference_to,
    take_boxes,
)
from rolemesh.v1 import weights_pb2

HOST = "this host"
SHAPES = {"embed": (700, 600), "norm": (5,), "scalar-like": (1, 1)}
"""The first one takes two chunks in float32."""
BOXES = [
    ("embed", ((0, 700), (0, 600))),
    ("embed", ((10, 20), (599, 600))),
    ("norm", ((1, 4),)),
    ("scalar-like", ((0, 1), (0, 1))),
]


def layout() -> WeightLayout:
    manifest = {name: Parameter(shape, "float32") for name, shape in SHAPES.items()}
    return whole_layout(manifest).in_dtype("float32")


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def publish(*, shares_memory: bool = False, version: int = 3) -> Publication:
    memory = PublicationMemory() if shares_memory else None
    return Publication(layout(), 0, weights(), policy_version=version, memory=memory)


def request_for(host_id: str = "") -> weights_pb2.FetchWeightsRequest:
    request = weights_pb2.FetchWeightsRequest(run_id="run", policy_version=3, host_id=host_id)
    for parameter, box in BOXES:
        request.boxes.add(
            parameter=parameter,
            start=[start for start, _ in box],
            stop=[stop for _, stop in box],
        )
    return request


async def receive_boxes(
    messages: AsyncIterator[bytes], request: weights_pb2.FetchWeightsRequest, dtype: torch.dtype
) -> FetchedBoxes:
    take = functools.partial(take_boxes, request=request, dtype=dtype)

    async def no_rest(header: object, target: memoryview, start: int) -> int:
        raise AssertionError(f"bytes from {start} on did not come")

    return await receive(messages, FETCH_WEIGHTS, request.host_id, take, no_rest)


async def exchange(publication: Publication, host_id: str) -> FetchedBoxes:
    request = request_for(host_id)
    return await receive_boxes(answer_fetch(publication, request, HOST), request, torch.float32)


@pytest.mark.parametrize(
    ("shares_memory", "host_id", "transport"),
    [
        (True, HOST, "shm"),
        (True, "another host", "grpc"),
        (False, HOST, "grpc"),
        (True, "", "grpc"),
    ],
)
async def test_boxes_arrive_whichever_way_they_travel(
    shares_memory: bool, host_id: str, transport: str
) -> None:
    found = await exchange(publish(shares_memory=shares_memory), host_id)
    assert found.transport == transport
    whole = weights()
    expected = [whole[name][tuple(slice(*ends) for ends in box)] for name, box in BOXES]
    assert all(torch.equal(a, b) for a, b in zip(found.boxes, expected, strict=True))
    assert found.num_bytes == sum(tensor.nbytes for tensor in expected)


async def test_one_box_is_not_sent_many_times() -> None:
    request = request_for()
    request.boxes.extend([request.boxes[0]] * 2)
    with pytest.raises(InvalidRequestError, match=r"boxes is 50\d* bytes, more than the limit"):
        await receive_boxes(answer_fetch(publish(), request, HOST), request, torch.float32)


async def test_chunks_are_full_but_for_the_last() -> None:
    messages = [part async for part in answer_fetch(publish(), request_for(), HOST)]
    sizes = [len(weights_pb2.FetchWeightsResponse.FromString(m).chunk) for m in messages[1:]]
    assert sizes[:-1] == [CHUNK_BYTES] * (len(sizes) - 1)
    assert 0 < sizes[-1] <= CHUNK_BYTES


async def chunks_of(start: int, stop: int) -> tuple[int, bytes]:
    """Where a part ends, and its bytes."""
    request = request_for()
    request.byte_start, request.byte_stop = start, stop
    head, *rest = [
        weights_pb2.FetchWeightsResponse.FromString(message)
        async for message in answer_fetch(publish(), request, HOST)
    ]
    assert head.header.total_bytes == NUM_BYTES
    return head.header.byte_stop, b"".join(message.chunk for message in rest)


async def test_parts_of_boxes_are_their_bytes_wherever_they_are_cut() -> None:
    _, whole = await chunks_of(0, 0)
    embed = 4 * 700 * 600
    edges = [0, 1, CHUNK_BYTES + 3, embed - 2, embed, embed + 38, NUM_BYTES - 1, NUM_BYTES]
    for start, stop in itertools.combinations(edges, 2):
        assert await chunks_of(start, stop) == (stop, whole[start:stop]), (start, stop)
    assert await chunks_of(embed, 2 * NUM_BYTES) == (NUM_BYTES, whole[embed:])
    with pytest.raises(OutOfRangeError):
        await chunks_of(NUM_BYTES + 1, 0)


async def answer_of(*messages: bytes) -> AsyncIterator[bytes]:
    for message in messages:
        yield message


def header(**fields: Any) -> bytes:
    described = weights_pb2.FetchWeightsHeader(**fields)
    return weights_pb2.FetchWeightsResponse(header=described).SerializeToString()


NUM_BYTES = 4 * (700 * 600 + 10 + 3 + 1)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "does not begin with a header"),
        ([encode_chunk([b"abcd"])], "does not begin with a header"),
        ([b"\xff\xff"], "cannot be read"),
        ([header(total_bytes=NUM_BYTES - 4)], "are announced"),
        ([header(total_bytes=NUM_BYTES), encode_chunk([b"abcd"])], "only 4 arrived"),
        ([header(total_bytes=NUM_BYTES), header(total_bytes=NUM_BYTES)], "not a chunk"),
        ([header(total_bytes=NUM_BYTES), encode_chunk([bytes(NUM_BYTES + 1)])], "arrived"),
    ],
    ids=["empty", "no-header", "noise", "other-size", "short", "two-headers", "long"],
)
async def test_answers_that_do_not_fit_are_refused(messages: list[bytes], words: str) -> None:
    with pytest.raises(PayloadMalformedError, match=words):
        await receive_boxes(answer_of(*messages), request_for(), torch.float32)


def outside(described: weights_pb2.FetchWeightsHeader) -> None:
    described.shared_memory_path = "/etc/passwd"


def too_few(described: weights_pb2.FetchWeightsHeader) -> None:
    del described.tensors[-1]


def beyond(described: weights_pb2.FetchWeightsHeader) -> None:
    described.tensors[0].offset += 1 << 30


def negative(described: weights_pb2.FetchWeightsHeader) -> None:
    described.tensors[0].offset = -64


def crooked(described: weights_pb2.FetchWeightsHeader) -> None:
    described.tensors[2].offset += 2


def elsewhere(described: weights_pb2.FetchWeightsHeader) -> None:
    described.tensors[2].start[0] = 2


def flat(described: weights_pb2.FetchWeightsHeader) -> None:
    del described.tensors[0].start[1]


@pytest.mark.parametrize(
    "change",
    [outside, too_few, beyond, negative, crooked, elsewhere, flat],
    ids=lambda f: f.__name__,
)
async def test_segments_that_do_not_hold_the_boxes_are_refused(
    change: Callable[[weights_pb2.FetchWeightsHeader], None],
) -> None:
    publication, request = publish(shares_memory=True), request_for(HOST)
    (message,) = [part async for part in answer_fetch(publication, request, HOST)]
    response = weights_pb2.FetchWeightsResponse.FromString(message)
    change(response.header)
    with pytest.raises(PayloadMalformedError, match=r"shared memory|does not hold the box"):
        await receive_boxes(answer_of(response.SerializeToString()), request, torch.float32)


async def test_shared_memory_that_was_not_offered_is_refused() -> None:
    (message,) = [
        part async for part in answer_fetch(publish(shares_memory=True), request_for(HOST), HOST)
    ]
    with pytest.raises(PayloadMalformedError, match="not offered"):
        await receive_boxes(answer_of(message), request_for(""), torch.float32)


async def test_a_publication_that_is_gone_by_now_shows_as_an_os_error() -> None:
    publication, request = publish(shares_memory=True), request_for(HOST)
    (message,) = [part async for part in answer_fetch(publication, request, HOST)]
    publication.close()
    with pytest.raises(FileNotFoundError):
        await receive_boxes(answer_of(message), request, torch.float32)


def test_one_version_of_one_run_is_published() -> None:
    published = PublishedWeights()
    with pytest.raises(PreconditionError, match="nothing of it is published"):
        published.get("run", 3)
    first, second = publish(shares_memory=True), publish(shares_memory=True, version=4)
    assert first.segment is not None
    assert second.segment is not None
    paths = [SHM_DIRECTORY / one.segment.name for one in (first, second)]
    published.put("run", first)
    assert published.get("run", 3) is first
    published.put("run", second)
    for run, version in (("run", 3), ("another run", 4)):
        with pytest.raises(PreconditionError) as caught:
            published.get(run, version)
        assert caught.value.reason == "WEIGHTS_GONE"
    assert [path.exists() for path in paths] == [False, True]
    published.close()
    assert [path.exists() for path in paths] == [False, False]


def test_a_reference_says_what_is_published_and_where() -> None:
    train = TrainLayout(tp=2, dp=2, fsdp=1, order="tp-dp-pp")
    addresses = [f"host:{port}" for port in range(4)]
    ref = reference_to(publish(), "run", train, addresses)
    assert layout_of(ref) == train
    assert manifest_of(ref) == layout().manifest
    assert list(ref.addresses) == addresses
    del ref.addresses[3]
    with pytest.raises(InvalidRequestError, match="3 entries, but the layout has 4 ranks"):
        layout_of(ref)
