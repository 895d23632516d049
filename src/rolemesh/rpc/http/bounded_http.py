"""HTTP servers that wait so long for a head and leave signals alone; uvicorn's own do neither."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol


class QuietServer(uvicorn.Server):
    """uvicorn on the loop of a process that handles its signals itself."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves the handlers as they are."""
        yield


def bounded_protocol(head_s: float) -> type[H11Protocol]:
    """The protocol of a server that closes silent connections.

    Args:
        head_s: A connection on which no whole head of a request has come for so long, since it was
            made or since its last answer, is closed.
    """

    class BoundedProtocol(H11Protocol):
        _waiting: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._await_head()

        def connection_lost(self, exc: Exception | None) -> None:
            if self._waiting is not None:
                self._waiting.cancel()
            super().connection_lost(exc)

        def on_response_complete(self) -> None:
            # First: the next request may be here already, and is begun by the call below.
            self._await_head()
            super().on_response_complete()

        def _await_head(self) -> None:
            if self._waiting is not None:
                self._waiting.cancel()
            self._waiting = self.loop.call_later(head_s, self._give_up)

        def _give_up(self) -> None:
            if self.cycle is None:
                # Nothing was sent that could be lost; over TLS, `close` would wait for a goodbye.
                self.transport.abort()
            elif self.cycle.response_complete:
                self.timeout_keep_alive_handler()
            # Else a request is in progress, e.g. a stream of events; its end starts a new wait.

    return BoundedProtocol
