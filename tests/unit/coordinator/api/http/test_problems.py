import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest
from support.rest_servers import client_of, refused

from rolemesh.coordinator.api.http.problems import STATUS_BY_CODE, status_of
from rolemesh.rpc.errors import (
    ERROR_CLASSES,
    CapacityError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    OutOfRangeError,
    PreconditionError,
    RolemeshError,
    UnavailableError,
)
from rolemesh.v1 import coordinator_pb2


class Failing:
    """Operations that fail with one error, whatever is asked."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def get_run(self, run_id: str) -> coordinator_pb2.Run:
        raise self._error

    async def list_runs(self, page_size: int = 0) -> list[coordinator_pb2.Run]:
        raise self._error

    async def create_run(self, run_id: str, recipe: str, overrides: Sequence[str] = ()) -> Any:
        raise self._error

    async def watch_run(
        self, run_id: str, after_event_id: str = ""
    ) -> AsyncIterator[coordinator_pb2.RunEvent]:
        if run_id:
            raise self._error
        yield coordinator_pb2.RunEvent()


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidRequestError("m", reason="RECIPE_INVALID"), 400),
        (NotFoundError("m", reason="RUN_NOT_FOUND"), 404),
        (PreconditionError("m", reason="RUN_ENDED"), 409),
        (OutOfRangeError("m", reason="EVENTS_EXPIRED"), 410),
        (OutOfRangeError("m", reason="OUT_OF_RANGE"), 416),
        (CapacityError("m", reason="TOO_MANY_RUNS"), 429),
        (InternalError("m", reason="INTERNAL"), 500),
        (UnavailableError("m", reason="STORE_UNAVAILABLE"), 503),
        (DeadlineError("m", reason="DEADLINE_EXCEEDED"), 504),
    ],
    ids=lambda value: value.reason if isinstance(value, RolemeshError) else "",
)
async def test_an_error_has_the_status_of_its_grpc_code(error: RolemeshError, status: int) -> None:
    error.metadata.update({"run_id": "r", "status": "not the status"})
    async with client_of(Failing(error)) as client:
        for path in ("/api/v1/runs/r", "/api/v1/runs/r/events"):
            problem = refused(await client.get(path), status, error.reason)
            assert problem["detail"] == "m"
            assert problem["run_id"] == "r"
            assert problem["retryable"] is (status in (503,))


def test_every_class_of_error_has_a_status_below_500_unless_it_is_ours() -> None:
    ours = {
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.DATA_LOSS,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    }
    for error_class in ERROR_CLASSES:
        assert (status_of(error_class("m")) >= 500) is (error_class.code in ours)
    assert set(STATUS_BY_CODE.values()) == {400, 401, 403, 404, 409, 416, 429, 501, 503, 504}


async def test_an_unforeseen_failure_tells_nothing_but_the_id_under_which_it_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR):
        async with client_of(Failing(RuntimeError("secret detail"))) as client:
            problem = refused(await client.get("/api/v1/runs/r"), 500, "INTERNAL")

    assert "secret detail" not in str(problem)
    logged = [record for record in caplog.records if problem["request_id"] in record.getMessage()]
    assert len(logged) == 1
    assert "secret detail" in str(logged[0].exc_info)


async def test_a_store_that_does_not_answer_is_not_ready_but_alive() -> None:
    gone = UnavailableError("the store does not answer", reason="STORE_UNAVAILABLE")
    async with client_of(Failing(gone)) as client:
        refused(await client.get("/readyz"), 503, "STORE_UNAVAILABLE")
        assert (await client.get("/healthz")).status_code == 200
        exposition = await client.get("/metrics")
    assert exposition.status_code == 200
    assert "rolemesh_store_up 0.0" in exposition.text


@pytest.mark.parametrize("path", ["/nothing", "/api/v1/nothing", "/api/v1/runs/", "/docs"])
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_an_unknown_route_is_a_problem(method: str, path: str) -> None:
    async with client_of(Failing(RuntimeError())) as client:
        refused(await client.request(method, path), 404, "ROUTE_NOT_FOUND")


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/api/v1/runs", "GET, POST"),
        ("/api/v1/runs/r", "GET"),
        ("/api/v1/runs/r/stop", "POST"),
        ("/metrics", "GET"),
    ],
)
async def test_a_wrong_method_is_told_the_right_ones(path: str, allowed: str) -> None:
    async with client_of(Failing(RuntimeError())) as client:
        for method in ("DELETE", "PUT", "TRACE", "OPTIONS"):
            answer = await client.request(method, path)
            refused(answer, 405, "METHOD_NOT_ALLOWED")
            assert answer.headers["allow"] == allowed
