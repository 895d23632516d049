"""CoordinatorService over grpc.aio: runs and services as the store knows them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
from google.protobuf import timestamp_pb2
from grpc_status import rpc_status

from rolemesh.coordinator.state.store import (
    RunNotFoundError,
    RunRecord,
    RunState,
    ServiceLease,
    StateStore,
    StoreUnavailableError,
)
from rolemesh.rpc.channel import SERVER_OPTIONS
from rolemesh.rpc.errors import (
    InvalidRequestError,
    NotFoundError,
    RolemeshError,
    UnavailableError,
    to_status,
)
from rolemesh.v1 import coordinator_pb2, coordinator_pb2_grpc

DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000

_STATES = {
    RunState.STARTING: coordinator_pb2.RUN_STATE_STARTING,
    RunState.RUNNING: coordinator_pb2.RUN_STATE_RUNNING,
    RunState.SUCCEEDED: coordinator_pb2.RUN_STATE_SUCCEEDED,
    RunState.STOPPED: coordinator_pb2.RUN_STATE_STOPPED,
    RunState.FAILED: coordinator_pb2.RUN_STATE_FAILED,
}

_Answer = TypeVar("_Answer")


class CoordinatorServicer(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Answers from the store alone: it need not be the process that makes the run."""

    def __init__(self, store: StateStore) -> None:
        self._store = store

    async def GetRun(
        self, request: coordinator_pb2.GetRunRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> coordinator_pb2.GetRunResponse:
        """See coordinator.proto."""

        async def work() -> coordinator_pb2.GetRunResponse:
            record = await self._store.get_run(request.run_id)
            return coordinator_pb2.GetRunResponse(run=to_run(record))

        return await _answered(context, work)

    async def ListRuns(
        self, request: coordinator_pb2.ListRunsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> coordinator_pb2.ListRunsResponse:
        """See coordinator.proto."""

        async def work() -> coordinator_pb2.ListRunsResponse:
            if not 0 <= request.page_size <= MAX_PAGE_SIZE:
                raise InvalidRequestError(
                    f"page_size is {request.page_size}: give 1 to {MAX_PAGE_SIZE}, or 0 for "
                    f"{DEFAULT_PAGE_SIZE}"
                )
            records = await self._store.list_runs(request.page_size or DEFAULT_PAGE_SIZE)
            return coordinator_pb2.ListRunsResponse(runs=[to_run(record) for record in records])

        return await _answered(context, work)

    async def StopRun(
        self, request: coordinator_pb2.StopRunRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> coordinator_pb2.StopRunResponse:
        """See coordinator.proto."""

        async def work() -> coordinator_pb2.StopRunResponse:
            record = await self._store.get_run(request.run_id)
            if not record.state.is_final:
                await self._store.update_run(request.run_id, stop_requested=True)
                record = await self._store.get_run(request.run_id)
            return coordinator_pb2.StopRunResponse(run=to_run(record))

        return await _answered(context, work)

    async def ListServices(
        self,
        request: coordinator_pb2.ListServicesRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> coordinator_pb2.ListServicesResponse:
        """See coordinator.proto."""

        async def work() -> coordinator_pb2.ListServicesResponse:
            leases = await self._store.list_services()
            return coordinator_pb2.ListServicesResponse(
                services=[to_registered_service(lease) for lease in leases]
            )

        return await _answered(context, work)


def to_run(record: RunRecord) -> coordinator_pb2.Run:
    """A record as it travels; a run that is asked to stop and has not ended is STOPPING."""
    state = _STATES[record.state]
    if record.stop_requested and not record.state.is_final:
        state = coordinator_pb2.RUN_STATE_STOPPING
    return coordinator_pb2.Run(
        run_id=record.run_id,
        name=record.name,
        state=state,
        step=record.step,
        num_steps=record.num_steps,
        created_at=_timestamp(record.created_at),
        updated_at=_timestamp(record.updated_at),
        directory=record.directory,
        failure=record.failure,
        metrics=record.metrics,
    )


def to_registered_service(lease: ServiceLease) -> coordinator_pb2.RegisteredService:
    """A lease as it travels."""
    return coordinator_pb2.RegisteredService(
        role=lease.role,
        address=lease.address,
        pid=lease.pid,
        lease_until=_timestamp(lease.lease_until),
        status=lease.status,
    )


def _timestamp(seconds: float) -> timestamp_pb2.Timestamp:
    nanos = round(seconds * 1e9)
    return timestamp_pb2.Timestamp(seconds=nanos // 10**9, nanos=nanos % 10**9)


async def _answered(
    context: grpc.aio.ServicerContext[Any, Any], work: Callable[[], Awaitable[_Answer]]
) -> _Answer:
    """The answer, or the status of the catalogue for what went wrong."""
    error: RolemeshError
    try:
        # None: the client set no deadline.
        if context.time_remaining() is None:
            raise InvalidRequestError(
                "the call carries no deadline: set a timeout", reason="DEADLINE_MISSING"
            )
        return await work()
    except RunNotFoundError as missing:
        error = NotFoundError(
            str(missing), reason="RUN_NOT_FOUND", metadata={"run_id": missing.run_id}
        )
    except StoreUnavailableError as unavailable:
        error = UnavailableError(
            str(unavailable), reason="STORE_UNAVAILABLE", metadata={"url": unavailable.url}
        )
    except RolemeshError as refused:
        error = refused
    await context.abort_with_status(rpc_status.to_status(to_status(error)))
    raise AssertionError("abort_with_status returns never")


async def serve_coordinator(
    store: StateStore, *, host: str = "127.0.0.1", port: int = 0
) -> tuple[grpc.aio.Server, int]:
    """Starts CoordinatorService on the running loop.

    Args:
        store: What it answers from.
        host: Address to bind; loopback by default, since calls carry no credentials.
        port: Port to bind; 0 takes a free one.

    Returns:
        The started server, and its port.

    Raises:
        ValueError: The port is in use.
    """
    server = grpc.aio.server(options=SERVER_OPTIONS)
    coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(
        CoordinatorServicer(store), server
    )
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise ValueError(
            f"port {port} on {host} cannot be bound ({error}): choose another one, or 0 for any"
        ) from error
    await server.start()
    return server, bound
