"""Watches the services of a run: whether they answer, and what they do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from rolemesh.coordinator.dataflow.calls.connection import RoleConnection
from rolemesh.coordinator.state.store import ServiceLease, StateStore
from rolemesh.rpc.errors import CallCancelledError, DeadlineError, RolemeshError, UnavailableError
from rolemesh.v1 import worker_pb2


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchSettings:
    """How closely services are watched."""

    interval_s: float = 1.0
    """Pause between two looks at a service."""
    status_timeout_s: float = 5.0
    """Deadline of one look."""
    refusals_until_lost: int = 2
    """A service counts as lost after this many refused connections in a row. A process that is
    stopped or cut off is refused by its connection, which pings it; see WATCHED_OPTIONS."""
    silence_until_lost_s: float = 120.0
    """A service that keeps its connection but does not answer counts as lost after this long. It is
    long because loading a library may block a process for tens of seconds."""
    stall_s: float = 900.0
    """A service that is busy counts as lost when its operation and progress have been the same for
    this long; 0: never."""
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
        self._group: asyncio.TaskGroup | None = None
        """Of the watch, while it runs."""
        self.ready: set[str] = set()
        """Services that were initialised: from then on, one that does not hold the run is lost."""
        self._news: dict[str, tuple[RoleConnection, str]] = {}
        """What services said since their leases were renewed last."""

    async def run(self) -> None:
        """Watches until cancelled; raises the errors of the store."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            for connection in self._connections:
                self.add(connection)
            group.create_task(self._keep_pulse())
            # A store that is away must not keep the watch from looking.
            group.create_task(self._keep_leases())

    def add(self, connection: RoleConnection) -> None:
        """Watches one more service, until it leaves."""
        assert self._group is not None, "only while the watch runs"
        self._group.create_task(self._watch_service(connection))

    async def _keep_pulse(self) -> None:
        while True:
            await asyncio.sleep(self._settings.interval_s)
            await self._beat()

    async def _keep_leases(self) -> None:
        while True:
            await asyncio.sleep(self._settings.interval_s)
            news, self._news = self._news, {}
            for connection, status in news.values():
                lease = ServiceLease(
                    role=connection.role,
                    address=connection.address,
                    run_id=self._run_id,
                    name=connection.service,
                    pid=connection.capabilities.pid,
                    status=status,
                )
                await self._store.register_service(lease, self._settings.lease_ttl_s)

    async def _watch_service(self, connection: RoleConnection) -> None:
        look, asked = _Look(self._settings), connection.client
        while not connection.has_left:
            await connection.present()
            if connection.client is not asked:
                # Another process, of which nothing is known yet.
                look, asked = _Look(self._settings), connection.client
            # Read before the question: an answer from before the service was initialised says
            # nothing of what it holds since.
            is_ready = connection.service in self.ready
            try:
                status = await asked.within(self._settings.status_timeout_s).get_status(
                    self._run_id
                )
            except (UnavailableError, CallCancelledError) as error:
                # A server that stops cancels what it is asked.
                loss = look.refused(error.message) or look.silent()
            except DeadlineError:
                loss = look.silent(is_connected=True)
            except RolemeshError as error:
                # It answers with its own failure, and will do so for every later call.
                loss = f"is broken: {error.message}"
            else:
                loss = look.answered(status, self._run_id, is_ready=is_ready)
                if not loss and connection.client is asked and not connection.has_left:
                    self._on_devices(connection.service, status.devices)
                    self._news[connection.service] = connection, describe(status)
            # What became of a process that was replaced meanwhile is no news of its successor.
            is_news = connection.is_present and not connection.has_left
            if loss and is_news and connection.client is asked:
                self._on_lost(connection.service, f"{_name(connection)} {loss}")
                if connection.is_present:
                    return  # it is not replaced
            await asyncio.sleep(self._settings.interval_s)


class _Look:
    """What the looks at one service add up to. Each method gives what a loss is told as, or ""."""

    def __init__(self, settings: WatchSettings) -> None:
        now = asyncio.get_running_loop().time()
        self._settings = settings
        self._num_refusals = 0
        self._heard_at = now
        self._work: tuple[object, ...] | None = None
        self._work_since = now

    def refused(self, problem: str) -> str:
        """The connection is refused or broken."""
        self._num_refusals += 1
        if self._num_refusals >= self._settings.refusals_until_lost:
            return f"is gone: {problem}"
        return ""

    def silent(self, *, is_connected: bool = False) -> str:
        """No answer came."""
        if is_connected:
            self._num_refusals = 0
        silence_s = asyncio.get_running_loop().time() - self._heard_at
        if silence_s >= self._settings.silence_until_lost_s:
            return (
                f"has not answered for {silence_s:.0f} s, though its process holds the connection: "
                "see its log and whether it is stopped"
            )
        return ""

    def answered(self, status: worker_pb2.GetStatusResponse, run_id: str, *, is_ready: bool) -> str:
        """It answered; `is_ready` says whether it was initialised for the run before."""
        now = asyncio.get_running_loop().time()
        self._num_refusals, self._heard_at = 0, now
        if status.run_id != run_id:
            self._work = None
            # The Initialize of this run removes what an earlier run left behind.
            if not is_ready:
                return ""
            holds = f"holds run {status.run_id!r}" if status.run_id else "holds no run"
            return (
                f"has lost the run: it answers, but {holds}. Its process was started again, or "
                "another run took it"
            )
        if status.state == worker_pb2.WORKER_STATE_FAILED:
            return f"is broken: {status.failure or 'see its log'}"
        progress = status.progress
        work = (status.operation, progress.stage, progress.done, progress.total)
        if status.state != worker_pb2.WORKER_STATE_BUSY:
            self._work = None
        elif work != self._work:
            self._work, self._work_since = work, now
        elif 0 < self._settings.stall_s <= now - self._work_since:
            place = ", ".join(word for word in (status.operation, progress.stage) if word)
            return (
                f"has made no progress in {place} for {now - self._work_since:.0f} s: see its log"
            )
        return ""


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
