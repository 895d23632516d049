"""The client of a coordinator for programs without an event loop."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rolemesh.coordinator.sdk.async_client import FIRST_LOG_BYTES, AsyncClient
from rolemesh.coordinator.sdk.mesh import Mesh
from rolemesh.coordinator.sdk.retrying import RetryPolicy
from rolemesh.coordinator.sdk.values.events import Event
from rolemesh.coordinator.sdk.values.experts import ExpertLoads
from rolemesh.coordinator.sdk.values.runs import (
    Alert,
    Dataflow,
    DeviceUse,
    LogPiece,
    MetricTable,
    RegisteredService,
    Run,
    RunList,
    RunPlan,
)
from rolemesh.coordinator.sdk.values.samples import Samples
from rolemesh.rpc.loop_thread import LoopThread
from rolemesh.rpc.members.identity import Identity


class Client:
    """AsyncClient without await: the same methods with the same arguments.

    May be used from any thread, also from a notebook's. Its connection lives on a thread of its
    own, which close, or the end of a with block, ends.

    Example::

        with Client("127.0.0.1:50050") as client:
            for event in client.watch_run("run-1"):
                print(event)
            print(client.get_metrics("run-1")["reward/mean"])
    """

    def __init__(
        self,
        address: str,
        *,
        token: str | None = None,
        identity: Identity | None = None,
        authority: Path | None = None,
        allow_remote: bool = False,
        deadline_s: float | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        """Prepares; arguments as of AsyncClient."""
        self._loop = LoopThread("rolemesh-sdk", "client")
        self._meshes: list[Mesh] = []

        async def make() -> AsyncClient:
            return AsyncClient(
                address,
                token=token,
                identity=identity,
                authority=authority,
                allow_remote=allow_remote,
                deadline_s=deadline_s,
                retry=retry,
            )

        try:
            self._client = self._loop.run(make())
            self.address = self._client.address
        except BaseException:
            self._loop.close()
            raise

    def __enter__(self) -> Client:
        """Returns the client."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Closes the client."""
        self.close()

    def close(self) -> None:
        """Closes the connection, and those of attached meshes; calls in flight are cancelled."""
        if self._loop.is_running:
            for mesh in self._meshes:
                mesh.close()
            self._loop.run(self._client.close())
            self._loop.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.address!r})"

    def attach(self, run_id: str, *, step: int = 1) -> Mesh:
        """Takes over a run of the algorithm "external"; its services are the caller's from now."""
        mesh = Mesh.over(self._loop.run(self._client.attach(run_id, step=step)), self._loop)
        self._meshes.append(mesh)
        return mesh

    # --- written by `make sdk` from the asynchronous class ---

    def create_run(
        self,
        recipe: str | Path | Mapping[str, Any],
        *,
        run_id: str | None = None,
        overrides: Sequence[str] = (),
    ) -> Run:
        """Starts a run.

        Args:
            recipe: YAML or JSON text, the path of a file with it, or the fields themselves.
                Relative paths within count from the folder in which the coordinator was started,
                not from that of this program or of the file.
            run_id: 1 to 128 letters, digits, dots, dashes and underscores; None makes one up.
            overrides: Fields to set besides, e.g. "run.steps=3".

        Raises:
            OSError: The file cannot be read.
            ValueError: The text is the name of a file.
        """
        return self._loop.run(self._client.create_run(recipe, run_id=run_id, overrides=overrides))

    def get_run(self, run_id: str) -> Run:
        """A run as it is now."""
        return self._loop.run(self._client.get_run(run_id))

    def list_runs(self, page_size: int = 100) -> RunList:
        """The newest runs, newest first; at most 1000."""
        return self._loop.run(self._client.list_runs(page_size))

    def stop_run(self, run_id: str) -> Run:
        """Asks it to end after the step in progress, with everything saved."""
        return self._loop.run(self._client.stop_run(run_id))

    def pause_run(self, run_id: str) -> Run:
        """Asks it to make no further step until it is resumed."""
        return self._loop.run(self._client.pause_run(run_id))

    def resume_run(self, run_id: str, *, overrides: Sequence[str] = ()) -> Run:
        """Takes the wish to pause back; starts a run that failed or was stopped from where it is.

        Args:
            run_id: The run.
            overrides: Fields of a run that has ended to set besides, e.g. "run.steps=40".
        """
        return self._loop.run(self._client.resume_run(run_id, overrides=overrides))

    def checkpoint_run(self, run_id: str) -> Run:
        """Asks it to save a checkpoint after the step in progress; an event tells that it was."""
        return self._loop.run(self._client.checkpoint_run(run_id))

    def wait_run(self, run_id: str) -> Run:
        """Waits until a run has ended, however it ended; see Run.state and Run.failure."""
        return self._loop.run(self._client.wait_run(run_id))

    def watch_run(self, run_id: str, *, after: str = "") -> Iterator[Event]:
        """Events of a run: those that were, then those that come, to its end.

        A cut, or a coordinator that starts again, is bridged: the watch goes on behind the last
        event that came, so that none is missed and none comes twice.

        Args:
            run_id: The run.
            after: Event.event_id of the last event that is known; empty: all that are kept.

        Raises:
            OutOfRangeError: EVENTS_EXPIRED: events after that one are no longer kept.
        """
        return self._loop.iterate(self._client.watch_run(run_id, after=after))

    def get_metrics(
        self,
        run_id: str,
        names: Sequence[str] = (),
        *,
        from_step: int = 0,
        thin_to: int | None = None,
    ) -> MetricTable:
        """Metrics of steps.

        Args:
            run_id: The run.
            names: Names wanted; "reward/*" stands for all that begin so. Empty: all.
            from_step: First step wanted.
            thin_to: Most steps, 1 to 1000, spread over the whole curve; None: every step.
        """
        return self._loop.run(
            self._client.get_metrics(run_id, names, from_step=from_step, thin_to=thin_to)
        )

    def get_dataflow(self, run_id: str, step: int = 0) -> Dataflow:
        """The calls of a step; 0 for the step in progress, or else the newest."""
        return self._loop.run(self._client.get_dataflow(run_id, step))

    def get_plan(self, run_id: str) -> RunPlan | None:
        """What was planned of a run, beside what its steps took; None: it was not planned."""
        return self._loop.run(self._client.get_plan(run_id))

    def list_samples(self, run_id: str, step: int = 0) -> Samples:
        """Some trajectories of a step; 0 for the newest that has any."""
        return self._loop.run(self._client.list_samples(run_id, step))

    def get_expert_loads(self, run_id: str, step: int = 0) -> ExpertLoads:
        """How often each expert of trained mixtures was chosen in a step; 0 for the newest."""
        return self._loop.run(self._client.get_expert_loads(run_id, step))

    def get_device_use(
        self, run_id: str, since: datetime.datetime | None = None
    ) -> list[DeviceUse]:
        """How busy devices were, by device; None: all that is kept.

        Raises:
            ValueError: `since` has no time zone.
        """
        return self._loop.run(self._client.get_device_use(run_id, since))

    def list_alerts(self, run_id: str) -> list[Alert]:
        """What deserves attention, the most pressing first."""
        return self._loop.run(self._client.list_alerts(run_id))

    def read_log(
        self, run_id: str, log: str = "coordinator", *, offset: int = 0, max_bytes: int = 0
    ) -> LogPiece:
        """A piece of a log.

        Args:
            run_id: The run.
            log: Its name, e.g. "coordinator", "actor" or "actor-rank-1".
            offset: First byte; negative: so many before the end.
            max_bytes: 1 to 1 MiB; 0: 64 KiB.
        """
        return self._loop.run(
            self._client.read_log(run_id, log, offset=offset, max_bytes=max_bytes)
        )

    def follow_log(
        self, run_id: str, log: str = "coordinator", *, offset: int = -FIRST_LOG_BYTES
    ) -> Iterator[str]:
        """Text of a log as it grows, to the end of the run; begins as read_log does."""
        return self._loop.iterate(self._client.follow_log(run_id, log, offset=offset))

    def list_services(self) -> list[RegisteredService]:
        """Services that the coordinator knows."""
        return self._loop.run(self._client.list_services())
