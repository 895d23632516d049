"""The HTTP server of a coordinator."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI

from rolemesh.engine.specs.urls import is_loopback
from rolemesh.rpc.http.server import STUCK_READER_S, HttpServer, serve_app
from rolemesh.rpc.limits import REQUEST_HEAD_S


async def serve_http(
    app: FastAPI,
    host: str,
    port: int,
    *,
    certificate: Path | None = None,
    stuck_reader_s: float = STUCK_READER_S,
    head_s: float = REQUEST_HEAD_S,
) -> tuple[HttpServer, int]:
    """Starts serving an app of make_app on the running loop; see `serve_app`.

    Its host must be one of loopback, unless the app asks for a token of its owner's. Streams of
    events end at once when it stops.
    """

    def check(address: str) -> None:
        if app.state.needs_loopback and not is_loopback(address):
            raise ValueError(
                f"host {host} can be reached from elsewhere, and without a token other "
                "machines could start and stop runs: configure a token, or bind to 127.0.0.1"
            )

    return await serve_app(
        app,
        host,
        port,
        certificate=certificate,
        check_address=check,
        on_stop=app.state.streams.close,
        stuck_reader_s=stuck_reader_s,
        head_s=head_s,
    )
