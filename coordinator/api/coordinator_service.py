"""CoordinatorService over grpc.aio: a thin translation of `Operations`."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from rolemesh.coordinator.api.credentials import TokenInterceptor
from rolemesh.coordinator.api.messages import to_seconds
from rolemesh.coordinator.api.operations import Operations
from rolemesh.rpc.channel import SERVER_OPTIONS
from rolemesh.rpc.errors import InternalError, InvalidRequestError, RolemeshError, to_status
from rolemesh.v1 import coordinator_pb2, coordinator_pb2_grpc

logger = logging.getLogger(__name__)

SERVICE = "rolemesh.v1.CoordinatorService"

_Answer = TypeVar("_Answer")
_Context = grpc.aio.ServicerContext[Any, Any]


class CoordinatorServicer(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Every method is the operation of the same name; see coordinator.proto."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    async def GetRun(
        self, request: coordinator_pb2.GetRunRequest, context: _Context
    ) -> coordinator_pb2.GetRunResponse:
        """See coordinator.proto."""

        async def work() -> coordinator_pb2.GetRunResponse:
            run = await self._operations.get_run(request.run_id)
            return coordinator_pb2.GetRunResponse(run=run)

        return await _answered(context, work)

    async def StopRun(
        self, request: coordinator_pb2.StopRunRequest, context: _Context
    ) -> coordinator_pb2.StopRunResponse:
        """See coordinator.proto."""

        async def work() -> coordinator_pb2.StopRunResponse:
            run = await self._operations.stop_run(request.run_id)
            return coordinator_pb2.StopRunResponse(run=run)

        return await _answered(context, work)

    async def PauseRun(
        self, request: coordinator_pb2.PauseRunRequest, context: _Context
    ) -> coordinator_pb2.PauseRunResponse:
        """See coordinator.proto."""

        async def work() -> coordinator_pb2.PauseRunResponse:
            run = await self._operations.pause_run(request.run_id)
            return coordinator_pb2.PauseRunResponse(run=run)

        return await _answered(context, work)

    async def ResumeRun(
        self, request: coordinator_pb2.ResumeRunRequest, context: _Context
    ) -> coordinator_pb2.ResumeRunResponse:
        """See coordinator.proto."""

        async def work() -> coordinator_pb2.ResumeRunResponse:
            run = await self._operations.resume_run(request.run_id)
            return coordinator_pb2.ResumeRunResponse(run=run)

        return await _answered(context, work)

    async def CheckpointRun(
        self, request: coordinator_pb2.CheckpointRunRequest, context: _Context
    ) -> coordinator_pb2.CheckpointRunResponse:
        """See coordinator.proto."""

        async def work() -> coordinator_pb2.CheckpointRunResponse:
            run = await self._operations.checkpoint_run(request.run_id, request.request_id)
            return coordinator_pb2.CheckpointRunResponse(run=run)

        return await _answered(context, work)

    async def CreateRun(
        self, request: coordinator_pb2.CreateRunRequest, context: _Context
    ) -> coordinator_pb2.CreateRunResponse:
        """See coordinator.proto."""

        async def work() -> coordinator_pb2.CreateRunResponse:
            run = await self._operations.create_run(
                request.run_id, request.recipe, request.overrides
            )
            return coordinator_pb2.CreateRunResponse(run=run)

        return await _answered(context, work)

    async def ListRuns(
        self, request: coordinator_pb2.ListRunsRequest, context: _Context
    ) -> coordinator_pb2.ListRunsResponse:
        """See coordinator.proto."""

        async def work() -> coordinator_pb2.ListRunsResponse:
            runs = await self._operations.list_runs(request.page_size)
            return coordinator_pb2.ListRunsResponse(runs=runs)

        return await _answered(context, work)

    async def ListServices(
        self, request: coordinator_pb2.ListServicesRequest, context: _Context
    ) -> coordinator_pb2.ListServicesResponse:
        """See coordinator.proto."""

        async def work() -> coordinator_pb2.ListServicesResponse:
            services = await self._operations.list_services()
            return coordinator_pb2.ListServicesResponse(services=services)

        return await _answered(context, work)

    async def GetMetrics(
        self, request: coordinator_pb2.GetMetricsRequest, context: _Context
    ) -> coordinator_pb2.GetMetricsResponse:
        """See coordinator.proto."""

        async def work() -> coordinator_pb2.GetMetricsResponse:
            return await self._operations.get_metrics(
                request.run_id,
                request.names,
                request.from_step,
                request.max_steps,
                thin=request.thin,
            )

        return await _answered(context, work)

    async def GetDataflow(
        self, request: coordinator_pb2.GetDataflowRequest, context: _Context
    ) -> coordinator_pb2.GetDataflowResponse:
        """See coordinator.proto."""

        async def work() -> coordinator_pb2.GetDataflowResponse:
            return await self._operations.get_dataflow(request.run_id, request.step)

        return await _answered(context, work)

    async def ListSamples(
        self, request: coordinator_pb2.ListSamplesRequest, context: _Context
    ) -> coordinator_pb2.ListSamplesResponse:
        """See coordinator.proto."""

        async def work() -> coordinator_pb2.ListSamplesResponse:
            return await self._operations.list_samples(request.run_id, request.step)

        return await _answered(context, work)

    async def GetDeviceUse(
        self, request: coordinator_pb2.GetDeviceUseRequest, context: _Context
    ) -> coordinator_pb2.GetDeviceUseResponse:
        """See coordinator.proto."""

        async def work() -> coordinator_pb2.GetDeviceUseResponse:
            since = to_seconds(request.since)
            return await self._operations.get_device_use(request.run_id, since)

        return await _answered(context, work)

    async def ListAlerts(
        self, request: coordinator_pb2.ListAlertsRequest, context: _Context
    ) -> coordinator_pb2.ListAlertsResponse:
        """See coordinator.proto."""

        async def work() -> coordinator_pb2.ListAlertsResponse:
            return await self._operations.list_alerts(request.run_id)

        return await _answered(context, work)

    async def ReadLog(
        self, request: coordinator_pb2.ReadLogRequest, context: _Context
    ) -> coordinator_pb2.ReadLogResponse:
        """See coordinator.proto."""

        async def work() -> coordinator_pb2.ReadLogResponse:
            return await self._operations.read_log(
                request.run_id, request.log, request.offset, request.max_bytes
            )

        return await _answered(context, work)

    async def AttachRun(
        self, request: coordinator_pb2.AttachRunRequest, context: _Context
    ) -> coordinator_pb2.AttachRunResponse:
        """See coordinator.proto."""

        async def work() -> coordinator_pb2.AttachRunResponse:
            return await self._operations.attach_run(request.run_id)

        return await _answered(context, work)

    async def WatchRun(
        self, request: coordinator_pb2.WatchRunRequest, context: _Context
    ) -> AsyncIterator[coordinator_pb2.WatchRunResponse]:
        """See coordinator.proto."""
        try:
            _check_deadline(context)
            events = self._operations.watch_run(request.run_id, request.after_event_id)
            async for event in events:
                yield coordinator_pb2.WatchRunResponse(event=event)
        except Exception as error:
            await _refuse(context, _described(error))


def _check_deadline(context: _Context) -> None:
    # None: the client set no deadline.
    if context.time_remaining() is None:
        raise InvalidRequestError(
            "the call carries no deadline: set a timeout", reason="DEADLINE_MISSING"
        )


async def _refuse(context: _Context, error: RolemeshError) -> NoReturn:
    await context.abort_with_status(rpc_status.to_status(to_status(error)))
    raise AssertionError("abort_with_status returns never")


async def _answered(context: _Context, work: Callable[[], Awaitable[_Answer]]) -> _Answer:
    """Returns the answer of the work; ends the call with a status of the catalogue if it fails."""
    try:
        _check_deadline(context)
        return await work()
    except Exception as error:
        await _refuse(context, _described(error))


def _described(error: Exception) -> RolemeshError:
    """The error as one of the catalogue. Details of an unexpected one go to the log only."""
    if isinstance(error, RolemeshError):
        return error
    logger.error("a call failed", exc_info=error)
    return InternalError("the coordinator failed; its log says why")


async def serve_coordinator(
    operations: Operations, *, host: str = "127.0.0.1", port: int = 0, token: str | None = None
) -> tuple[grpc.aio.Server, int]:
    """Starts CoordinatorService, health and reflection on the running loop.

    Args:
        operations: The operations that it serves.
        host: Address to bind.
        port: Port to bind; 0 takes a free one.
        token: What callers of CoordinatorService have to show; None asks for none.

    Returns:
        The started server, and its port.

    Raises:
        ValueError: The port is in use.
    """
    guards = () if token is None else (TokenInterceptor(token),)
    server = grpc.aio.server(interceptors=guards, options=SERVER_OPTIONS)
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
        bound = server.add_insecure_port(place)
    except RuntimeError as error:
        raise ValueError(
            f"port {port} on {host} cannot be bound ({error}): choose another one, or 0 for any"
        ) from error
    await server.start()
    return server, bound
