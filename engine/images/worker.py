"""A process that decodes images, and can do nothing else.

Used as `python -m rolemesh.engine.images.worker SOCKET PARENT_PID`. The first message is a frame of
JSON (`sandbox.frames`) with the process's limits. From then on bytes go to and fro: a header (what
it is, how many bytes follow), and those bytes. Nothing that comes out of here is ever executed or
unpickled.
"""

from __future__ import annotations

import socket
import struct
import sys
from typing import Any

from rolemesh.engine.sandbox.inside import begin

HEADER = struct.Struct(">cQ")
"""What it is, and the number of bytes that follow."""
SIZE = struct.Struct(">II")
"""Width and height in pixels."""

ASKS_SIZE, ASKS_PIXELS = b"s", b"p"
"""What is asked of the image whose bytes follow."""
GIVES_SIZE, GIVES_PIXELS, REFUSES = b"S", b"P", b"E"
"""Followed by SIZE; by SIZE and the pixels; by a text that says what is wrong with the image."""

MAX_REFUSAL_BYTES = 2048


def main(arguments: list[str]) -> int:
    """Serves one reader over the socket that it inherits, until the other end closes."""
    connection, order = begin(arguments)
    if order is None:
        return 0
    # Not before: a library may start threads when it is imported, outside of the sandbox.
    from rolemesh.engine.images.pixels import rgb_of, size_of
    from rolemesh.engine.images.prompt_images import ImageInvalidError

    max_pixels = int(order["max_pixels"])
    connection.sendall(HEADER.pack(GIVES_SIZE, 0))
    while (asked := _read(connection, HEADER.size)) is not None:
        kind, length = HEADER.unpack(asked)
        data = _read(connection, length)
        if data is None:
            break
        parts: list[Any]
        try:
            if kind == ASKS_SIZE:
                parts = [GIVES_SIZE, SIZE.pack(*size_of(data, max_pixels))]
            else:
                width, height, pixels = rgb_of(data, max_pixels)
                parts = [GIVES_PIXELS, SIZE.pack(width, height), pixels]
        except ImageInvalidError as error:
            parts = [REFUSES, str(error).encode()[:MAX_REFUSAL_BYTES]]
        except MemoryError:
            parts = [REFUSES, b"takes more memory than its pixels may: make it smaller"]
        what, *rest = parts
        connection.sendall(HEADER.pack(what, sum(map(len, rest))))
        for part in rest:
            connection.sendall(part)
    return 0


def _read(connection: socket.socket, count: int) -> bytes | None:
    """So many bytes; None where the other end has closed."""
    data = bytearray()
    while len(data) < count:
        part = connection.recv(min(count - len(data), 1 << 20))
        if not part:
            return None
        data += part
    return bytes(data)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
