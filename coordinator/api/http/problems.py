"""Errors as application/problem+json (RFC 9457): one form for every error.

The HTTP status follows the gRPC status of the error, so that both interfaces say the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Literal

import grpc
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from rolemesh.coordinator.api.http.bases import Answer, Int32
from rolemesh.rpc.errors import InvalidRequestError, RolemeshError

PROBLEM_TYPE = "application/problem+json"

STATUS_BY_CODE: Mapping[grpc.StatusCode, int] = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.FAILED_PRECONDITION: 409,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.OUT_OF_RANGE: 416,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
"""HTTP status of an error; 500 for every other code."""

STATUS_BY_REASON: Mapping[str, int] = {"EVENTS_EXPIRED": 410}
"""Reasons for which HTTP has a better status."""

REASON_BY_STATUS: Mapping[int, str] = {
    404: "ROUTE_NOT_FOUND",
    405: "METHOD_NOT_ALLOWED",
    413: "BODY_TOO_LARGE",
}
"""Reasons of errors that only HTTP requests can have."""

MAX_ERRORS = 50
"""Faults of one request that are told: a body of 1 MiB may have 100,000."""

_DESCRIPTIONS: Mapping[int, str] = {
    400: "The request is wrong in itself; `errors` names the fields.",
    401: "The coordinator has a token and the request does not carry it.",
    403: "The token allows less than that, or the request comes from a page of another origin, "
    "names another host, or names what the coordinator's owner has not granted.",
    404: "What the request names is not here.",
    409: "The run is not in the state that the request needs.",
    410: "Events after that one are no longer kept: read the run and begin anew.",
    413: "The body is larger than 1 MiB.",
    429: "As many are at work as there may be: try again later.",
    500: "The coordinator failed unexpectedly: its log has the request id.",
    503: "The store does not answer: try again later.",
}

_EXAMPLES: Mapping[int, tuple[str, str]] = {
    400: ("REQUEST_INVALID", "query.max_steps: Input should be less than or equal to 1000"),
    401: ("TOKEN_MISSING", "send the token of this coordinator: authorization: Bearer <token>"),
    403: ("ORIGIN_REFUSED", "pages of https://example.org may not change anything here"),
    404: ("RUN_NOT_FOUND", "no run 'arithmetic-1' in this store"),
    409: ("RUN_ENDED", "run 'arithmetic-1' has ended (succeeded): nothing can be asked of it"),
    410: ("EVENTS_EXPIRED", "events after '1-0' are no longer kept: read the run and begin anew"),
    413: ("BODY_TOO_LARGE", "the body is larger than 1048576 bytes"),
    429: ("TOO_MANY_RUNS", "4 runs go on, as many as this coordinator may have"),
    500: ("INTERNAL", "the coordinator failed; its log says why"),
    503: ("STORE_UNAVAILABLE", "the store at redis://store:6379 does not answer"),
}


class InvalidField(Answer):
    """One thing that is wrong with a request."""

    field: str
    """Where, e.g. "query.max_steps" or "body.run_id"."""
    detail: str
    """What is wrong with it."""


class Problem(BaseModel):
    """An error, after RFC 9457; dynamic values of the error are further members."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    type: Literal["about:blank"]
    """The status says which kind of error it is."""
    title: str
    """The status in words."""
    status: Int32
    """The status."""
    detail: str
    """What went wrong, for people: the field, the value and the remedy."""
    reason: str
    """Stable name, e.g. "RUN_NOT_FOUND", for programs."""
    retryable: bool
    """Whether the same request may succeed later without a change."""
    request_id: str
    """Id under which the request is found in the coordinator's log; also in X-Request-Id."""
    errors: list[InvalidField] = []
    """All that is wrong with the request, when it is the request that is wrong."""


def status_of(error: RolemeshError) -> int:
    """The HTTP status that an error is sent with."""
    return STATUS_BY_REASON.get(error.reason) or STATUS_BY_CODE.get(error.code, 500)


def to_problem(
    error: RolemeshError,
    request_id: str,
    *,
    status: int | None = None,
    errors: Sequence[Mapping[str, str]] = (),
) -> dict[str, Any]:
    """An error as the members of a problem.

    Args:
        error: The error; its metadata become further members.
        request_id: Id of the request.
        status: HTTP status, if it is not that of the error's class.
        errors: `field` and `detail` of every fault of the request.
    """
    status = status or status_of(error)
    members: dict[str, Any] = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": error.message,
        "reason": error.reason,
        "retryable": error.retryable,
        "request_id": request_id,
    }
    if errors:
        members["errors"] = [dict(one) for one in errors]
    # Metadata named "status" or "reason" must not replace the members of the problem.
    return {**error.metadata, **members}


def problem_response(
    error: RolemeshError,
    request_id: str,
    *,
    status: int | None = None,
    errors: Sequence[Mapping[str, str]] = (),
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """An error as an answer; see to_problem."""
    members = to_problem(error, request_id, status=status, errors=errors)
    return JSONResponse(members, members["status"], headers, PROBLEM_TYPE)


async def answer_error(request: Request, error: Exception) -> JSONResponse:
    """Answers a request that an operation refused."""
    assert isinstance(error, RolemeshError)
    return problem_response(error, request.state.request_id)


async def answer_invalid(request: Request, error: Exception) -> JSONResponse:
    """Answers a request that does not fit its types."""
    assert isinstance(error, RequestValidationError)
    errors = [
        {"field": ".".join(str(part) for part in one["loc"]), "detail": str(one["msg"])}
        for one in error.errors()[:MAX_ERRORS]
    ]
    first = errors[0]
    refused = InvalidRequestError(f"{first['field']}: {first['detail']}")
    return problem_response(refused, request.state.request_id, errors=errors)


async def answer_http(request: Request, error: Exception) -> JSONResponse:
    """Answers an error of HTTP itself: of the route, the method or the body."""
    assert isinstance(error, HTTPException)
    status, path, detail = error.status_code, request.url.path, error.detail
    headers = {}
    if status == 404:
        detail = f"there is nothing at {path}: /openapi.json lists what there is"
    elif status == 405:
        headers["allow"] = ", ".join(_allowed_methods(request))
        detail = f"{request.method} is not for {path}: {headers['allow']} is"
    refused = RolemeshError(detail, reason=REASON_BY_STATUS.get(status, "REQUEST_INVALID"))
    return problem_response(refused, request.state.request_id, status=status, headers=headers)


def _allowed_methods(request: Request) -> list[str]:
    # Starlette names only the methods of the first route with this path.
    allowed: set[str] = set()
    for route in request.app.routes:
        regex, methods = getattr(route, "path_regex", None), getattr(route, "methods", None)
        if regex is not None and methods and regex.match(request.url.path):
            allowed |= methods
    return sorted(allowed)


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Declares the errors of a route, in addition to those of every route."""
    return {status: _declared(status) for status in sorted(statuses)}


def _declared(status: int) -> dict[str, Any]:
    reason, detail = _EXAMPLES[status]
    error = RolemeshError(detail, reason=reason, retryable=status == 503)
    example = to_problem(error, "5f0c1d7c3a5e4d6f", status=status)
    return {
        "description": _DESCRIPTIONS[status],
        "content": {
            PROBLEM_TYPE: {
                "schema": {"$ref": f"#/components/schemas/{Problem.__name__}"},
                "example": example,
            }
        },
    }
