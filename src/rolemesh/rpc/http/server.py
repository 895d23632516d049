"""HTTP servers on a loop that is already running, ended by their owner and not by signals."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn

from rolemesh.rpc.http.bounded_http import QuietServer, bounded_protocol
from rolemesh.rpc.http.tls import tls_context
from rolemesh.rpc.limits import MAX_CONNECTIONS, REQUEST_HEAD_S

STOP_S = 5.0
"""How long requests in progress may take when the server stops."""

STUCK_READER_S = 60.0
"""A connection whose other end reads nothing for this long is closed."""


class HttpServer:
    """A server that runs. Owner: the loop that `serve_app` was called on."""

    def __init__(
        self, server: QuietServer, serving: asyncio.Task[None], on_stop: Callable[[], None] | None
    ) -> None:
        self._server = server
        self._serving = serving
        self._on_stop = on_stop

    async def stop(self) -> None:
        """Ends what lasts at once and other requests within STOP_S; idempotent."""
        if self._on_stop is not None:
            self._on_stop()
        self._server.should_exit = True
        await self._serving
        # Clients that never read their answer would keep their sockets until the process ends.
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()


async def serve_app(
    app: Any,
    host: str,
    port: int,
    *,
    certificate: Path | None = None,
    check_address: Callable[[str], None] | None = None,
    on_stop: Callable[[], None] | None = None,
    max_connections: int | None = None,
    stuck_reader_s: float = STUCK_READER_S,
    head_s: float = REQUEST_HEAD_S,
) -> tuple[HttpServer, int]:
    """Starts serving an ASGI app on the running loop.

    Args:
        app: The app.
        host: Name or address to bind.
        port: Port to bind; 0 takes a free one.
        certificate: File of read_certificate, to speak TLS; None: in clear.
        check_address: Is given the IP address of the host, and raises ValueError where it may not
            be bound; None: any may be.
        on_stop: Called when the server stops, to end answers that would go on.
        max_connections: Connections at once; more are refused. None: MAX_CONNECTIONS.
        stuck_reader_s: A connection whose other end reads nothing for this long is closed.
        head_s: A connection on which no whole head of a request has come for so long is closed.

    Returns:
        The started server, and its port.

    Raises:
        ValueError: The address cannot be bound, e.g. since the port is in use; or it can be reached
            from elsewhere, and may not be; or the certificate cannot be used.
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
        limit_concurrency=MAX_CONNECTIONS if max_connections is None else max_connections,
        timeout_graceful_shutdown=int(STOP_S),
    )
    config.load()
    config.ssl = None if certificate is None else tls_context(certificate)
    listener = _bind(host, port, stuck_reader_s, check_address)
    server = QuietServer(config)
    serving = asyncio.create_task(server.serve([listener]))
    while not server.started:
        await asyncio.wait((serving,), timeout=0.005)
        if serving.done():
            listener.close()
            await serving
            raise AssertionError("uvicorn ended before it was stopped")
    bound: int = listener.getsockname()[1]
    return HttpServer(server, serving, on_stop), bound


def _bind(
    host: str, port: int, stuck_reader_s: float, check_address: Callable[[str], None] | None
) -> socket.socket:
    listener: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        if check_address is not None:
            check_address(str(address[0]))
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
