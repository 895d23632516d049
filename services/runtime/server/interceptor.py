"""The one server interceptor: callers, deadline, request id, metrics, errors, for all calls."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NoReturn, TypeAlias

import grpc
from grpc_status import rpc_status
from opentelemetry.trace import Span

from rolemesh.rpc import tracing
from rolemesh.rpc.channel import REQUEST_ID_KEY, CallContext, new_request_id, serving_call
from rolemesh.rpc.errors import ForbiddenError, InternalError, InvalidRequestError, to_status
from rolemesh.rpc.http import awaited
from rolemesh.rpc.limits import REQUEST_S, checked
from rolemesh.rpc.members.identity import member_of
from rolemesh.rpc.policy import method_policy, rolemesh_methods
from rolemesh.services.runtime.server.errors import FAILED_RANK, describe, is_expected
from rolemesh.services.runtime.server.metrics import ServiceMetrics
from rolemesh.v1 import experience_pb2, operation_pb2

logger = logging.getLogger(__name__)

_Read: TypeAlias = Callable[[awaited.Context], Awaitable[Any]]

OUR_METHODS = "/rolemesh."
"""Beginning of our methods. Clients of standard services (health, reflection) do not know our
policies, so nothing is asked of those but to send their requests."""

MAX_REQUEST_ID_CHARACTERS = 64
"""A longer request id is replaced: it goes into logs."""


class ServiceInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every rolemesh call. Servicers raise; this is the only place that aborts.

    A call without a deadline is refused, since nothing would ever end it, and so is a request that
    does not come, cannot be read or is beyond a limit. Who may not call is refused before that. An
    exception is sent as google.rpc.Status with ErrorInfo. An unexpected one is logged with its
    traceback, and is sent as INTERNAL with its type and message.
    """

    def __init__(
        self,
        role: str,
        rank: int,
        metrics: ServiceMetrics,
        *,
        has_identity: bool = False,
        request_s: float = REQUEST_S,
    ) -> None:
        """Prepares.

        Args:
            role: Role of the service.
            rank: Rank of this process.
            metrics: Counts the calls.
            has_identity: Whether callers show who they are. Then only those may call a method that
                its policy names; else the network must keep others out.
            request_s: A call whose request has not come for so long is refused. A stream of
                requests has a bound of its own.
        """
        self._role = role
        self._rank = rank
        self._metrics = metrics
        self._has_identity = has_identity
        self._request_s = request_s

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Returns the method's handler, wrapped; None answers UNIMPLEMENTED."""
        handler = await continuation(handler_call_details)
        full_method = handler_call_details.method
        if handler is None:
            return None
        if not full_method.startswith(OUR_METHODS):
            return awaited.standard(full_method, handler, self._request_s)
        # Checks that the method has a policy, before a caller relies on its idempotency.
        method_policy(full_method)
        read: _Read | None = None
        if not handler.request_streaming:
            message = rolemesh_methods()[full_method].input_type
            read = awaited.AwaitedRequest(handler, message, self._request_s).read
        elif handler.request_deserializer is not None:
            raise TypeError(f"{full_method} has to read, and check, its stream of bytes by itself")
        if handler.response_streaming:
            behavior = handler.stream_stream or handler.unary_stream
            return awaited.begun_at_once(handler, self._streaming(full_method, behavior, read))
        behavior = handler.stream_unary or handler.unary_unary
        return awaited.begun_at_once(handler, self._unary(full_method, behavior, read))

    def _unary(self, full_method: str, behavior: Any, read: _Read | None) -> Any:
        async def answer(request: Any, context: awaited.Context, span: Span) -> Any:
            response = await behavior(request, context)
            _note_result(span, response)
            return response

        return self._answering(full_method, read, answer)

    def _streaming(self, full_method: str, behavior: Any, read: _Read | None) -> Any:
        async def answer(request: Any, context: awaited.Context, span: Span) -> None:
            responses = behavior(request, context)
            if inspect.isawaitable(responses):
                responses = await responses
            async with contextlib.aclosing(responses):
                async for response in responses:
                    _note_result(span, response)
                    await _send(full_method, context.write(response))

        return self._answering(full_method, read, answer)

    def _answering(
        self,
        full_method: str,
        read: _Read | None,
        answer: Callable[[Any, awaited.Context, Span], Awaitable[Any]],
    ) -> Any:
        """Gives `answer` the request of a caller who may call, or the stream of them."""

        # Not a generator: grpc.aio would iterate over it, and leave it open when a write fails.
        async def serve(requests: Any, context: awaited.Context) -> Any:
            with self._serving(full_method, context) as (call, outcome, span):
                try:
                    self._check_caller(full_method, context)
                    self._check_deadline(full_method, call)
                    if read is None:
                        return await answer(requests, context, span)
                    request = checked(await read(context))
                    _note_operation(span, request)
                    return await answer(request, context, span)
                except Exception as error:
                    await self._abort(full_method, context, call, outcome, span, error)

        return serve

    @contextlib.contextmanager
    def _serving(
        self, full_method: str, context: awaited.Context
    ) -> Iterator[tuple[CallContext, list[str], Span]]:
        remaining = context.time_remaining()
        deadline = math.inf if remaining is None else time.monotonic() + remaining
        with (
            self._metrics.call(full_method) as outcome,
            serving_call(_request_id(context), deadline) as call,
            tracing.serving(
                full_method, context.invocation_metadata(), self._role, self._rank
            ) as span,
        ):
            try:
                yield call, outcome, span
            except (asyncio.CancelledError, GeneratorExit):
                outcome[0] = "CANCELLED"
                raise

    def _check_caller(self, full_method: str, context: awaited.Context) -> None:
        if not self._has_identity:
            return
        member = member_of(context)
        if member is None or not method_policy(full_method).allows(member, self._role):
            raise ForbiddenError(
                f"{full_method} of the {self._role} is not for {member or 'an unknown caller'}: "
                "see its callers in the proto, and call with the identity of one of them",
                reason="CALLER_DENIED",
                metadata={"caller": member or ""},
            )

    def _check_deadline(self, full_method: str, call: CallContext) -> None:
        if math.isinf(call.deadline):
            raise InvalidRequestError(
                f"{full_method} was called without a deadline: give one (gRPC timeout), "
                f"e.g. {method_policy(full_method).deadline_s:g} s, the default of its policy",
                reason="DEADLINE_MISSING",
            )

    async def _abort(
        self,
        full_method: str,
        context: awaited.Context,
        call: CallContext,
        outcome: list[str],
        span: Span,
        error: Exception,
    ) -> NoReturn:
        if isinstance(error, grpc.aio.AbortError):
            raise error
        described = describe(error)
        tracing.fail(span, described)
        outcome[0] = described.code.name
        if is_expected(error):
            logger.warning("%s: %s: %s", full_method, described.reason, described.message)
        else:
            logger.error("%s failed: %s", full_method, described.message, exc_info=error)
        if isinstance(described, InternalError) and FAILED_RANK not in described.metadata:
            described = InternalError(
                f"{self._role} rank {self._rank} failed: {described.message}",
                reason=described.reason,
                retryable=described.retryable,
                metadata=described.metadata,
                remote_traceback=described.remote_traceback,
            )
        status = to_status(
            described,
            {
                "role": self._role,
                "rank": described.metadata.get(FAILED_RANK, str(self._rank)),
                "request_id": call.request_id,
                "method": full_method,
            },
        )
        await _send(full_method, context.abort_with_status(rpc_status.to_status(status)))
        raise AssertionError("abort returned")  # it always raises


def _note_operation(span: Span, request: Any) -> None:
    """Adds the key of the request, if it has one, to the span."""
    key = getattr(request, "key", None)
    if span.is_recording() and isinstance(key, operation_pb2.OperationKey) and key.operation:
        tracing.note(span, run_id=key.run_id, step=key.step, operation=key.operation)


def _note_result(span: Span, response: Any) -> None:
    """Adds the report of the response, if it has one, to the span."""
    if not span.is_recording():
        return
    result = getattr(response, "result", response)
    version = getattr(result, "policy_version", None)
    tracing.note(span, policy_version=version or None)
    report = getattr(result, "report", None)
    if isinstance(report, experience_pb2.CallReport):
        tracing.note(
            span, num_tokens=report.num_tokens, num_bytes=sum(report.fetched_bytes.values())
        )


async def _send(full_method: str, sending: Awaitable[None]) -> None:
    """Sends a message. If the client has left, the call ends as if it was cancelled.

    grpc.aio cancels the call's task when the client leaves, but the send in progress may fail
    before. grpc.aio.InternalError is the public base of the errors that it then raises.
    """
    try:
        await sending
    except grpc.aio.InternalError as error:
        logger.info("%s: the client left before its answer was sent (%s)", full_method, error)
        raise asyncio.CancelledError(str(error)) from error


def _request_id(context: awaited.Context) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_ID_KEY and isinstance(value, str):
            if value.isprintable() and len(value) <= MAX_REQUEST_ID_CHARACTERS:
                return value
            break
    return new_request_id()
