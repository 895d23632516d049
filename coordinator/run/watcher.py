"""Watches the services of a run: whether they answer, and what they do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from rolemesh.coordinator.dataflow.connection import RoleConnection
from rolemesh.coordinator.state.store import ServiceLease, StateStore
from rolemesh.rpc.errors import DeadlineError, RolemeshError, UnavailableError
from rolemesh.v1 import worker_pb2


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchSettings:
    """How closely services are watched."""

    interval_s: float = 1.0
    """Pause between two looks at a service."""
    status_timeout_s: float = 5.0
    """Deadline of one look."""
    refusals_until_lost: int = 2
    """A service counts as lost after this many refused connections in a row."""
    silence_until_lost_s: float = 120.0
    """A service that keeps its connection but does not answer counts as lost after this long. It is
    long because loading a library may block a process for tens of seconds."""
    lease_ttl_s: float = 15.0
    """Life of a service's entry in the registry."""


class Watcher:
    """Watches every service of one run, and keeps the run's pulse.

    Owner: the coordinator's loop. `run` never returns; cancel its task.
    """

    def __init__(
        self,
        connections: Sequence[RoleConnection],
        store: StateStore,
        run_id: str,
        settings: WatchSettings,
        *,
        on_lost: Callable[[str, str], None],
        on_devices: Callable[[str, Sequence[worker_pb2.DeviceUse]], None],
        beat: Callable[[], Awaitable[None]],
    ) -> None:
        """Prepares.

        Args:
            connections: The services.
            store: Store that gets their leases.
            run_id: Id of the run.
            settings: How closely to watch.
            on_lost: Called with role and cause when a service is lost.
            on_devices: Called with service and use of its devices at every look.
            beat: Called once in each interval; its errors end the watch.
        """
        self._connections = connections
        self._store = store
        self._run_id = run_id
        self._settings = settings
        self._on_lost = on_lost
        self._on_devices = on_devices
        self._beat = beat

    async def run(self) -> None:
        """Watches until cancelled; raises the errors of the store."""
        async with asyncio.TaskGroup() as group:
            for connection in self._connections:
                group.create_task(self._watch_service(connection))
            group.create_task(self._keep_pulse())

    async def _keep_pulse(self) -> None:
        while True:
            await asyncio.sleep(self._settings.interval_s)
            await self._beat()

    async def _watch_service(self, connection: RoleConnection) -> None:
        loop = asyncio.get_running_loop()
        refusals, heard_at = 0, loop.time()
        while True:
            problem = ""
            try:
                client = connection.client.within(self._settings.status_timeout_s)
                status = await client.get_status(self._run_id)
            except UnavailableError as error:
                refusals += 1
                problem = error.message
            except DeadlineError:
                refusals = 0
            except RolemeshError as error:
                # It answers with its own failure, and will do so for every later call.
                self._on_lost(connection.service, f"{_name(connection)} is broken: {error.message}")
                return
            else:
                refusals, heard_at = 0, loop.time()
                # The Initialize of this run removes what an earlier run left behind.
                is_ours = status.run_id == self._run_id
                if status.state == worker_pb2.WORKER_STATE_FAILED and is_ours:
                    problem = status.failure or "see its log"
                    self._on_lost(connection.service, f"{_name(connection)} is broken: {problem}")
                    return
                self._on_devices(connection.service, status.devices)
                await self._renew(connection, describe(status))
            if refusals >= self._settings.refusals_until_lost:
                self._on_lost(connection.service, f"{_name(connection)} is gone: {problem}")
                return
            silence_s = loop.time() - heard_at
            if silence_s >= self._settings.silence_until_lost_s:
                self._on_lost(
                    connection.service,
                    f"{_name(connection)} has not answered for {silence_s:.0f} s, though its "
                    "process holds the connection: see its log and whether it is stopped",
                )
                return
            await asyncio.sleep(self._settings.interval_s)

    async def _renew(self, connection: RoleConnection, status: str) -> None:
        lease = ServiceLease(
            role=connection.role,
            address=connection.address,
            run_id=self._run_id,
            name=connection.service,
            pid=connection.capabilities.pid,
            status=status,
        )
        await self._store.register_service(lease, self._settings.lease_ttl_s)


def describe(status: worker_pb2.GetStatusResponse) -> str:
    """A status in a few plain words, e.g. "busy: actor.update, backward 3 of 8"."""
    state = worker_pb2.WorkerState.Name(status.state).removeprefix("WORKER_STATE_").lower()
    if not status.operation:
        return state
    text = f"{state}: {status.operation}"
    if status.progress.stage:
        text += f", {status.progress.stage}"
    if status.progress.total:
        text += f" {status.progress.done} of {status.progress.total}"
    return text


def _name(connection: RoleConnection) -> str:
    pid = connection.capabilities.pid
    process = f"pid {pid}, " if pid else ""
    return (
        f"{connection.service} rank {connection.capabilities.rank} ({process}{connection.address})"
    )
