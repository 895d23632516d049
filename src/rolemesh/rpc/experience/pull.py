"""Bytes pulled from the rank that holds them: shared memory where both ends have it, else chunks.

The consumer says on which host it runs. A producer of the same host may answer with the name of a
shared memory segment; otherwise chunks follow its header. A consumer that cannot open the segment
asks once more, without a host, and gets the chunks.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from rolemesh.rpc.channel import MeshChannel
from rolemesh.rpc.errors import RolemeshError
from rolemesh.rpc.experience.payload_stream import (
    PayloadMalformedError,
    collect_chunks,
    decode_part,
)
from rolemesh.rpc.together import together
from rolemesh.v1 import experience_pb2, weights_pb2

logger = logging.getLogger(__name__)

GRPC = "grpc"
"""Name of the way of bytes that came over one connection."""

FIRST_PART_BYTES = 4 << 20
"""What is asked for first. The rest is asked for when its size is known, and that no memory is
shared: over several connections where it is large."""

LEAST_PART_BYTES = 8 << 20
"""Each connection but the first brings so much, or is not opened."""

MAX_CONNECTIONS = 8
"""Of one pull."""

Header = TypeVar("Header", experience_pb2.PayloadHeader, weights_pb2.FetchWeightsHeader)
Result = TypeVar("Result")


def grpc_over(connections: int) -> str:
    """Name of the way of bytes that came over so many connections."""
    return GRPC if connections == 1 else f"{GRPC}_{connections}"


@dataclass(frozen=True, slots=True)
class PullMethod(Generic[Header]):
    """A method that is answered with a header, and then with chunks unless memory is shared."""

    name: str
    """Full name."""
    response: type[Message]
    """Type of its answer's messages."""
    segment_of: Callable[[Header], str | None]
    """What a header says of shared memory; None when chunks follow."""
    size_of: Callable[[Header], int]
    """Bytes that a header announces."""


FETCH: PullMethod[experience_pb2.PayloadHeader] = PullMethod(
    "/rolemesh.v1.ExperienceService/Fetch",
    experience_pb2.FetchResponse,
    lambda header: header.shared_memory_name if header.HasField("shared_memory_name") else None,
    lambda header: header.num_bytes,
)
"""Columns of experience."""

FETCH_WEIGHTS: PullMethod[weights_pb2.FetchWeightsHeader] = PullMethod(
    "/rolemesh.v1.WeightsService/FetchWeights",
    weights_pb2.FetchWeightsResponse,
    lambda header: header.shared_memory_path or None,
    lambda header: header.total_bytes,
)
"""Boxes of published weights."""


@dataclass(frozen=True, slots=True)
class Answer(Generic[Header]):
    """An answer whose header has come. Owner: one pull."""

    header: Header
    """Not yet checked."""
    segment: str | None
    """Shared memory that has the bytes, if this side offered to map it; None: chunks follow."""
    read_into: Callable[[bytearray | memoryview], Awaitable[str]]
    """Fills as many bytes as the header announces; raises PayloadMalformedError if others come.
    Returns how they came: GRPC, or `grpc_over` several connections."""


async def pull(
    channel: MeshChannel,
    method: PullMethod[Header],
    request: Any,
    take: Callable[[Answer[Header]], Awaitable[Result]],
    *,
    peer: str,
    metadata: Mapping[str, str],
    timeout_s: float | None = None,
) -> Result:
    """What `take` makes of a producer's answer.

    Args:
        channel: To the producer.
        method: What is asked.
        request: With the host_id of this side; an empty one refuses shared memory. It is emptied
            when shared memory fails.
        take: Checks the header, then maps the segment or has the chunks read. It may be called a
            second time, after it raised OSError: The segment could not be opened.
        peer: The producer and what is pulled from it, for messages.
        metadata: The same for programs.
        timeout_s: Longest time of a call; None: the method's.

    Raises:
        RolemeshError: What the producer answered, or UnavailableError when it does not answer or
            leaves half-way; names it.
        PayloadMalformedError: The bytes do not fit their description, or it does not fit the
            request; names the producer.
        OSError: Shared memory failed though none was offered.
    """

    @contextlib.contextmanager
    def stream(over: MeshChannel, part: Any) -> Iterator[AsyncIterator[bytes]]:
        call = over.unary_stream(
            method.name,
            request_serializer=type(part).SerializeToString,
            response_deserializer=None,
        )(part, timeout=timeout_s)
        try:
            yield aiter(call)
        finally:
            call.cancel()

    async def read_part(over: MeshChannel, first: Header, target: memoryview, start: int) -> None:
        part = type(request)()
        part.CopyFrom(request)
        part.host_id, part.byte_start, part.byte_stop = "", start, start + len(target)
        with stream(over, part) as messages:
            header = await _header(messages, method)
            wanted = (part.byte_stop, method.size_of(first))
            came = (header.byte_stop, method.size_of(header))
            if came != wanted:
                raise PayloadMalformedError(
                    f"bytes {start} to {wanted[0]} of {wanted[1]} were asked for, but those up to "
                    f"{came[0]} of {came[1]} came"
                )
            await collect_chunks(messages, method.response, target)

    async def read_rest(first: Header, rest: memoryview, start: int) -> int:
        """Reads what follows the first part, over several connections."""
        number = min(MAX_CONNECTIONS, -(-len(rest) // LEAST_PART_BYTES))
        channels = channel.connections(number)
        part_bytes = -(-len(rest) // len(channels))
        begins = range(0, len(rest), part_bytes)
        # There may be fewer parts than connections, never more.
        await together(
            read_part(over, first, rest[at : at + part_bytes], start + at)
            for over, at in zip(channels, begins, strict=False)
        )
        return len(begins)

    async def ask() -> Result:
        request.byte_stop = FIRST_PART_BYTES
        with stream(channel, request) as messages:
            return await receive(messages, method, request.host_id, take, read_rest)

    try:
        try:
            return await ask()
        except OSError as error:
            if not request.host_id:
                raise
            # The segment could not be opened; the peer may still send the bytes, or say why not.
            logger.warning("%s: shared memory failed (%s): asking for a stream", peer, error)
            request.host_id = ""
            return await ask()
    except RolemeshError as error:
        raise type(error)(
            f"{peer}: {error.message}",
            reason=error.reason,
            retryable=error.retryable,
            metadata={**error.metadata, **metadata},
            remote_traceback=error.remote_traceback,
        ) from error
    except ValueError as error:
        raise PayloadMalformedError(f"{peer}: {error}") from error


async def receive(
    messages: AsyncIterator[bytes],
    method: PullMethod[Header],
    host_id: str,
    take: Callable[[Answer[Header]], Awaitable[Result]],
    read_rest: Callable[[Header, memoryview, int], Awaitable[int]],
) -> Result:
    """Reads one answer; see `pull`.

    Args:
        messages: Of the stream, serialized.
        method: What was asked.
        host_id: As in the request.
        take: Makes the result.
        read_rest: Fills what these messages do not bring, given the header, where it goes and its
            first byte; returns the number of connections.

    Raises:
        PayloadMalformedError: The bytes do not fit their description or the request.
        OSError: The shared memory that is named cannot be opened.
    """
    header = await _header(messages, method)
    segment = method.segment_of(header)
    if segment is not None and not host_id:
        raise PayloadMalformedError("the answer names shared memory, which was not offered")

    async def read_into(target: bytearray | memoryview) -> str:
        whole = memoryview(target).cast("B")
        stop, number = header.byte_stop or len(whole), 1

        async def read_own() -> None:
            await collect_chunks(messages, method.response, whole[:stop])

        async def read_others() -> None:
            nonlocal number
            if stop < len(whole):
                number = await read_rest(header, whole[stop:], stop)

        if stop < 0:
            raise PayloadMalformedError(f"a part is said to end at byte {stop}")
        await together((read_own(), read_others()))
        return grpc_over(number)

    return await take(Answer(header, segment, read_into))


async def _header(messages: AsyncIterator[bytes], method: PullMethod[Header]) -> Header:
    first = await anext(messages, None)
    header = None if first is None else decode_part(first, method.response)
    if header is None or isinstance(header, memoryview):
        raise PayloadMalformedError("the stream does not begin with a header")
    found: Header = header
    return found


# --- rows of experience ---------------------------------------------------------------------


def fetch_request(
    shard: experience_pb2.Shard, columns: Sequence[str], rows: Sequence[int], host_id: str = ""
) -> experience_pb2.FetchRequest:
    """Asks for columns of rows of a shard.

    Args:
        shard: What to read from.
        columns: Names, at least one.
        rows: Counted inside the shard, in the order wanted; a range of neighbours is asked for as
            one.
        host_id: Identity of this host; an empty one refuses shared memory.
    """
    request = experience_pb2.FetchRequest(
        experience_id=shard.experience_id, columns=columns, host_id=host_id
    )
    if isinstance(rows, range) and rows.step == 1:
        request.row_start, request.row_stop = rows.start, rows.stop
    else:
        request.rows.extend(rows)
    return request


async def pull_rows(
    channel: MeshChannel,
    shard: experience_pb2.Shard,
    request: experience_pb2.FetchRequest,
    take: Callable[[Answer[experience_pb2.PayloadHeader]], Awaitable[Result]],
    *,
    timeout_s: float | None = None,
) -> Result:
    """Pulls rows of a shard from the rank that holds them; see `pull`."""
    return await pull(
        channel,
        FETCH,
        request,
        take,
        peer=f"{shard.role} rank {shard.rank} at {shard.address}, fetch of {[*request.columns]}",
        metadata={
            "peer": shard.address,
            "peer_role": shard.role,
            "peer_rank": str(shard.rank),
        },
        timeout_s=timeout_s,
    )
