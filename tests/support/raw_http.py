"""HTTP/1.1 over plain connections: a tenth of the time of a client that checks what it sends."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import urlsplit


class Answer(NamedTuple):
    """What came back."""

    status: int
    headers: Mapping[str, str]
    """Names in small letters."""
    body: bytes
    """Empty for a stream of events, of which only the head is read."""


@dataclass
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    is_used: bool = False


class RawHttp:
    """A server that is asked over connections that stay open.

    Owner: one asyncio loop. Requests that are made at the same time have a connection each.
    """

    def __init__(self, url: str, patience_s: float) -> None:
        """`url` is that of the server, e.g. http://127.0.0.1:8000."""
        parts = urlsplit(url)
        self._host, self._port = str(parts.hostname), int(parts.port or 80)
        self._patience_s = patience_s
        self._idle: list[_Connection] = []

    async def ask(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes = b""
    ) -> Answer:
        """Sends a request as it is.

        Raises:
            TimeoutError: There is no answer in time.
            ConnectionError: The server closed the connection without one.
        """
        lines = [f"{method} {target} HTTP/1.1", f"host: {self._host}:{self._port}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        lines.append(f"content-length: {len(body)}")
        data = "\r\n".join([*lines, "", ""]).encode() + body
        async with asyncio.timeout(self._patience_s):
            while True:
                connection = self._idle.pop() if self._idle else await self._open()
                try:
                    return await self._exchange(connection, data)
                except (asyncio.IncompleteReadError, ConnectionError) as error:
                    connection.writer.close()
                    # A server may close what is idle just when the next request comes.
                    if not connection.is_used:
                        raise ConnectionError("closed without an answer") from error

    def close(self) -> None:
        """Closes what is open."""
        for connection in self._idle:
            connection.writer.close()

    async def _open(self) -> _Connection:
        # A head of 64 KiB, of which most is never used.
        return _Connection(*await asyncio.open_connection(self._host, self._port, limit=1 << 16))

    async def _exchange(self, connection: _Connection, data: bytes) -> Answer:
        # Not drained: a server may answer, and close, before it has read a large body.
        connection.writer.write(data)
        head = (await connection.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in head[1:-2])
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        status = int(head[0].split(" ", 2)[1])
        if headers.get("content-type", "").startswith("text/event-stream"):
            connection.writer.close()
            return Answer(status, headers, b"")
        if headers.get("transfer-encoding") == "chunked":
            body = await _chunks(connection.reader)
        else:
            body = await connection.reader.readexactly(int(headers.get("content-length", 0)))
        if headers.get("connection") == "close":
            connection.writer.close()
        else:
            connection.is_used = True
            self._idle.append(connection)
        return Answer(status, headers, body)


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readuntil(b"\r\n")
    return body
