"""A TCP proxy that can be cut: connections end midway, answers get lost, or nothing passes."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path


class TcpProxy:
    """Passes bytes on to a port or a socket of this host, until it is told otherwise.

    Owner: its loop.
    """

    def __init__(self, target: int | Path) -> None:
        self.target = target
        self.num_connections = 0
        self.answers_to_lose = 0
        """So many answers end their connection instead of passing."""
        self._passes = asyncio.Event()
        self._passes.set()
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._pipes: set[asyncio.Task[None]] = set()
        self.port = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listens; after a cut on the same port as before."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        """Ends all connections at once, and refuses new ones until `start`."""
        assert self._server is not None
        self._server.close()
        for writer in list(self._open):
            writer.transport.abort()
        for pipe in list(self._pipes):
            pipe.cancel()
        await asyncio.gather(*self._pipes, return_exceptions=True)

    def stall(self) -> None:
        """Holds all connections, also new ones, but passes nothing any more."""
        self._passes.clear()

    def resume(self) -> None:
        """Passes what was held."""
        self._passes.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            far_reader, far_writer = await (
                asyncio.open_connection("127.0.0.1", self.target)
                if isinstance(self.target, int)
                else asyncio.open_unix_connection(self.target)
            )
        except OSError:
            writer.close()
            return
        self._open |= {writer, far_writer}
        for source, target, is_answer in (
            (reader, far_writer, False),
            (far_reader, writer, True),
        ):
            pipe = asyncio.create_task(self._pass_on(source, target, is_answer))
            self._pipes.add(pipe)
            pipe.add_done_callback(self._pipes.discard)

    async def _pass_on(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, is_answer: bool
    ) -> None:
        with suppress(OSError):
            while data := await source.read(1 << 16):
                await self._passes.wait()
                if is_answer and self.answers_to_lose:
                    self.answers_to_lose -= 1
                    break
                target.write(data)
                await target.drain()
        target.close()
        self._open.discard(target)
