"""Messages between a service and worker processes that run code of users.

A frame is four bytes, big-endian, with the length of the JSON object after them. A worker runs code
of the user, so its messages are checked like all data from outside.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from typing import Any

HEADER = struct.Struct(">I")

MAX_CALL_BYTES = 256 << 20
"""Largest frame to a worker: a batch of rows."""

MAX_ANSWER_BYTES = 8 << 20
"""Largest frame from a worker: numbers, metrics and a traceback."""


def encode(message: dict[str, Any], max_bytes: int) -> bytes:
    """The message as a frame.

    Raises:
        ValueError: It needs more than `max_bytes`, or holds a value that JSON lacks, such as NaN.
    """
    try:
        body = json.dumps(message, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"a message cannot be written as JSON: {error}") from error
    if len(body) > max_bytes:
        raise ValueError(f"a message has {len(body)} bytes, more than {max_bytes}")
    return HEADER.pack(len(body)) + body


def body_length(header: bytes, max_bytes: int) -> int:
    """Length of the object after this header; ValueError when it is more than `max_bytes`."""
    (length,) = HEADER.unpack(header)
    if length > max_bytes:
        raise ValueError(f"a message announces {length} bytes, more than {max_bytes}")
    return int(length)


def decode(body: bytes) -> dict[str, Any]:
    """The object of a frame.

    Raises:
        ValueError: It is no JSON object, or holds NaN or an infinity.
    """
    try:
        message = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"a message is no JSON: {error}") from error
    if not isinstance(message, dict):
        raise ValueError(f"a message is a {type(message).__name__}, not an object")
    return message


def read(
    connection: socket.socket, max_bytes: int, *, deadline: float | None = None
) -> dict[str, Any] | None:
    """Waits for the next message; None if the other end has closed between two messages.

    Args:
        connection: Of a service and a worker.
        max_bytes: Most bytes of the object.
        deadline: When all of it must be there, as `time.monotonic()` counts; None: it waits
            without end.

    Raises:
        TimeoutError: It was not there in time.
        ValueError: It is no message, or ends too early.
    """
    header = _read_bytes(connection, HEADER.size, deadline)
    if not header:
        return None
    if len(header) < HEADER.size:
        raise ValueError("a message ends within its header")
    return decode(_read_bytes(connection, body_length(header, max_bytes), deadline))


def _read_bytes(connection: socket.socket, count: int, deadline: float | None) -> bytes:
    data = bytearray()
    while len(data) < count:
        if deadline is not None:
            # A time-out of the socket is one of each part; many small ones must not add up.
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("a message did not come in time")
            connection.settimeout(left_s)
        part = connection.recv(min(count - len(data), 1 << 20))
        if not part:
            break
        data += part
    return bytes(data)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")
