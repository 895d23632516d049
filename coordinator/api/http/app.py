"""The coordinator as an ASGI app: REST, live events, health, Prometheus and the dashboard."""

from __future__ import annotations

import functools
import importlib.metadata
from pathlib import Path
from typing import Any, Literal

from fastapi import FastAPI, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.exceptions import HTTPException

from rolemesh.coordinator.api.credentials import Tokens
from rolemesh.coordinator.api.http.bases import Answer
from rolemesh.coordinator.api.http.events import EventStreams
from rolemesh.coordinator.api.http.exposition import RequestMetrics, expose
from rolemesh.coordinator.api.http.guard import Guard
from rolemesh.coordinator.api.http.models import RunEvent
from rolemesh.coordinator.api.http.pages import DASHBOARD, page_routes
from rolemesh.coordinator.api.http.problems import (
    Problem,
    answer_error,
    answer_http,
    answer_invalid,
    problems,
)
from rolemesh.coordinator.api.http.routes import router
from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.rpc.errors import RolemeshError, UnavailableError

_DESCRIPTION = """What a rolemesh coordinator tells and takes: runs, their live events, and what \
they measured.

Names are those of coordinator.proto. Times are RFC 3339, a number that is not finite is null, and \
every error is a problem of RFC 9457 whose `reason` names it for programs."""

_TAGS = [
    {"name": "runs", "description": "Start, steer and list runs."},
    {"name": "observation", "description": "What a run does and measured."},
    {"name": "services", "description": "The role services that the coordinator knows."},
    {"name": "process", "description": "The coordinator's own health."},
]

_SCHEME = "token"


class Health(Answer):
    """That the process lives, or that it can answer."""

    status: Literal["ok"]
    """Always "ok"; anything else is an error."""


def make_app(
    operations: StoreOperations,
    *,
    tokens: Tokens | None = None,
    pages: Path = DASHBOARD,
    heartbeat_s: float = 15.0,
    stream_lifetime_s: float = 3600.0,
) -> FastAPI:
    """The app of one coordinator, to be served by serve_http on the loop of the operations.

    Args:
        operations: The operations that it serves.
        tokens: Of which requests of /api/ and /metrics carry one as `authorization: Bearer`. None:
            no request needs one. Unless they were given by the owner, only requests for a loopback
            host are answered, on a loopback address.
        pages: Folder of the dashboard's files.
        heartbeat_s: An event stream is never silent for longer.
        stream_lifetime_s: An event stream ends after that; its reader comes back for the rest.
    """
    app = FastAPI(
        title="rolemesh coordinator",
        version=importlib.metadata.version("rolemesh"),
        description=_DESCRIPTION,
        openapi_tags=_TAGS,
        # Their pages load scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    tokens = tokens or Tokens()
    is_given = bool(tokens.by_scope) and not tokens.is_own
    metrics = RequestMetrics()
    app.state.operations = operations
    app.state.needs_loopback = not is_given
    app.state.streams = EventStreams(metrics, heartbeat_s=heartbeat_s, lifetime_s=stream_lifetime_s)
    app.include_router(router)
    _add_process_routes(app, operations, metrics)
    app.router.routes.extend(page_routes(pages))
    app.add_exception_handler(RolemeshError, answer_error)
    app.add_exception_handler(RequestValidationError, answer_invalid)
    app.add_exception_handler(HTTPException, answer_http)
    app.add_middleware(Guard, tokens=tokens, metrics=metrics)
    document = functools.cache(functools.partial(_openapi, app, has_token=bool(tokens.by_scope)))
    app.openapi = document  # type: ignore[method-assign]
    return app


def _add_process_routes(app: FastAPI, operations: StoreOperations, metrics: RequestMetrics) -> None:
    refused = problems(403, 500)

    @app.get(
        "/healthz",
        tags=["process"],
        operation_id="get_health",
        response_model=Health,
        responses=refused,
    )
    async def healthz() -> Any:
        """Says that the process lives."""
        return {"status": "ok"}

    @app.get(
        "/readyz",
        tags=["process"],
        operation_id="get_readiness",
        response_model=Health,
        responses={**refused, **problems(503)},
    )
    async def readyz() -> Any:
        """Says that the store answers."""
        await operations.list_runs(1)
        return {"status": "ok"}

    @app.get(
        "/metrics",
        tags=["process"],
        operation_id="get_exposition",
        response_class=Response,
        responses={
            200: {
                "description": "Prometheus exposition format: requests, process, runs.",
                "content": {"text/plain": {"schema": {"type": "string"}}},
            },
            **refused,
        },
    )
    async def exposition() -> Response:
        """Tells Prometheus of requests, the process and the runs."""
        try:
            runs = await operations.list_runs(1000)
        except UnavailableError:
            # The other metrics matter most now; rolemesh_store_up reports that the store is away.
            runs = None
        return Response(expose(metrics, runs), media_type=CONTENT_TYPE_PLAIN_0_0_4)


def _openapi(app: FastAPI, *, has_token: bool) -> dict[str, Any]:
    document = get_openapi(
        title=app.title,
        version=app.version,
        description=app.description,
        routes=app.routes,
        tags=app.openapi_tags,
    )
    schemas = document["components"]["schemas"]
    # FastAPI's own form of refusals, which answer_invalid replaces by a problem with status 400.
    schemas.pop("HTTPValidationError", None)
    schemas.pop("ValidationError", None)
    for model in (Problem, RunEvent):
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(schema.pop("$defs", {}))
        schemas[model.__name__] = schema
    document["components"]["schemas"] = dict(sorted(schemas.items()))
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            if has_token and (path.startswith("/api/") or path == "/metrics"):
                operation["security"] = [{_SCHEME: []}]
                operation["responses"].update(
                    {str(status): declared for status, declared in problems(401).items()}
                )
    if has_token:
        document["components"]["securitySchemes"] = {
            _SCHEME: {
                "type": "http",
                "scheme": "bearer",
                "description": "A token of the coordinator; its scope says what it allows.",
            }
        }
    return document
