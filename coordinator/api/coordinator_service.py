"""CoordinatorService over grpc.aio: a thin translation of `StoreOperations`."""

from __future__ import annotations

import functools
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from rolemesh.coordinator.api.credentials import SERVICE, Tokens
from rolemesh.coordinator.api.door_interceptor import DoorInterceptor, refuse
from rolemesh.coordinator.api.messages import to_seconds
from rolemesh.coordinator.api.registry import Registry
from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.rpc.address import host_and_port
from rolemesh.rpc.channel import SERVER_OPTIONS
from rolemesh.rpc.errors import InvalidRequestError
from rolemesh.rpc.identity import Identity, member_of, server_credentials
from rolemesh.rpc.limits import MAX_CALLS, REQUEST_S, checked
from rolemesh.v1 import (
    coordinator_pb2,
    coordinator_pb2_grpc,
    registry_pb2,
    registry_pb2_grpc,
)

_Method = TypeVar("_Method", bound=Callable[..., Awaitable[Any]])
_Context = grpc.aio.ServicerContext[Any, Any]


def _check_deadline(context: _Context) -> None:
    # None: the client set no deadline.
    if context.time_remaining() is None:
        raise InvalidRequestError(
            "the call carries no deadline: set a timeout", reason="DEADLINE_MISSING"
        )


def _answering(method: _Method) -> _Method:
    """Ends a call with a status of the catalogue if its method fails."""

    @functools.wraps(method)
    async def answer(self: Any, request: Any, context: _Context) -> Any:
        try:
            _check_deadline(context)
            return await method(self, checked(request), context)
        except Exception as error:
            await refuse(context, error)

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
    async def GetPlan(
        self, request: coordinator_pb2.GetPlanRequest, context: _Context
    ) -> coordinator_pb2.GetPlanResponse:
        """See coordinator.proto."""
        return await self._operations.get_plan(request.run_id)

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
            await refuse(context, error)


class RegistryServicer(registry_pb2_grpc.RegistryServiceServicer):
    """See registry.proto."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    @_answering
    async def RegisterService(
        self, request: registry_pb2.RegisterServiceRequest, context: _Context
    ) -> registry_pb2.RegisterServiceResponse:
        """See registry.proto."""
        return await self._registry.register(request, member_of(context) or "")


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
        CoordinatorServicer(operations), server
    )
    served = [SERVICE]
    if members_only and certificate is not None:
        # Callers without a certificate could put any address in the place of a role.
        registry = Registry(operations.store, Identity.read(certificate).mesh)
        registry_pb2_grpc.add_RegistryServiceServicer_to_server(RegistryServicer(registry), server)
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
