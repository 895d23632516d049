"""Tests of the interceptor when the client has left, with a context that fails to write."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from rolemesh.services.runtime.server.interceptor import ServiceInterceptor
from rolemesh.services.runtime.server.metrics import ServiceMetrics

METHOD = "/rolemesh.v1.ExperienceService/Fetch"


class Context:
    """As much of a ServicerContext as the interceptor needs."""

    def __init__(self, error: Exception | None = None) -> None:
        self.written: list[str] = []
        self.aborted = 0
        self._error = error

    def time_remaining(self) -> float:
        return 10.0

    def invocation_metadata(self) -> tuple[Any, ...]:
        return ()

    async def read(self) -> bytes:
        return b"request"

    async def write(self, message: str) -> None:
        if self.written and self._error is not None:
            raise self._error
        self.written.append(message)

    async def abort_with_status(self, status: Any) -> None:
        self.aborted += 1
        raise (
            self._error
            if isinstance(self._error, grpc.aio.InternalError)
            else grpc.aio.AbortError()
        )


async def wrapped(behavior: Any) -> Any:
    async def continuation(_: Any) -> Any:
        return grpc.unary_stream_rpc_method_handler(behavior)

    interceptor = ServiceInterceptor("toy", 0, ServiceMetrics("toy", 0))
    details: Any = SimpleNamespace(method=METHOD)
    return (await interceptor.intercept_service(continuation, details)).stream_stream


class Answers:
    """A handler of three answers that notes whether it was closed."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.is_closed = False
        self._failure = failure

    async def __call__(self, request: Any, context: Any) -> AsyncIterator[str]:
        try:
            for answer in ("one", "two", "three"):
                yield answer
            if self._failure is not None:
                raise self._failure
        finally:
            self.is_closed = True


async def test_every_answer_is_written_in_order() -> None:
    context, answers = Context(), Answers()
    await (await wrapped(answers))(None, context)
    assert context.written == ["one", "two", "three"]
    assert answers.is_closed


async def test_a_write_that_fails_since_the_client_left_ends_the_call_as_cancelled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    context, answers = Context(grpc.aio.InternalError("no batch")), Answers()
    with pytest.raises(asyncio.CancelledError):
        await (await wrapped(answers))(None, context)
    assert answers.is_closed
    assert context.aborted == 0
    assert [(record.levelname, record.exc_info) for record in caplog.records] == [("INFO", None)]
    assert "the client left before its answer was sent (no batch)" in caplog.text


async def test_an_error_that_cannot_be_sent_is_logged_and_the_call_ends_as_cancelled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    answers = Answers(RuntimeError("the model is broken"))
    context = Context(grpc.aio.InternalError("no batch"))
    context.write = _accept  # type: ignore[method-assign]
    with pytest.raises(asyncio.CancelledError):
        await (await wrapped(answers))(None, context)
    assert context.aborted == 1
    assert "the model is broken" in caplog.text


async def _accept(message: str) -> None:
    """A write that succeeds."""


async def test_a_write_that_fails_for_another_reason_is_an_error() -> None:
    context, answers = Context(TypeError("no such message")), Answers()
    with pytest.raises(grpc.aio.AbortError):
        await (await wrapped(answers))(None, context)
    assert answers.is_closed
    assert context.aborted == 1
