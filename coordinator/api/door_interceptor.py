"""The door of a coordinator's gRPC server: who may call is found out before a request is read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn, TypeAlias, cast

import grpc
from grpc_health.v1 import health_pb2
from grpc_status import rpc_status

from rolemesh.coordinator.api.credentials import SERVICE, Tokens, check_caller
from rolemesh.rpc.errors import (
    DeadlineError,
    InternalError,
    InvalidRequestError,
    RolemeshError,
    to_status,
)
from rolemesh.rpc.identity import member_of
from rolemesh.rpc.limits import checked, request_reader
from rolemesh.rpc.policy import rolemesh_methods

logger = logging.getLogger(__name__)

# Methods without a token: they reveal nothing of a run, and their callers (health checks) know no
# token. Health/Watch is not one of them, nor is it served: its calls never end.
_CHECK = "/grpc.health.v1.Health/Check"
_REFLECTION = "/grpc.reflection."

_Context = grpc.aio.ServicerContext[Any, Any]
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


async def refuse(context: _Context, error: Exception) -> NoReturn:
    """Ends a call with an error of the catalogue. What was unexpected is told to the log only."""
    if not isinstance(error, RolemeshError):
        logger.error("a call failed", exc_info=error)
        error = InternalError("the coordinator failed; its log says why")
    await context.abort_with_status(rpc_status.to_status(to_status(error)))
    raise AssertionError("abort_with_status returns never")


class DoorInterceptor(grpc.aio.ServerInterceptor):
    """Lets in who may call a method, and then reads the request.

    A wrong request reaches the servicer, which can say what is wrong. One of a caller who may not
    call is not waited for. So all handlers are of the kinds that read their requests themselves:
    grpc calls the others with a request, and until that has come, nothing is checked and the call
    takes one of MAX_CALLS.
    """

    def __init__(self, tokens: Tokens | None, request_s: float) -> None:
        """Prepares.

        Args:
            tokens: What callers show who have no certificate of the mesh; None: all have one.
            request_s: A call whose request has not come for so long is refused.
        """
        self._tokens = tokens
        self._request_s = request_s

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """Called by grpc for each call; None answers UNIMPLEMENTED."""
        handler = await continuation(handler_call_details)
        full_method = handler_call_details.method
        if handler is None:
            return None
        if full_method.startswith(_REFLECTION):
            return self._bounded(handler)
        if full_method == _CHECK:
            return self._open(handler)
        if full_method.startswith(f"/{SERVICE}/"):
            return self._guarded(full_method, handler)
        return None

    def _bounded(self, handler: _Handler) -> _Handler:
        """A stream of answers that ends after the time that a request may take."""

        async def serve(requests: Any, context: _Context) -> None:
            try:
                async with asyncio.timeout(self._request_s):
                    async for answer in cast(Any, handler.stream_stream)(requests, context):
                        await context.write(answer)
            except TimeoutError:
                await refuse(context, self._late())

        return grpc.stream_stream_rpc_method_handler(
            cast(Any, serve), handler.request_deserializer, handler.response_serializer
        )

    def _open(self, handler: _Handler) -> _Handler:
        """A health check, by any caller."""
        read = _reader(handler, health_pb2.HealthCheckRequest.DESCRIPTOR)

        async def serve(_: Any, context: _Context) -> Any:
            try:
                request = checked(read(await self._sent(context)))
            except Exception as error:
                await refuse(context, error)
            return await cast(Any, handler.unary_unary)(request, context)

        return grpc.stream_unary_rpc_method_handler(
            cast(Any, serve), None, handler.response_serializer
        )

    def _guarded(self, full_method: str, handler: _Handler) -> _Handler:
        """A method of CoordinatorService, which are of two kinds."""
        read = _reader(handler, rolemesh_methods()[full_method].input_type)
        stream, unary = cast(Any, handler.unary_stream), cast(Any, handler.unary_unary)

        async def let_in(context: _Context) -> Any:
            try:
                self._check_caller(full_method, context)
                return read(await self._sent(context))
            except Exception as error:
                await refuse(context, error)

        async def serve(_: Any, context: _Context) -> Any:
            return await unary(await let_in(context), context)

        async def serve_stream(_: Any, context: _Context) -> AsyncIterator[Any]:
            async with aclosing(stream(await let_in(context), context)) as answers:
                async for answer in answers:
                    yield answer

        if stream is not None:
            return grpc.stream_stream_rpc_method_handler(
                cast(Any, serve_stream), None, handler.response_serializer
            )
        return grpc.stream_unary_rpc_method_handler(
            cast(Any, serve), None, handler.response_serializer
        )

    def _check_caller(self, full_method: str, context: _Context) -> None:
        """Raises UnauthenticatedError or ForbiddenError."""
        member = member_of(context)
        if member is None and self._tokens is not None:
            metadata = context.invocation_metadata() or ()
            sent = next((str(value) for key, value in metadata if key == "authorization"), None)
            member = f"client/{self._tokens.scope_of(sent).value}"
        check_caller(full_method, member or "an unknown caller")

    async def _sent(self, context: _Context) -> bytes:
        """The bytes of the request; raises DeadlineError or InvalidRequestError without them."""
        try:
            async with asyncio.timeout(self._request_s):
                sent = await context.read()
        except TimeoutError:
            raise self._late() from None
        if sent is grpc.aio.EOF:
            raise InvalidRequestError(
                "the call has no request: send one message", reason="MESSAGE_MALFORMED"
            )
        return cast(bytes, sent)

    def _late(self) -> DeadlineError:
        return DeadlineError(
            f"the whole request has not come within {self._request_s:g} s: send it at once"
        )


def _reader(handler: _Handler, message: Any) -> Callable[[bytes], Any]:
    parse = handler.request_deserializer
    assert parse is not None
    return request_reader(parse, message)
