"""uvicorn on a loop that is already running, ended by its owner and not by signals."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from rolemesh.coordinator.api.http.events import EventStreams
from rolemesh.coordinator.api.http.tls import tls_context
from rolemesh.engine.specs.urls import is_loopback
from rolemesh.rpc.bounded_http import QuietServer, bounded_protocol
from rolemesh.rpc.limits import MAX_CONNECTIONS, REQUEST_HEAD_S

STOP_S = 5.0
"""How long requests in progress may take when the server stops."""

STUCK_READER_S = 60.0
"""A connection whose other end reads nothing for this long is closed."""


class HttpServer:
    """A server that runs.

    Owner: the loop that serve_http was called on.
    """

    def __init__(
        self, server: QuietServer, serving: asyncio.Task[None], streams: EventStreams
    ) -> None:
        self._server = server
        self._serving = serving
        self._streams = streams

    async def stop(self) -> None:
        """Ends event streams at once and other requests within STOP_S; idempotent."""
        self._streams.close()
        self._server.should_exit = True
        await self._serving
        # Clients that never read their answer would keep their sockets until the process ends.
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()


async def serve_http(
    app: FastAPI,
    host: str,
    port: int,
    *,
    certificate: Path | None = None,
    stuck_reader_s: float = STUCK_READER_S,
    head_s: float = REQUEST_HEAD_S,
) -> tuple[HttpServer, int]:
    """Starts serving an app of make_app on the running loop.

    Args:
        app: An app made by make_app.
        host: Name or address to bind; of loopback, unless the app asks for a token of its owner's.
        port: Port to bind; 0 takes a free one.
        certificate: File of read_certificate, to speak TLS; None: in clear.
        stuck_reader_s: A connection whose other end reads nothing for this long is closed.
        head_s: A connection on which no whole head of a request has come for so long is closed.

    Returns:
        The started server, and its port.

    Raises:
        ValueError: The address cannot be bound, e.g. since the port is in use; or it can be reached
            from elsewhere, and the app asks for no token of its owner's; or the certificate cannot
            be used.
    """
    config = uvicorn.Config(
        app,
        # The answer must not depend on which other packages are installed.
        http=bounded_protocol(head_s),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=int(STOP_S),
    )
    config.load()
    config.ssl = None if certificate is None else tls_context(certificate)
    listener = _bind(host, port, stuck_reader_s, needs_loopback=app.state.needs_loopback)
    server = QuietServer(config)
    serving = asyncio.create_task(server.serve([listener]))
    while not server.started:
        await asyncio.wait((serving,), timeout=0.005)
        if serving.done():
            listener.close()
            await serving
            raise AssertionError("uvicorn ended before it was stopped")
    bound: int = listener.getsockname()[1]
    return HttpServer(server, serving, app.state.streams), bound


def _bind(host: str, port: int, stuck_reader_s: float, *, needs_loopback: bool) -> socket.socket:
    listener: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        if needs_loopback and not is_loopback(str(address[0])):
            raise ValueError(
                f"host {host} can be reached from elsewhere, and without a token other "
                "machines could start and stop runs: configure a token, or bind to 127.0.0.1"
            )
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit both settings from the listening socket. The connection of a peer that
        # is gone, or reads nothing, then ends, and all that it held here is freed.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            listener.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stuck_reader_s * 1000)
            )
        listener.bind(address)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise ValueError(
            f"port {port} on {host} cannot be bound ({error}): choose another one, or 0 for any"
        ) from error
    listener.setblocking(False)
    return listener
