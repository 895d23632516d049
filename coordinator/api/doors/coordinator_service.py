"""CoordinatorService over grpc.aio: a thin translation of `StoreOperations`."""

from __future__ import annotations

import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.timestamp_pb2 import Timestamp
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from rolemesh.coordinator.api.credentials import SERVICE, Tokens
from rolemesh.coordinator.api.doors.door_interceptor import DoorInterceptor, refuse
from rolemesh.coordinator.api.messages import to_seconds
from rolemesh.coordinator.api.registry import register
from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.rpc.address import host_and_port
from rolemesh.rpc.channel import SERVER_OPTIONS
from rolemesh.rpc.errors import InvalidRequestError
from rolemesh.rpc.limits import MAX_CALLS, REQUEST_S, checked
from rolemesh.rpc.members.identity import Identity, member_of, server_credentials
from rolemesh.v1 import (
    coordinator_pb2,
    coordinator_pb2_grpc,
    registry_pb2,
    registry_pb2_grpc,
)

METHODS = coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"].methods

_Context = grpc.aio.ServicerContext[Any, Any]
_Method: TypeAlias = Callable[[Any, _Context], Awaitable[Any]]


def _check_deadline(context: _Context) -> None:
    # None: the client set no deadline.
    if context.time_remaining() is None:
        raise InvalidRequestError(
            "the call carries no deadline: set a timeout", reason="DEADLINE_MISSING"
        )


def _answering(method: _Method) -> _Method:
    """Ends a call with a status of the catalogue if its method fails."""

    async def answer(request: Any, context: _Context) -> Any:
        try:
            _check_deadline(context)
            return await method(checked(request), context)
        except Exception as error:
            await refuse(context, error)

    return answer


def _coordinator_servicer(operations: StoreOperations) -> Any:
    """Serves each method by the operation of the same name; see coordinator.proto."""

    async def watch(request: Any, context: _Context) -> AsyncIterator[Any]:
        try:
            _check_deadline(context)
            checked(request)
            events = operations.watch_run(request.run_id, request.after_event_id)
            async for event in events:
                yield coordinator_pb2.WatchRunResponse(event=event)
        except Exception as error:
            await refuse(context, error)

    others = {
        method.name: _answering(_operation(operations, method))
        for method in METHODS
        if not method.server_streaming
    }
    return SimpleNamespace(WatchRun=watch, **others)


def _operation(operations: StoreOperations, method: MethodDescriptor) -> _Method:
    """The operation of a method, which takes the fields of the request by their names.

    It answers with the response, or with what its only field holds.
    """
    operation = getattr(operations, operation_of(method))
    response = getattr(coordinator_pb2, method.output_type.name)

    async def answer(request: Any, context: _Context) -> Any:
        given = {field.name: getattr(request, field.name) for field in method.input_type.fields}
        for name, value in given.items():
            if isinstance(value, Timestamp):
                given[name] = to_seconds(value)
        answered = await operation(**given)
        if isinstance(answered, response):
            return answered
        (field,) = method.output_type.fields
        return response(**{field.name: answered})

    return answer


def operation_of(method: MethodDescriptor) -> str:
    """Name of the operation of a method, e.g. "get_run" of GetRun."""
    return re.sub(r"\B[A-Z]", r"_\g<0>", method.name).lower()


async def serve_coordinator(
    operations: StoreOperations,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    tokens: Tokens | None = None,
    certificate: Path | None = None,
    members_only: bool = False,
    request_s: float = REQUEST_S,
    tell_port: Callable[[int], None] | None = None,
) -> tuple[grpc.aio.Server, int]:
    """Starts CoordinatorService, health (Check) and reflection on the running loop.

    For members of the mesh RegistryService besides.

    Args:
        operations: The operations that it serves.
        host: Address to bind.
        port: Port to bind; 0 takes a free one.
        tokens: What callers of CoordinatorService have to show; None asks for none.
        certificate: File of read_certificate, to speak TLS; None: in clear.
        members_only: Whether callers show a certificate of the mesh instead of a token; the
            server's own is an identity then.
        request_s: A call whose request has not come for so long is refused.
        tell_port: Told the port before the first call is answered.

    Returns:
        The started server, and its port.

    Raises:
        ValueError: The port is in use, or the certificate cannot be used.
    """
    door = DoorInterceptor(None if members_only else tokens or Tokens(), request_s)
    server = grpc.aio.server(
        interceptors=(door,),
        options=SERVER_OPTIONS,
        maximum_concurrent_rpcs=MAX_CALLS,
    )
    coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(
        _coordinator_servicer(operations), server
    )
    served = [SERVICE]
    if members_only and certificate is not None:
        # Callers without a certificate could put any address in the place of a role.
        mesh = Identity.read(certificate).mesh

        async def enter(request: Any, context: _Context) -> Any:
            return await register(operations.store, mesh, request, member_of(context) or "")

        registry_pb2_grpc.add_RegistryServiceServicer_to_server(
            cast(Any, SimpleNamespace(RegisterService=_answering(enter))), server
        )
        served.append(registry_pb2.DESCRIPTOR.services_by_name["RegistryService"].full_name)
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    for name in ("", *served):
        await checks.set(name, health_pb2.HealthCheckResponse.SERVING)
    reflection.enable_server_reflection(
        (*served, health.SERVICE_NAME, reflection.SERVICE_NAME), server
    )
    place = host_and_port(host, port)
    try:
        _check_port_is_free(host, port)
        if certificate is None:
            bound = server.add_insecure_port(place)
        else:
            shown = server_credentials(certificate, members_only=members_only)
            bound = server.add_secure_port(place, shown)
    except (OSError, RuntimeError) as error:
        raise ValueError(
            f"port {port} on {host} cannot be bound ({error}): choose another one, or 0 for any"
        ) from error
    if tell_port is not None:
        tell_port(bound)
    await server.start()
    return server, bound


def _check_port_is_free(host: str, port: int) -> None:
    """Raises OSError where no server can listen; gRPC itself would print lines of its own."""
    if port == 0:
        return
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
