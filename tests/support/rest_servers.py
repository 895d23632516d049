"""REST in tests: an app without sockets, and one behind uvicorn on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from rolemesh.coordinator.api.credentials import Tokens
from rolemesh.coordinator.api.http.app import make_app
from rolemesh.coordinator.api.http.server import HttpServer, serve_http
from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.rpc.limits import REQUEST_HEAD_S
from rolemesh.rpc.members.identity import Scope

JSON = "application/json"
PROBLEM = "application/problem+json"
NO_PAGES = Path(__file__).parent / "no-such-folder"


def tokens_of(admin: str | None = None, **others: str) -> Tokens:
    """Tokens that a coordinator's owner has given, by scope."""
    given = others if admin is None else {**others, "admin": admin}
    return Tokens(by_scope={Scope(name): token for name, token in given.items()})


def client_of(
    operations: StoreOperations, *, pages: Path = NO_PAGES, **settings: Any
) -> httpx.AsyncClient:
    """A client that calls the app directly."""
    app = make_app(operations, pages=pages, **settings)
    transport = httpx.ASGITransport(app)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


@asynccontextmanager
async def served(
    operations: StoreOperations,
    *,
    stuck_reader_s: float = 60.0,
    head_s: float = REQUEST_HEAD_S,
    **settings: Any,
) -> AsyncIterator[tuple[httpx.AsyncClient, HttpServer]]:
    """A client and the server that it asks, which ends with the block."""
    app = make_app(operations, pages=NO_PAGES, **settings)
    server, port = await serve_http(
        app, "127.0.0.1", 0, stuck_reader_s=stuck_reader_s, head_s=head_s
    )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            yield client, server
    finally:
        await server.stop()


def refused(response: httpx.Response, status: int, reason: str) -> dict[str, Any]:
    """The members of a problem, after the checks that hold for every one."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == PROBLEM
    problem: dict[str, Any] = response.json()
    assert problem["type"] == "about:blank"
    assert problem["status"] == status
    assert problem["reason"] == reason
    assert problem["detail"]
    assert problem["request_id"] == response.headers["x-request-id"]
    return problem
