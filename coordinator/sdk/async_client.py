"""The asynchronous client of a coordinator."""

from __future__ import annotations

import asyncio
import datetime
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rolemesh.coordinator.sdk.async_mesh import AsyncMesh
from rolemesh.coordinator.sdk.connection import Connection
from rolemesh.coordinator.sdk.retrying import Contact, Retries, RetryPolicy, repeated
from rolemesh.coordinator.sdk.values.events import Event, StateChanged
from rolemesh.coordinator.sdk.values.experts import ExpertLoads
from rolemesh.coordinator.sdk.values.messages import from_message
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
from rolemesh.rpc.channel import MeshCall, open_channel
from rolemesh.rpc.errors import CallCancelledError, DeadlineError, UnavailableError
from rolemesh.rpc.members.identity import Identity
from rolemesh.v1 import coordinator_pb2 as pb
from rolemesh.v1 import coordinator_pb2_grpc

Answer = TypeVar("Answer")

_LOOK_AGAIN_S = 0.5
FIRST_LOG_BYTES = 64 * 2**10
"""How much of a log follow_log begins with."""


class AsyncClient:
    """Talks to one coordinator. Owner: the loop on which it is used.

    Every method raises a RolemeshError and nothing of gRPC. A call whose peer does not answer is
    repeated within the budget of `retry`, since all of them are idempotent.

    Example::

        async with AsyncClient("127.0.0.1:50050") as client:
            run = await client.create_run(Path("recipe.yaml"))
            async for event in client.watch_run(run.run_id):
                print(event)
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
        """Prepares; the connection is made by the first call.

        Args:
            address: "host:port" of the coordinator's gRPC server, or "https://host:port" where it
                speaks TLS. Of coordinators that this user started on this host, TLS and token are
                found by the address alone.
            token: Bearer token, where the coordinator asks for one.
            identity: Of this client in the mesh, in place of a token, at the coordinator's port for
                members; see `rolemesh certs`.
            authority: PEM file with the certificate that has signed the coordinator's, where that
                is not of a public authority; the client then speaks TLS.
            allow_remote: Permit a token to travel to another host in clear.
            deadline_s: Longest time of one call; None: that of its method (10 to 30 s).
            retry: How calls are repeated; None: within 60 s, and within 5 s as long as the
                coordinator has never answered.

        Raises:
            ValueError: The address is none, the token cannot be one or would travel in clear, the
                authority's file cannot be read, or a number is out of range.
        """
        if deadline_s is not None and not deadline_s > 0:
            raise ValueError(f"deadline_s is {deadline_s}: give seconds > 0")
        self._connection = Connection(
            address,
            token=token,
            identity=identity,
            authority=authority,
            allow_remote=allow_remote,
        )
        self.address = self._connection.address
        self._deadline_s = deadline_s
        self._retry = RetryPolicy() if retry is None else retry
        self._contact = Contact(self.address)
        self._is_closed = False
        self._channel = open_channel(self.address, retries=False, identity=self._connection.trust)
        self._stub = coordinator_pb2_grpc.CoordinatorServiceStub(self._channel)

    async def __aenter__(self) -> AsyncClient:
        """Returns the client."""
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Closes the client."""
        await self.close()

    async def close(self) -> None:
        """Closes the connection; calls in flight are cancelled."""
        self._is_closed = True
        await self._channel.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.address!r})"

    # --- runs ---

    async def create_run(
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
        if isinstance(recipe, Path):
            text = await asyncio.to_thread(recipe.read_text)
        else:
            text = recipe if isinstance(recipe, str) else json.dumps(recipe)
        if text.endswith((".yaml", ".yml", ".json")):
            raise ValueError(f"recipe is the text {text!r}: give Path(...) for a file")
        request = pb.CreateRunRequest(
            run_id=f"run-{uuid.uuid4().hex[:12]}" if run_id is None else run_id,
            recipe=text,
            overrides=overrides,
        )
        return Run.of((await self._call(self._stub.CreateRun, request)).run)

    async def get_run(self, run_id: str) -> Run:
        """A run as it is now."""
        answer = await self._call(self._stub.GetRun, pb.GetRunRequest(run_id=run_id))
        return Run.of(answer.run)

    async def list_runs(self, page_size: int = 100) -> RunList:
        """The newest runs, newest first; at most 1000."""
        answer = await self._call(self._stub.ListRuns, pb.ListRunsRequest(page_size=page_size))
        return RunList(Run.of(run) for run in answer.runs)

    async def stop_run(self, run_id: str) -> Run:
        """Asks it to end after the step in progress, with everything saved."""
        answer = await self._call(self._stub.StopRun, pb.StopRunRequest(run_id=run_id))
        return Run.of(answer.run)

    async def pause_run(self, run_id: str) -> Run:
        """Asks it to make no further step until it is resumed."""
        answer = await self._call(self._stub.PauseRun, pb.PauseRunRequest(run_id=run_id))
        return Run.of(answer.run)

    async def resume_run(self, run_id: str, *, overrides: Sequence[str] = ()) -> Run:
        """Takes the wish to pause back; starts a run that failed or was stopped from where it is.

        Args:
            run_id: The run.
            overrides: Fields of a run that has ended to set besides, e.g. "run.steps=40".
        """
        request = pb.ResumeRunRequest(run_id=run_id, overrides=overrides)
        return Run.of((await self._call(self._stub.ResumeRun, request)).run)

    async def checkpoint_run(self, run_id: str) -> Run:
        """Asks it to save a checkpoint after the step in progress; an event tells that it was."""
        request = pb.CheckpointRunRequest(run_id=run_id, request_id=uuid.uuid4().hex)
        return Run.of((await self._call(self._stub.CheckpointRun, request)).run)

    async def wait_run(self, run_id: str) -> Run:
        """Waits until a run has ended, however it ended; see Run.state and Run.failure."""
        while True:
            run = await self.get_run(run_id)
            if run.state.is_final:
                return run
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def attach(self, run_id: str, *, step: int = 1) -> AsyncMesh:
        """Takes over a run of the algorithm "external": from now on its services are the caller's.

        The services refuse a client that had it before. Calls have the deadlines of their methods,
        since they may train for long. The caller closes what is returned.

        Args:
            run_id: The run.
            step: The first step to make. Draws follow from it: a client that goes on behind another
                driver gives the step after that one's last.
        """
        answer = await self._call(self._stub.AttachRun, pb.AttachRunRequest(run_id=run_id))
        mesh = AsyncMesh(
            {one.name: one.address for one in answer.services},
            run_id=run_id,
            epoch=answer.fencing_epoch,
            step=step,
            retry=self._retry,
            identity=Identity.parse(answer.identity, "AttachRun") if answer.identity else None,
        )
        mesh.logs_through(lambda logged: self._call(self._stub.LogStep, logged))
        return mesh

    # --- what happens in a run ---

    async def watch_run(self, run_id: str, *, after: str = "") -> AsyncIterator[Event]:
        """Events of a run: those that were, then those that come, to its end.

        A cut, or a coordinator that starts again, is bridged: the watch goes on behind the last
        event that came, so that none is missed and none comes twice.

        Args:
            run_id: The run.
            after: Event.event_id of the last event that is known; empty: all that are kept.

        Raises:
            OutOfRangeError: EVENTS_EXPIRED: events after that one are no longer kept.
        """
        last = after
        retries = Retries(self._retry, self._contact)
        is_final = is_over = False
        while True:
            request = pb.WatchRunRequest(run_id=run_id, after_event_id=last)
            stream: MeshCall = self._started(self._stub.WatchRun, request)
            try:
                async for answer in stream:
                    retries.succeeded()
                    event = Event.of(answer.event)
                    last = event.event_id
                    if isinstance(event, StateChanged):
                        # A run that was resumed has states behind a final one.
                        is_over = event.state.is_final
                    yield event
                if is_over or is_final:
                    return
                cut = UnavailableError(f"{self.address} ended the watch of {run_id!r} too early")
            except DeadlineError:
                continue  # the stream was as long as it may be
            except CallCancelledError as error:
                cut = UnavailableError(error.message)
            except UnavailableError as error:
                if not error.retryable:
                    raise
                cut = error
            finally:
                stream.cancel()
            if is_over:
                # The coordinator of one run alone ends with its run.
                return
            await retries.pause(cut)
            # Also the run may have ended without an event, when its coordinator was killed.
            is_final = (await self.get_run(run_id)).state.is_final
            retries.is_back()

    async def get_metrics(
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
        request = pb.GetMetricsRequest(
            run_id=run_id,
            names=names,
            from_step=from_step,
            max_steps=thin_to or 0,
            thin=thin_to is not None,
        )
        pages = []
        while True:
            pages.append(await self._call(self._stub.GetMetrics, request))
            if not pages[-1].next_step:
                return MetricTable.of(pages)
            request.from_step = pages[-1].next_step

    async def get_dataflow(self, run_id: str, step: int = 0) -> Dataflow:
        """The calls of a step; 0 for the step in progress, or else the newest."""
        request = pb.GetDataflowRequest(run_id=run_id, step=step)
        return Dataflow.of(await self._call(self._stub.GetDataflow, request))

    async def get_plan(self, run_id: str) -> RunPlan | None:
        """What was planned of a run, beside what its steps took; None: it was not planned."""
        answer = await self._call(self._stub.GetPlan, pb.GetPlanRequest(run_id=run_id))
        return RunPlan.of(answer.plan) if answer.HasField("plan") else None

    async def list_samples(self, run_id: str, step: int = 0) -> Samples:
        """Some trajectories of a step; 0 for the newest that has any."""
        request = pb.ListSamplesRequest(run_id=run_id, step=step)
        return Samples.of(await self._call(self._stub.ListSamples, request))

    async def get_expert_loads(self, run_id: str, step: int = 0) -> ExpertLoads:
        """How often each expert of trained mixtures was chosen in a step; 0 for the newest."""
        request = pb.GetExpertLoadsRequest(run_id=run_id, step=step)
        return ExpertLoads.of(await self._call(self._stub.GetExpertLoads, request))

    async def get_device_use(
        self, run_id: str, since: datetime.datetime | None = None
    ) -> list[DeviceUse]:
        """How busy devices were, by device; None: all that is kept.

        Raises:
            ValueError: `since` has no time zone.
        """
        request = pb.GetDeviceUseRequest(run_id=run_id)
        if since is not None:
            if since.tzinfo is None:
                raise ValueError("since has no time zone: give e.g. datetime.now(datetime.UTC)")
            request.since.FromDatetime(since)
        answer = await self._call(self._stub.GetDeviceUse, request)
        return [DeviceUse.of(series) for series in answer.devices]

    async def list_alerts(self, run_id: str) -> list[Alert]:
        """What deserves attention, the most pressing first."""
        answer = await self._call(self._stub.ListAlerts, pb.ListAlertsRequest(run_id=run_id))
        return [Alert.of(alert) for alert in answer.alerts]

    async def read_log(
        self, run_id: str, log: str = "coordinator", *, offset: int = 0, max_bytes: int = 0
    ) -> LogPiece:
        """A piece of a log.

        Args:
            run_id: The run.
            log: Its name, e.g. "coordinator", "actor" or "actor-rank-1".
            offset: First byte; negative: so many before the end.
            max_bytes: 1 to 1 MiB; 0: 64 KiB.
        """
        request = pb.ReadLogRequest(run_id=run_id, log=log, offset=offset, max_bytes=max_bytes)
        return from_message(LogPiece, await self._call(self._stub.ReadLog, request))

    async def follow_log(
        self, run_id: str, log: str = "coordinator", *, offset: int = -FIRST_LOG_BYTES
    ) -> AsyncIterator[str]:
        """Text of a log as it grows, to the end of the run; begins as read_log does."""
        while True:
            # The state is read first: text that was written before the end is then not missed.
            is_final = (await self.get_run(run_id)).state.is_final
            piece = await self.read_log(run_id, log, offset=offset)
            offset = piece.next_offset
            if piece.text:
                yield piece.text
            elif is_final:
                return
            else:
                await asyncio.sleep(_LOOK_AGAIN_S)

    async def list_services(self) -> list[RegisteredService]:
        """Services that the coordinator knows."""
        answer = await self._call(self._stub.ListServices, pb.ListServicesRequest())
        return [RegisteredService.of(service) for service in answer.services]

    # --- what they share ---

    def _started(self, method: Any, request: Any) -> Any:
        if self._is_closed:
            raise CallCancelledError("the client is closed: make another one")
        # The deadline of one call is not one of a stream that lasts as long as its run.
        timeout = None if isinstance(request, pb.WatchRunRequest) else self._deadline_s
        return method(request, timeout=timeout, metadata=self._connection.metadata())

    async def _call(self, method: Callable[..., Awaitable[Answer]], request: Any) -> Answer:
        async def once() -> Answer:
            answer: Answer = await self._started(method, request)
            return answer

        return await repeated(self._retry, once, self._contact)
