"""Requests that a server reads by itself: once it knows who calls, and for so long.

grpc calls a handler of one request with it. Until that has come nothing is checked, and a caller
who sends none holds one of MAX_CALLS. So handlers made here are of the kinds that begin at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias, cast

import grpc
from google.protobuf.descriptor import Descriptor
from grpc_health.v1 import health_pb2
from grpc_status import rpc_status

from rolemesh.rpc.errors import DeadlineError, InvalidRequestError, RolemeshError, to_status
from rolemesh.rpc.limits import checked, request_reader

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

GRACE_S = 1.0
"""A loop that could not run, since a library held Python, finds within so long what has come."""

# Methods of the standard services, which ask for no token and have no policy. Health/Watch is not
# one of them: its calls never end.
_CHECK = "/grpc.health.v1.Health/Check"
_REFLECTION = "/grpc.reflection."


class AwaitedRequest:
    """Reads the one request of each call of a method."""

    def __init__(self, handler: Handler, message: Descriptor, within_s: float) -> None:
        """Prepares.

        Args:
            handler: Of the method, as generated code makes it.
            message: Type of its request.
            within_s: A call whose request has not come for so long is refused.
        """
        parse = handler.request_deserializer
        self._parse = None if parse is None else request_reader(parse, message)
        self._within_s = within_s

    async def read(self, context: Context) -> Any:
        """The request of a call, for `checked`; it may be one that nothing can be made of.

        Raises:
            DeadlineError: It has not come in time.
            InvalidRequestError: MESSAGE_MALFORMED: the caller sends none.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as bound:
                # Not at once: after minutes without a turn of the loop, the first one may see that
                # the time is over before it sees the request.
                timer = loop.call_later(
                    self._within_s, lambda: bound.reschedule(loop.time() + GRACE_S)
                )
                try:
                    sent = await context.read()
                finally:
                    timer.cancel()
        except TimeoutError:
            raise late(self._within_s) from None
        if sent is grpc.aio.EOF:
            raise InvalidRequestError(
                "no request has come: send one message, of 4 MiB at most",
                reason="MESSAGE_MALFORMED",
            )
        return sent if self._parse is None else self._parse(cast(bytes, sent))


def begun_at_once(handler: Handler, serve: Callable[[Any, Context], Any]) -> Handler:
    """A handler that reads its request by itself, in place of one that grpc calls with it.

    Args:
        handler: What it stands for.
        serve: Gets an iterator, which it leaves alone, and the context.
    """
    make = (
        grpc.stream_stream_rpc_method_handler
        if handler.response_streaming
        else grpc.stream_unary_rpc_method_handler
    )
    return make(cast(Any, serve), None, handler.response_serializer)


def standard(full_method: str, handler: Handler, within_s: float) -> Handler | None:
    """The handler of a health check or of reflection, for callers of any kind.

    Args:
        full_method: The method.
        handler: Of the library.
        within_s: How long a check waits for its request; how long reflection lasts.

    Returns:
        None for all other methods, which are not served.
    """
    if full_method == _CHECK:
        return _check(handler, within_s)
    if full_method.startswith(_REFLECTION):
        return _reflection(handler, within_s)
    return None


def _check(handler: Handler, within_s: float) -> Handler:
    request = AwaitedRequest(handler, health_pb2.HealthCheckRequest.DESCRIPTOR, within_s)

    async def serve(_: Any, context: Context) -> Any:
        try:
            asked = checked(await request.read(context))
        except RolemeshError as error:
            await refuse(context, error)
        return await cast(Any, handler.unary_unary)(asked, context)

    return begun_at_once(handler, serve)


def _reflection(handler: Handler, within_s: float) -> Handler:
    async def serve(requests: Any, context: Context) -> None:
        try:
            async with asyncio.timeout(within_s):
                async for answer in cast(Any, handler.stream_stream)(requests, context):
                    await context.write(answer)
        except TimeoutError:
            await refuse(context, late(within_s))

    return grpc.stream_stream_rpc_method_handler(
        cast(Any, serve), handler.request_deserializer, handler.response_serializer
    )


def late(within_s: float) -> DeadlineError:
    """The refusal of a call whose request has not come."""
    return DeadlineError(f"the whole request has not come within {within_s:g} s: send it at once")


async def refuse(context: Context, error: RolemeshError) -> NoReturn:
    """Ends a call with an error of the catalogue."""
    await context.abort_with_status(rpc_status.to_status(to_status(error)))
    raise AssertionError("abort_with_status returns never")
