"""The door of a coordinator's gRPC server: who may call is found out before a request is read."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn, cast

import grpc

from rolemesh.coordinator.api.credentials import Tokens, check_caller
from rolemesh.rpc.errors import InternalError, RolemeshError
from rolemesh.rpc.http import awaited
from rolemesh.rpc.members.identity import member_of
from rolemesh.rpc.policy import rolemesh_methods

logger = logging.getLogger(__name__)


async def refuse(context: awaited.Context, error: Exception) -> NoReturn:
    """Ends a call with an error of the catalogue. What was unexpected is told to the log only."""
    if not isinstance(error, RolemeshError):
        logger.error("a call failed", exc_info=error)
        error = InternalError("the coordinator failed; its log says why")
    await awaited.refuse(context, error)


class DoorInterceptor(grpc.aio.ServerInterceptor):
    """Lets in who may call a method, and then reads the request.

    A wrong request reaches the servicer, which can say what is wrong. One of a caller who may not
    call is not waited for. Health checks and reflection are for everyone: they reveal nothing of a
    run, and callers of checks know no token.
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
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[awaited.Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> awaited.Handler | None:
        """Called by grpc for each call; None answers UNIMPLEMENTED."""
        handler = await continuation(handler_call_details)
        full_method = handler_call_details.method
        if handler is None:
            return None
        if full_method in rolemesh_methods():
            return self._guarded(full_method, handler)
        return awaited.standard(full_method, handler, self._request_s)

    def _guarded(self, full_method: str, handler: awaited.Handler) -> awaited.Handler:
        """A method of ours, which are of two kinds."""
        message = rolemesh_methods()[full_method].input_type
        request = awaited.AwaitedRequest(handler, message, self._request_s)
        stream, unary = cast(Any, handler.unary_stream), cast(Any, handler.unary_unary)

        async def let_in(context: awaited.Context) -> Any:
            try:
                self._check_caller(full_method, context)
                return await request.read(context)
            except Exception as error:
                await refuse(context, error)

        async def serve(_: Any, context: awaited.Context) -> Any:
            return await unary(await let_in(context), context)

        async def serve_stream(_: Any, context: awaited.Context) -> AsyncIterator[Any]:
            async with aclosing(stream(await let_in(context), context)) as answers:
                async for answer in answers:
                    yield answer

        return awaited.begun_at_once(handler, serve if stream is None else serve_stream)

    def _check_caller(self, full_method: str, context: awaited.Context) -> None:
        """Raises UnauthenticatedError or ForbiddenError."""
        member = member_of(context)
        if member is None and self._tokens is not None:
            metadata = context.invocation_metadata() or ()
            sent = next((str(value) for key, value in metadata if key == "authorization"), None)
            member = f"client/{self._tokens.scope_of(sent).value}"
        check_caller(full_method, member or "an unknown caller")
