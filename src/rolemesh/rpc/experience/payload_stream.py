"""Streams of bytes on the wire, made and read by hand: of Fetch, FetchWeights and Put.

Protobuf copies `bytes` fields on the way in and again at each access; at GB/s that halves the
rate. These functions write and read the same bytes as the generated class: a chunk message is the
tag of field 2, the length as a varint, and the payload bytes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from google.protobuf.message import Message

from rolemesh.v1 import experience_pb2

_CHUNK_FIELD = experience_pb2.FetchResponse.CHUNK_FIELD_NUMBER
_LENGTH_DELIMITED = 2
_CHUNK_TAG = (_CHUNK_FIELD << 3) | _LENGTH_DELIMITED
_MAX_VARINT_BYTES = 10


class PayloadMalformedError(ValueError):
    """The bytes of a payload do not fit its description."""


def encode_header(header: experience_pb2.PayloadHeader) -> bytes:
    """The serialized first message of a fetch."""
    return experience_pb2.FetchResponse(header=header).SerializeToString()


def encode_chunk(pieces: Sequence[memoryview | bytes]) -> bytes:
    """The serialized message of one chunk: the pieces, concatenated with a single copy."""
    length = sum(len(piece) for piece in pieces)
    return b"".join((bytes((_CHUNK_TAG, *_varint(length))), *pieces))


def decode_part(message: bytes, stream: type[Message]) -> Any:
    """A view of a chunk's payload inside the message, or the message that comes before all chunks.

    Args:
        message: Serialized.
        stream: Type of the stream's messages: a oneof `part`, whose field 2 is `chunk`.

    Returns:
        A memoryview; or the header of a FetchResponse or FetchWeightsResponse, or the opening of
        a PutRequest.

    Raises:
        PayloadMalformedError: The message is neither.
    """
    chunk = _chunk_in(message)
    if chunk is not None:
        return chunk
    # The first message, or a chunk that some other writer encoded with more than that one field.
    try:
        read: Any = stream.FromString(message)
    except Exception as error:  # protobuf raises DecodeError or, on some builds, ValueError
        raise PayloadMalformedError(
            f"a message of {len(message)} bytes cannot be read: it is no "
            f"{stream.DESCRIPTOR.name}: {error}"
        ) from error
    part = read.WhichOneof("part")
    if part is None:
        raise PayloadMalformedError(
            f"a message of {len(message)} bytes holds neither a header nor a chunk"
        )
    return memoryview(read.chunk) if part == "chunk" else getattr(read, part)


def _chunk_in(message: bytes) -> memoryview | None:
    """A view of the payload inside a message that is a chunk and nothing else; otherwise None."""
    if message and message[0] == _CHUNK_TAG:
        length, at = _read_varint(message, 1)
        if at + length == len(message):
            return memoryview(message)[at:]
    return None


async def collect_chunks(
    messages: AsyncIterator[bytes], stream: type[Message], target: bytearray | memoryview
) -> None:
    """Fills one preallocated run of bytes with the chunks that follow a stream's first message.

    Args:
        messages: The rest of the stream, serialized.
        stream: Type of its messages; see decode_part.
        target: As long as was announced.

    Raises:
        PayloadMalformedError: The chunks hold more or fewer bytes, or something else comes.
    """
    whole, filled = memoryview(target).cast("B"), 0
    announced = f"the payload was announced with {len(whole)} bytes"
    async for message in messages:
        chunk = decode_part(message, stream)
        if not isinstance(chunk, memoryview):
            raise PayloadMalformedError("the stream holds a second header, which is not a chunk")
        stop = filled + len(chunk)
        if stop > len(whole):
            raise PayloadMalformedError(f"{announced}, but {stop} arrived")
        whole[filled:stop] = chunk
        filled = stop
    if filled != len(whole):
        raise PayloadMalformedError(f"{announced}, but only {filled} arrived")


def _varint(value: int) -> list[int]:
    encoded = []
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return encoded


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for index in range(_MAX_VARINT_BYTES):
        if at + index >= len(message):
            break
        byte = message[at + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, at + index + 1
    raise PayloadMalformedError(f"a fetch message of {len(message)} bytes has a torn length")
