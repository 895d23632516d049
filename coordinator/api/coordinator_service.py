"""CoordinatorService over grpc.aio: a thin translation of `StoreOperations`."""

from __future__ import annotations

import functools
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from rolemesh.coordinator.api.credentials import SERVICE, Tokens, check_caller
from rolemesh.coordinator.api.messages import to_seconds
from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.rpc.channel import SERVER_OPTIONS
from rolemesh.rpc.errors import InternalError, InvalidRequestError, RolemeshError, to_status
from rolemesh.rpc.identity import member_of, server_credentials
from rolemesh.rpc.limits import MAX_CALLS, checked, request_reader
from rolemesh.rpc.policy import rolemesh_methods
from rolemesh.v1 import coordinator_pb2, coordinator_pb2_grpc

logger = logging.getLogger(__name__)

_OPEN = ("/grpc.health.v1.Health/", "/grpc.reflection.")
"""Beginnings of methods without a token: they reveal nothing of a run, and their callers (health
checks) know no token."""

_Method = TypeVar("_Method", bound=Callable[..., Awaitable[Any]])
_Context = grpc.aio.ServicerContext[Any, Any]


def _check_deadline(context: _Context) -> None:
    # None: the client set no deadline.
    if context.time_remaining() is None:
        raise InvalidRequestError(
            "the call carries no deadline: set a timeout", reason="DEADLINE_MISSING"
        )


async def _refuse(context: _Context, error: RolemeshError) -> NoReturn:
    await context.abort_with_status(rpc_status.to_status(to_status(error)))
    raise AssertionError("abort_with_status returns never")


def _described(error: Exception) -> RolemeshError:
    """The error as one of the catalogue. Details of an unexpected one go to the log only."""
    if isinstance(error, RolemeshError):
        return error
    logger.error("a call failed", exc_info=error)
    return InternalError("the coordinator failed; its log says why")


def _answering(method: _Method) -> _Method:
    """Ends a call with a status of the catalogue if its method fails."""

    @functools.wraps(method)
    async def answer(self: Any, request: Any, context: _Context) -> Any:
        try:
            _check_deadline(context)
            return await method(self, checked(request), context)
        except Exception as error:
            await _refuse(context, _described(error))

    return cast(_Method, answer)


class CoordinatorServicer(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Every method is the operation of the same name; see coordinator.proto."""

    def __init__(self, operations: StoreOperations) -> None:
        self._operations = operations

    @_answering
    async def GetRun(
        self, request: coordinator_pb2.GetRunRequest, context: _Context
    ) -> coordinator_pb2.GetRunResponse:
        """See coordinator.proto."""
        run = await self._operations.get_run(request.run_id)
        return coordinator_pb2.GetRunResponse(run=run)

    @_answering
    async def StopRun(
        self, request: coordinator_pb2.StopRunRequest, context: _Context
    ) -> coordinator_pb2.StopRunResponse:
        """See coordinator.proto."""
        run = await self._operations.stop_run(request.run_id)
        return coordinator_pb2.StopRunResponse(run=run)

    @_answering
    async def PauseRun(
        self, request: coordinator_pb2.PauseRunRequest, context: _Context
    ) -> coordinator_pb2.PauseRunResponse:
        """See coordinator.proto."""
        run = await self._operations.pause_run(request.run_id)
        return coordinator_pb2.PauseRunResponse(run=run)

    @_answering
    async def ResumeRun(
        self, request: coordinator_pb2.ResumeRunRequest, context: _Context
    ) -> coordinator_pb2.ResumeRunResponse:
        """See coordinator.proto."""
        run = await self._operations.resume_run(request.run_id, request.overrides)
        return coordinator_pb2.ResumeRunResponse(run=run)

    @_answering
    async def CheckpointRun(
        self, request: coordinator_pb2.CheckpointRunRequest, context: _Context
    ) -> coordinator_pb2.CheckpointRunResponse:
        """See coordinator.proto."""
        run = await self._operations.checkpoint_run(request.run_id, request.request_id)
        return coordinator_pb2.CheckpointRunResponse(run=run)

    @_answering
    async def CreateRun(
        self, request: coordinator_pb2.CreateRunRequest, context: _Context
    ) -> coordinator_pb2.CreateRunResponse:
        """See coordinator.proto."""
        run = await self._operations.create_run(request.run_id, request.recipe, request.overrides)
        return coordinator_pb2.CreateRunResponse(run=run)

    @_answering
    async def ListRuns(
        self, request: coordinator_pb2.ListRunsRequest, context: _Context
    ) -> coordinator_pb2.ListRunsResponse:
        """See coordinator.proto."""
        runs = await self._operations.list_runs(request.page_size)
        return coordinator_pb2.ListRunsResponse(runs=runs)

    @_answering
    async def ListServices(
        self, request: coordinator_pb2.ListServicesRequest, context: _Context
    ) -> coordinator_pb2.ListServicesResponse:
        """See coordinator.proto."""
        services = await self._operations.list_services()
        return coordinator_pb2.ListServicesResponse(services=services)

    @_answering
    async def GetMetrics(
        self, request: coordinator_pb2.GetMetricsRequest, context: _Context
    ) -> coordinator_pb2.GetMetricsResponse:
        """See coordinator.proto."""
        return await self._operations.get_metrics(
            request.run_id,
            request.names,
            request.from_step,
            request.max_steps,
            thin=request.thin,
        )

    @_answering
    async def GetDataflow(
        self, request: coordinator_pb2.GetDataflowRequest, context: _Context
    ) -> coordinator_pb2.GetDataflowResponse:
        """See coordinator.proto."""
        return await self._operations.get_dataflow(request.run_id, request.step)

    @_answering
    async def ListSamples(
        self, request: coordinator_pb2.ListSamplesRequest, context: _Context
    ) -> coordinator_pb2.ListSamplesResponse:
        """See coordinator.proto."""
        return await self._operations.list_samples(request.run_id, request.step)

    @_answering
    async def GetDeviceUse(
        self, request: coordinator_pb2.GetDeviceUseRequest, context: _Context
    ) -> coordinator_pb2.GetDeviceUseResponse:
        """See coordinator.proto."""
        since = to_seconds(request.since)
        return await self._operations.get_device_use(request.run_id, since)

    @_answering
    async def ListAlerts(
        self, request: coordinator_pb2.ListAlertsRequest, context: _Context
    ) -> coordinator_pb2.ListAlertsResponse:
        """See coordinator.proto."""
        return await self._operations.list_alerts(request.run_id)

    @_answering
    async def ReadLog(
        self, request: coordinator_pb2.ReadLogRequest, context: _Context
    ) -> coordinator_pb2.ReadLogResponse:
        """See coordinator.proto."""
        return await self._operations.read_log(
            request.run_id, request.log, request.offset, request.max_bytes
        )

    @_answering
    async def AttachRun(
        self, request: coordinator_pb2.AttachRunRequest, context: _Context
    ) -> coordinator_pb2.AttachRunResponse:
        """See coordinator.proto."""
        return await self._operations.attach_run(request.run_id)

    @_answering
    async def LogStep(
        self, request: coordinator_pb2.LogStepRequest, context: _Context
    ) -> coordinator_pb2.LogStepResponse:
        """See coordinator.proto."""
        run = await self._operations.log_step(
            request.run_id,
            request.fencing_epoch,
            request.step,
            dict(request.metrics),
            list(request.samples),
        )
        return coordinator_pb2.LogStepResponse(run=run)

    async def WatchRun(
        self, request: coordinator_pb2.WatchRunRequest, context: _Context
    ) -> AsyncIterator[coordinator_pb2.WatchRunResponse]:
        """See coordinator.proto."""
        try:
            _check_deadline(context)
            checked(request)
            events = self._operations.watch_run(request.run_id, request.after_event_id)
            async for event in events:
                yield coordinator_pb2.WatchRunResponse(event=event)
        except Exception as error:
            await _refuse(context, _described(error))


class DoorInterceptor(grpc.aio.ServerInterceptor):
    """Lets in who may call a method, and then reads the request.

    A wrong request reaches the servicer, which can say what is wrong. One of a caller who may not
    call is not looked at.
    """

    def __init__(self, tokens: Tokens | None) -> None:
        """Prepares.

        Args:
            tokens: What callers show who have no certificate of the mesh; None: all have one.
        """
        self._tokens = tokens

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Called by grpc for each call."""
        handler = await continuation(handler_call_details)
        full_method = handler_call_details.method
        if handler is None or full_method.startswith(_OPEN):
            return handler
        parse = handler.request_deserializer
        assert parse is not None
        read = request_reader(parse, rolemesh_methods()[full_method].input_type)
        # The kind of the handler, which is one of the two that CoordinatorService has.
        stream, unary = handler.unary_stream, cast(Any, handler.unary_unary)

        async def serve(sent: bytes, context: _Context) -> Any:
            await self._let_in(full_method, context)
            return await unary(read(sent), context)

        async def serve_stream(sent: bytes, context: _Context) -> AsyncIterator[Any]:
            await self._let_in(full_method, context)
            async with aclosing(cast(Any, stream)(read(sent), context)) as answers:
                async for answer in answers:
                    yield answer

        if stream is not None:
            return grpc.unary_stream_rpc_method_handler(
                serve_stream, None, handler.response_serializer
            )
        return grpc.unary_unary_rpc_method_handler(
            cast(Any, serve), None, handler.response_serializer
        )

    async def _let_in(self, full_method: str, context: _Context) -> None:
        """Ends the call of a caller who may not make it."""
        try:
            member = member_of(context)
            if member is None and self._tokens is not None:
                metadata = context.invocation_metadata() or ()
                sent = next((str(value) for key, value in metadata if key == "authorization"), None)
                member = f"client/{self._tokens.scope_of(sent).value}"
            check_caller(full_method, member or "an unknown caller")
        except Exception as error:
            await _refuse(context, _described(error))


async def serve_coordinator(
    operations: StoreOperations,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    tokens: Tokens | None = None,
    certificate: Path | None = None,
    members_only: bool = False,
) -> tuple[grpc.aio.Server, int]:
    """Starts CoordinatorService, health and reflection on the running loop.

    Args:
        operations: The operations that it serves.
        host: Address to bind.
        port: Port to bind; 0 takes a free one.
        tokens: What callers of CoordinatorService have to show; None asks for none.
        certificate: File of read_certificate, to speak TLS; None: in clear.
        members_only: Whether callers show a certificate of the mesh instead of a token; the
            server's own is an identity then.

    Returns:
        The started server, and its port.

    Raises:
        ValueError: The port is in use, or the certificate cannot be used.
    """
    server = grpc.aio.server(
        interceptors=(DoorInterceptor(None if members_only else tokens or Tokens()),),
        options=SERVER_OPTIONS,
        maximum_concurrent_rpcs=MAX_CALLS,
    )
    coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(
        CoordinatorServicer(operations), server
    )
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    for name in ("", SERVICE):
        await checks.set(name, health_pb2.HealthCheckResponse.SERVING)
    reflection.enable_server_reflection(
        (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server
    )
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
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
