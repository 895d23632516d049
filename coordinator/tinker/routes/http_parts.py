"""What of a request every route reads: its body, within bounds, and who sent it."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rolemesh.coordinator.tinker.bodies import Body
from rolemesh.coordinator.tinker.forms import proto_forms
from rolemesh.coordinator.tinker.forms.forms import WireError

MOST_BODY_BYTES = 256 * 2**20
"""Of one request."""

ROOT = "/api/v1"
"""Path of all routes."""

PROTOBUF = "application/x-protobuf"

MOST_LISTED = 1000
"""Entries of one answer."""

Handler = Callable[[Request, str], Awaitable[Response]]
"""Answers a request of an owner."""

B = TypeVar("B", bound=Body)
T = TypeVar("T")


async def read(request: Request) -> bytes:
    """The body; raises WireError where it is too large."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MOST_BODY_BYTES:
            raise WireError("body", f"more than {MOST_BODY_BYTES} bytes", "send smaller chunks")
    whole = bytes(body)
    request.state.body = whole
    return whole


async def read_body(request: Request, kind: type[B]) -> B:
    """The body as one of `bodies`; raises WireError or pydantic's ValidationError."""
    return kind.model_validate(as_json(await read(request)))


def as_json(body: bytes) -> Any:
    """A body's JSON; raises WireError."""
    try:
        return json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise WireError("body", str(error), "send JSON") from error


def is_protobuf(request: Request) -> bool:
    """Whether the body is Tinker's protobuf."""
    return request.headers.get("content-type", "").startswith(PROTOBUF)


def decompressed(request: Request, body: bytes) -> bytes:
    """The body as it was before its client compressed it."""
    return proto_forms.decompress(body, request.headers.get("content-encoding"))


def ids_of(request: Request) -> tuple[str, int] | None:
    """Model and number of a call whose body was read; None where it tells neither."""
    body = getattr(request.state, "body", b"")
    try:
        if is_protobuf(request):
            return proto_forms.ids_of(decompressed(request, body))
        whole = as_json(body)
    except WireError:
        return None
    if not isinstance(whole, dict):
        return None
    model_id, seq_id = whole.get("model_id"), whole.get("seq_id")
    return (model_id, seq_id) if isinstance(model_id, str) and isinstance(seq_id, int) else None


def page(request: Request, found: list[T], *, usual: int) -> tuple[list[T], dict[str, int]]:
    """Those that a request asks for, and its cursor; `usual` is its limit where it has none."""
    limit, offset = _count(request, "limit", usual), _count(request, "offset", 0)
    cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
    return found[offset : offset + min(limit, MOST_LISTED)], cursor


def _count(request: Request, name: str, usual: int) -> int:
    text = request.query_params.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 10 else usual


def promise(request_id: str, model_id: str | None = None) -> Response:
    """The answer to a call whose result is fetched later."""
    return JSONResponse(
        {"request_id": request_id, **({} if model_id is None else {"model_id": model_id})}
    )


def error(status: int, text: str) -> Response:
    """The answer to a call that is refused."""
    return JSONResponse({"error": text, "detail": text}, status_code=status)
