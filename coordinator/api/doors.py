"""The two doors of a coordinator: gRPC, and REST with the dashboard, over the same operations."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rolemesh.coordinator.api.coordinator_service import serve_coordinator
from rolemesh.coordinator.api.credentials import check_exposure
from rolemesh.coordinator.api.store_operations import StoreOperations

_GRACE_S = 1.0
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Address at which this machine reaches a server that listens on all addresses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Doors:
    """Addresses of a coordinator, as seen from this machine."""

    address: str
    """"host:port" of CoordinatorService."""
    url: str | None
    """URL of REST and the dashboard; None where they are not served."""


@asynccontextmanager
async def open_doors(
    operations: StoreOperations,
    *,
    host: str,
    grpc_port: int,
    http_port: int | None,
    token: str | None,
) -> AsyncIterator[Doors]:
    """Serves gRPC and REST until the end of the block.

    Args:
        operations: The operations that both serve.
        host: Address to bind.
        grpc_port: Port of CoordinatorService; 0 takes a free one.
        http_port: Port of REST and the dashboard; 0 takes a free one, None serves neither.
        token: Token that callers have to show; None lets every user of this machine in.

    Raises:
        ValueError: A port is in use, or others could ask without a token.
    """
    check_exposure(host, token)
    shown = _ANYWHERE.get(host, host)
    bracketed = f"[{shown}]" if ":" in shown else shown
    server, port = await serve_coordinator(operations, host=host, port=grpc_port, token=token)
    try:
        address = f"{bracketed}:{port}"
        if http_port is None:
            yield Doors(address=address, url=None)
            return
        # FastAPI takes a third of a second to import, which no other command has to wait for.
        from rolemesh.coordinator.api.http.app import make_app
        from rolemesh.coordinator.api.http.server import serve_http

        web, web_port = await serve_http(make_app(operations, token=token), host, http_port)
        try:
            yield Doors(address=address, url=f"http://{bracketed}:{web_port}/")
        finally:
            await web.stop()
    finally:
        await server.stop(_GRACE_S)
