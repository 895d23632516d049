"""The token of a coordinator: where it is read from, and which callers have to show it."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import grpc
from grpc_status import rpc_status

from rolemesh.coordinator.state.files import checked_secret, read_secret
from rolemesh.engine.specs.urls import is_loopback
from rolemesh.rpc.errors import RolemeshError, to_status

TOKEN_VARIABLE = "ROLEMESH_API_TOKEN"

CLIENT_FILE = "client.pem"
"""In the folder of a run that a client drives, while its coordinator lives: the identity by which
its services know the client. AttachRun hands it out."""

_OPEN = ("/grpc.health.v1.Health/", "/grpc.reflection.")
"""Beginnings of methods without a token: they reveal nothing of a run, and their callers (health
checks) know no token."""


class UnauthenticatedError(RolemeshError):
    """The caller has not shown the token."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNAUTHENTICATED
    default_reason: ClassVar[str] = "TOKEN_MISSING"


def read_token(token_file: Path | None, environment: Mapping[str, str]) -> str | None:
    """The token of this coordinator; None where it has none.

    Args:
        token_file: File that holds the token; it takes precedence over the variable.
        environment: Environment of this process; its TOKEN_VARIABLE may hold the token.

    Raises:
        ValueError: The file cannot be read, or what it holds cannot be a token.
    """
    if token_file is not None:
        return read_secret(token_file, "token_file")
    text = environment.get(TOKEN_VARIABLE)
    return None if text is None else checked_secret(text, TOKEN_VARIABLE)


def check_exposure(host: str, token: str | None) -> None:
    """Refuses to listen on a host that other machines can reach when there is no token.

    Raises:
        ValueError: The host is not of the loopback interface, and there is no token.
    """
    if token is None and not is_loopback(host):
        raise ValueError(
            f"host is {host!r}, which others can reach, and there is no token: a machine that can "
            f"reach a coordinator can start programs here. Set {TOKEN_VARIABLE}, or give a token "
            "file, or listen on 127.0.0.1"
        )


def refusal(sent: str | None, token: str) -> UnauthenticatedError | None:
    """Returns the error for a caller without the right token; None when the token is right.

    Args:
        sent: Value of the caller's header "authorization", None where there is none.
        token: Token of this coordinator.
    """
    if sent is None:
        return UnauthenticatedError(
            "send the token of this coordinator: authorization: Bearer <token>"
        )
    scheme, _, given = sent.partition(" ")
    # As bytes: compare_digest refuses text beyond ASCII.
    if scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), token.encode()):
        return None
    return UnauthenticatedError(
        f"that is not the token of this coordinator: see {TOKEN_VARIABLE} or the file that it was "
        "started with",
        reason="TOKEN_INVALID",
    )


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Asks for the token in every call but those of health and reflection."""

    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Called by grpc for each call."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(_OPEN):
            return handler
        metadata = handler_call_details.invocation_metadata or ()
        sent = next((str(value) for key, value in metadata if key == "authorization"), None)
        error = refusal(sent, self._token)
        return handler if error is None else _refusing(handler, error)


def _refusing(
    handler: grpc.RpcMethodHandler[Any, Any], error: RolemeshError
) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler of the same kind that answers with the error."""

    async def refuse(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
        await context.abort_with_status(rpc_status.to_status(to_status(error)))
        raise AssertionError("abort_with_status returns never")

    make = (
        grpc.unary_stream_rpc_method_handler
        if handler.response_streaming
        else grpc.unary_unary_rpc_method_handler
    )
    refusing: grpc.RpcMethodHandler[Any, Any] = make(
        refuse, handler.request_deserializer, handler.response_serializer
    )
    return refusing
