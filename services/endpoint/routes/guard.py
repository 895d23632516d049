"""Checks before every route of an endpoint: who asks, for which session, and for what."""

from __future__ import annotations

import hmac
import json
import logging
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rolemesh.engine.sessions.session import SessionError
from rolemesh.engine.sessions.store import OpenSession, Sessions
from rolemesh.engine.specs.urls import is_loopback
from rolemesh.rpc.errors import RolemeshError
from rolemesh.rpc.limits import check_json
from rolemesh.services.endpoint.asked import ASKED, Asked
from rolemesh.services.endpoint.routes.fields import ROUTES

logger = logging.getLogger(__name__)

READING = frozenset({"/v1/models", "/health"})
"""Routes that take no body."""

SESSIONS = "/sessions"
"""Where sessions are opened, read and ended. What stands below /sessions/ID/v1 is of that session.
"""

UNTRAINED = ":untrained"
"""Behind the model's name it says the same as metadata train "false", for clients that can set no
metadata, e.g. the judge or the summariser of an agent."""

_TRAIN = "train"
"""Key of a request's `metadata` by which a caller says "false": its tokens are not trained on."""


class Refusal(Exception):
    """A request that does not go on to its route."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


class Guard:
    """Middleware around all routes. Owner: one loop.

    Who has the endpoint's key may ask everything; who has a session's key may use that session, by
    its base URL or by the key alone. Without a key of the endpoint everybody who reaches the port
    may, from this machine: a request must then name a loopback host and come from no web page.
    """

    def __init__(
        self, app: ASGIApp, sessions: Sessions, *, key: str | None, max_body_bytes: int
    ) -> None:
        self._app = app
        self._sessions = sessions
        self._key = key
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            asked, receive = await self._let_in(scope, receive)
        except Refusal as refusal:
            await _problem(refusal)(scope, receive, send)
            return
        except SessionError as error:
            await _problem(Refusal(400, str(error)))(scope, receive, send)
            return
        token = ASKED.set(asked)
        try:
            await self._app(scope, receive, send)
        finally:
            ASKED.reset(token)

    async def _let_in(self, scope: Scope, receive: Receive) -> tuple[Asked, Receive]:
        headers = Headers(scope=scope)
        path: str = scope["path"]
        named = self._named(path)
        opened, is_owner = self._caller(headers)
        if named is not None:
            opened, scope["path"] = self._of_path(named, opened, is_owner=is_owner)
            scope["raw_path"] = scope["path"].encode()
            path = scope["path"]
        elif not is_owner and opened is None:
            raise Refusal(
                401, "the Authorization header has no key that is known here: give Bearer KEY"
            )
        scope.setdefault("state", {}).update(opened=opened, is_owner=is_owner)
        if path.startswith(SESSIONS) or path in READING:
            body = b"" if scope["method"] == "GET" else await self._body(receive)
            return Asked(opened=opened), _again(body, receive)
        if path not in ROUTES:
            known = ", ".join(sorted((*ROUTES, *READING, SESSIONS)))
            raise Refusal(404, f"there is no {path} here: the routes are {known}")
        body = await self._body(receive)
        given = _object(body)
        if (name := ROUTES[path].unserved(given)) is not None:
            raise Refusal(400, f"{name} is not served by this endpoint: leave it out", name)
        metadata = given.get("metadata")
        trains = metadata.get(_TRAIN, "true") if isinstance(metadata, Mapping) else "true"
        if trains not in ("true", "false"):
            raise Refusal(
                400, f'metadata.train is {trains!r}: give "true" or "false"', "metadata.train"
            )
        is_trained = trains == "true" and not str(given.get("model") or "").endswith(UNTRAINED)
        asked = Asked(opened=opened, body=given, is_trained=is_trained)
        return asked, _again(body, receive)

    def _named(self, path: str) -> tuple[str, str] | None:
        """The session and the route of a path below a session's base URL."""
        if not path.startswith(f"{SESSIONS}/"):
            return None
        session_id, _, rest = path.removeprefix(f"{SESSIONS}/").partition("/")
        route = f"/{rest}"
        return (session_id, route) if route in ROUTES or route in READING else None

    def _of_path(
        self, named: tuple[str, str], by_key: OpenSession | None, *, is_owner: bool
    ) -> tuple[OpenSession, str]:
        session_id, route = named
        opened = self._sessions.of_id(session_id)
        if not is_owner and (by_key is None or by_key is not opened):
            raise Refusal(
                401, f"the Authorization header has no key of session {session_id}: give Bearer KEY"
            )
        if opened is None:
            raise Refusal(404, f"there is no session {session_id}, or none any more: open one")
        return opened, route

    def _caller(self, headers: Headers) -> tuple[OpenSession | None, bool]:
        """The session that the caller's key opens, and whether the endpoint is the caller's."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        given = given.strip() if scheme.lower() == "bearer" else ""
        by_key = self._sessions.of_key(given)
        if self._key is not None:
            is_owner = hmac.compare_digest(given.encode(), self._key.encode())
            return by_key, is_owner
        is_local = is_loopback(_host(headers)) and "origin" not in headers
        return by_key, is_local and by_key is None

    async def _body(self, receive: Receive) -> bytes:
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Refusal(400, "the client has gone before its request was whole")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_body_bytes:
                raise Refusal(
                    413,
                    f"the request has more than {self._max_body_bytes} bytes: send less, or raise "
                    "endpoint.max_body_bytes",
                )
            if not message.get("more_body", False):
                return b"".join(parts)


def _host(headers: Headers) -> str:
    """Which host a request names, without its port; "" where it names none."""
    try:
        return urlsplit(f"//{headers.get('host', '')}").hostname or ""
    except ValueError:
        return ""


def _object(body: bytes) -> dict[str, Any]:
    try:
        text = body.decode()
        check_json(text, "the request")
        given = json.loads(text)
    except (ValueError, RolemeshError) as error:
        raise Refusal(400, f"the request is no JSON that is served: {error}") from error
    if not isinstance(given, dict):
        raise Refusal(400, "the request is no JSON object: give one")
    return given


def _again(body: bytes, receive: Receive) -> Receive:
    """Gives a body that was read once more, and then what comes."""
    is_given = False

    async def receive_again() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again


def _problem(refusal: Refusal) -> JSONResponse:
    kinds = {401: "AuthenticationError", 404: "NotFoundError", 413: "RequestTooLargeError"}
    error = {
        "message": str(refusal),
        "type": kinds.get(refusal.status, "BadRequestError"),
        "param": refusal.param,
        "code": refusal.status,
    }
    headers = {"www-authenticate": "Bearer"} if refusal.status == 401 else None
    return JSONResponse({"error": error}, status_code=refusal.status, headers=headers)
