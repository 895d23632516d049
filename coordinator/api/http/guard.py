"""Checks before every route: who may ask and how much; every request gets an answer.

A coordinator can start programs, so a page that a browser of this machine shows must not be able
to use it. Unless its owner has given a token, a request must name a loopback host (a page that
rebinds its own name to 127.0.0.1 still sends that name), and a request from another origin may
change nothing. A token opens what its scope allows; it stands in a header, and never in a URL.
"""

from __future__ import annotations

import logging
import time
import uuid
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rolemesh.coordinator.api.credentials import (
    SERVICE,
    Tokens,
    UnauthenticatedError,
    check_caller,
)
from rolemesh.coordinator.api.http.exposition import RequestMetrics
from rolemesh.coordinator.api.http.problems import problem_response
from rolemesh.engine.specs.urls import is_loopback
from rolemesh.rpc.errors import ForbiddenError, InternalError, InvalidRequestError, RolemeshError
from rolemesh.rpc.limits import check_json
from rolemesh.rpc.members.identity import Scope as Rights

MAX_BODY_BYTES = 1024**2

SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        # Images of prompts come as data URLs, and from nowhere else.
        "object-src 'none'; img-src 'self' data:"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-resource-policy": "same-origin",
}

SCOPE_HEADER = "x-rolemesh-scope"
"""What the caller's token allows. The dashboard shows no buttons that would be refused."""

_READING = ("GET", "HEAD", "OPTIONS")

_SECRET_NAMES = ("token", "access_token", "authorization")
"""Query parameters that are taken for a token."""

_LIKE = {"exposition": "get_metrics"}
"""Routes that are no operation of their own, and the one whose callers they have."""

_log = logging.getLogger(__name__)


class Guard:
    """Middleware around all routes.

    Owner: one asyncio loop. Every request gets an id, which is in `x-request-id`, in problems and
    in the log. Every request is counted. When a route raises, the answer is a problem.
    """

    def __init__(self, app: ASGIApp, *, tokens: Tokens, metrics: RequestMetrics) -> None:
        self._app = app
        self._tokens = tokens
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        began = time.monotonic()
        status: int | None = None
        allowed: Rights | None = None

        async def send_guarded(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers.update(SECURITY_HEADERS)
                headers["x-request-id"] = request_id
                headers.setdefault("cache-control", "no-store")
                if allowed is not None:
                    headers[SCOPE_HEADER] = allowed.value
                self._metrics.observe(scope, status, time.monotonic() - began)
            await send(message)

        refused: RolemeshError
        try:
            try:
                allowed = let_in(scope, Headers(scope=scope), self._tokens)
            except RolemeshError as error:
                refused = error
            else:
                await self._app(scope, _limited(receive), send_guarded)
                return
        except Exception:
            _log.exception("request %s: %s %s failed", request_id, scope["method"], scope["path"])
            if status is not None:
                raise
            refused = InternalError("the coordinator failed; its log says why")
        headers = {}
        if isinstance(refused, UnauthenticatedError):
            headers["www-authenticate"] = "Bearer"
        response = problem_response(refused, request_id, headers=headers)
        await response(scope, receive, send_guarded)


def let_in(scope: Scope, headers: Headers, tokens: Tokens) -> Rights | None:
    """Refuses a request that may not go on to its route.

    Returns:
        What its caller may do; None where the route asks for no token.

    Raises:
        RolemeshError: It may not.
    """
    host = headers.get("host", "")
    if (tokens.is_own or not tokens.by_scope) and not _is_loopback(host):
        raise ForbiddenError(
            f"host {host!r} is not this coordinator, which was given no token and thus answers to "
            "localhost alone: ask http://localhost, or start it with a token",
            reason="HOST_REFUSED",
        )
    origin = headers.get("origin")
    if (
        scope["method"] not in _READING
        and origin is not None
        and origin.partition("://")[2].lower() != host.lower()
    ):
        raise ForbiddenError(
            f"pages of {origin} may not change anything here: use the page of this coordinator, "
            "or a client that is no browser",
            reason="ORIGIN_REFUSED",
        )
    if any(name in _SECRET_NAMES for name in QueryParams(scope["query_string"])):
        raise InvalidRequestError(
            "a token in the query of a URL gets into logs and histories: send it as the header "
            "authorization: Bearer <token>, and make a new one if others may have read this one",
            reason="TOKEN_IN_QUERY",
        )
    if not scope["path"].startswith("/api/") and scope["path"] != "/metrics":
        return None
    rights = tokens.scope_of(headers.get("authorization"))
    method = method_of(scope)
    if method is not None:
        check_caller(method, f"client/{rights.value}")
    return rights


def method_of(scope: Scope) -> str | None:
    """Method of CoordinatorService whose policy the route of a request has; None: no such route."""
    for route in scope["app"].routes:
        if isinstance(route, Route) and route.matches(scope)[0] is Match.FULL:
            name = _LIKE.get(route.name, route.name)
            return f"/{SERVICE}/{''.join(word.title() for word in name.split('_'))}"
    return None


def _is_loopback(host: str) -> bool:
    try:
        # Without the port, and without the brackets of IPv6.
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False


def _limited(receive: Receive) -> Receive:
    """Returns a `receive` that gives no more than a body may have: bytes, and levels of JSON."""
    num_bytes = 0
    parts: list[bytes] = []

    async def receive_limited() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            try:
                check_json(b"".join(parts).decode(errors="replace"), "body")
            except InvalidRequestError as error:
                raise HTTPException(400, error.message) from error
        return message

    return receive_limited
