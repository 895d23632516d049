"""Routes about sessions: begin, heartbeat, end, and what is known of those that were."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rolemesh.coordinator.tinker.bodies import (
    CreateSession,
    Finish,
    OfSession,
    SearchSessions,
    ToProject,
)
from rolemesh.coordinator.tinker.routes import http_parts
from rolemesh.coordinator.tinker.routes.http_parts import Handler, read_body
from rolemesh.coordinator.tinker.server import TinkerServer
from rolemesh.coordinator.tinker.sessions import Record, UnknownError

NO_PROJECT = "default"
"""What the project of a session is called that has none."""


def session_routes(server: TinkerServer) -> Iterator[tuple[str, str, Handler]]:
    """Method, path and handler of each."""
    routes = _SessionRoutes(server)
    yield "POST", "create_session", routes.create
    yield "POST", "session_heartbeat", routes.heard
    yield "POST", "sessions/search", routes.search
    yield "POST", "sessions/{session_id}/finish", routes.finish
    yield "PUT", "sessions/{session_id}/project", routes.move
    yield "GET", "sessions/{session_id}", routes.one
    yield "GET", "sessions", routes.every


class _SessionRoutes:
    def __init__(self, server: TinkerServer) -> None:
        self._server = server

    async def create(self, request: Request, owner: str) -> Response:
        """A session."""
        asked = await read_body(request, CreateSession)
        session = self._server.sessions.begin(
            owner,
            display_name=asked.display_name,
            user_metadata=asked.user_metadata or {},
            project_id=asked.project_id,
        )
        return JSONResponse({"type": "create_session", "session_id": session.session_id})

    async def heard(self, request: Request, owner: str) -> Response:
        """Told that a client is there."""
        asked = await read_body(request, OfSession)
        try:
            self._server.sessions.get(owner, asked.session_id)
        except UnknownError as error:
            # By this a client knows that it need not go on.
            return http_parts.error(410, str(error))
        return JSONResponse({"type": "session_heartbeat"})

    async def finish(self, request: Request, owner: str) -> Response:
        """Ends one."""
        asked = await read_body(request, Finish)
        kind = "success" if asked.reason is None else asked.reason.type
        status = {"type": "client_finished", "reason": {"type": kind}, "detail": asked.detail}
        await self._server.finish(owner, request.path_params["session_id"], status)
        return JSONResponse({})

    async def move(self, request: Request, owner: str) -> Response:
        """Gives one another project, which is a label and no more."""
        asked = await read_body(request, ToProject)
        self._server.sessions.move(owner, request.path_params["session_id"], asked.project_id)
        return Response(status_code=204)

    async def one(self, request: Request, owner: str) -> Response:
        """What belongs to one."""
        record = self._server.sessions.record(owner, request.path_params["session_id"])
        return JSONResponse(
            {
                "training_run_ids": list(record.runs),
                "sampler_ids": list(record.samplers),
                "user_metadata": dict(record.user_metadata) or None,
                "display_name": record.display_name,
            }
        )

    async def every(self, request: Request, owner: str) -> Response:
        """Ids of all."""
        found, _ = http_parts.page(request, self._server.sessions.records(owner), usual=20)
        return JSONResponse({"sessions": [one.session_id for one in found]})

    async def search(self, request: Request, owner: str) -> Response:
        """Those of the owner that are looked for, whoever else was named."""
        asked = await read_body(request, SearchSessions)
        found = [one for one in self._server.sessions.records(owner) if _is_meant(one, asked)]
        if asked.cursor is not None:
            after = (-asked.cursor.last_created_at.timestamp(), asked.cursor.last_session_id)
            found = [one for one in found if _place(one) > after]
        page = found[: asked.limit]
        cursor = None
        if len(found) > len(page):
            last = page[-1]
            cursor = {
                "last_created_at": _time(last.created_at),
                "last_session_id": last.session_id,
            }
        told = [self._told(one) for one in page]
        return JSONResponse({"sessions": told, "next_cursor": cursor})

    def _told(self, record: Record) -> dict[str, Any]:
        saved = [
            folder for run in record.runs for _, folder in self._server.store.of(record.owner, run)
        ]
        return {
            "session_id": record.session_id,
            "created_at": _time(record.created_at),
            "owner": record.owner,
            "project_id": record.project_id or NO_PROJECT,
            "status": None if record.status is None else dict(record.status),
            "checkpoints_count": len(saved),
            "display_name": record.display_name,
            "user_metadata": dict(record.user_metadata) or None,
        }


def _place(record: Record) -> tuple[float, str]:
    """Of a record in the order in which they are listed."""
    # As exact as the cursor tells it.
    return -datetime.fromisoformat(_time(record.created_at)).timestamp(), record.session_id


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _is_meant(record: Record, asked: SearchSessions) -> bool:
    named = []
    if asked.session_id is not None:
        named.append(record.session_id == asked.session_id)
    if asked.display_name is not None:
        name = (record.display_name or "").lower()
        named.append(all(word in name for word in asked.display_name.lower().split()))
    return (
        (not named or any(named))
        and asked.user_metadata.items() <= dict(record.user_metadata).items()
        and (asked.project_ids is None or (record.project_id or NO_PROJECT) in asked.project_ids)
        and (asked.statuses is None or any(_has(record, one) for one in asked.statuses))
    )


def _has(record: Record, wanted: SearchSessions.Status) -> bool:
    status = record.status or {}
    if status.get("type") != wanted.type:
        return False
    return wanted.reasons is None or status.get("reason", {}).get("type") in wanted.reasons
