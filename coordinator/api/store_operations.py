"""The operations of a coordinator, answered from the store and the folders of runs alone.

The process need not be the one that makes the run: a new coordinator gives the same answers as the
one before it.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Protocol

from rolemesh.coordinator.api.alerts import RECENT_GRAPHS, RECOVERIES, alerts_of
from rolemesh.coordinator.api.credentials import CLIENT_FILE, check_caller_may
from rolemesh.coordinator.api.logged_steps import check_step
from rolemesh.coordinator.api.logs import log_piece
from rolemesh.coordinator.api.messages import (
    to_dataflow,
    to_registered_service,
    to_run,
)
from rolemesh.coordinator.api.plans import counted, plan_message
from rolemesh.coordinator.api.run_history import RunHistories, read_graph
from rolemesh.coordinator.api.store_errors import translated
from rolemesh.coordinator.api.watches import Watches
from rolemesh.coordinator.recipe.algorithms import EXTERNAL
from rolemesh.coordinator.state.store import (
    RunRecord,
    RunState,
    RunStream,
    StateStore,
)
from rolemesh.rpc.errors import (
    InvalidRequestError,
    NotFoundError,
    PreconditionError,
)
from rolemesh.v1 import coordinator_pb2

DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000

MAX_STEPS = 1000
"""Most steps in one answer of GetMetrics."""

DEFAULT_LOG_BYTES = 64 * 2**10
MAX_LOG_BYTES = 2**20

_RUN_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_MAX_REQUEST_ID_CHARACTERS = 128
_MAX_RECIPE_BYTES = 2**20


class RunCreator(Protocol):
    """Starts runs, and runs that have ended again."""

    async def create_run(self, run_id: str, recipe: str, overrides: Sequence[str]) -> None:
        """Starts a run unless it was started before; afterwards its record is in the store.

        Raises:
            RolemeshError: As coordinator.proto says of CreateRun.
        """

    async def resume_run(self, run_id: str, overrides: Sequence[str]) -> None:
        """Starts a run that has failed or was stopped from where it is.

        A repeat with the same overrides, while that run goes on, changes nothing.

        Raises:
            RolemeshError: As coordinator.proto says of ResumeRun.
        """


class StoreOperations:
    """The operations of one coordinator, the same over every protocol.

    CoordinatorService (gRPC) and the REST routes are thin translations of this one class. Every
    method raises a RolemeshError with a reason of coordinator.proto: NotFoundError,
    InvalidRequestError, PreconditionError, OutOfRangeError, CapacityError, or UnavailableError
    (STORE_UNAVAILABLE). Owner: one asyncio loop; methods may be called concurrently on it.
    """

    def __init__(self, store: StateStore, creator: RunCreator | None = None) -> None:
        """Prepares; nothing is read before the first call.

        Args:
            store: The store that holds the answers.
            creator: Starts runs; None for a coordinator that makes one run only.
        """
        self._store = store
        self._creator = creator
        self._histories = RunHistories(store)
        self._watches = Watches(store)

    # --- runs ---

    async def create_run(
        self, run_id: str, recipe: str, overrides: Sequence[str] = ()
    ) -> coordinator_pb2.Run:
        """Starts a run of a recipe, given as YAML or JSON text."""
        if self._creator is None:
            raise PreconditionError(
                "this coordinator makes one run alone: start one that takes recipes with "
                "`rolemesh coordinator`",
                reason="CREATION_UNAVAILABLE",
            )
        if not _RUN_ID.fullmatch(run_id) or run_id.startswith("."):
            raise InvalidRequestError(
                f"run_id is {run_id[:200]!r}: give 1 to 128 letters, digits, dots, dashes and "
                "underscores, and no dot in front",
                reason="RUN_ID_INVALID",
            )
        _check_size(recipe, overrides)
        with translated():
            await self._creator.create_run(run_id, recipe, overrides)
        return await self.get_run(run_id)

    async def get_run(self, run_id: str) -> coordinator_pb2.Run:
        """A run."""
        return to_run(await self._record(run_id))

    async def list_runs(self, page_size: int = 0) -> list[coordinator_pb2.Run]:
        """Runs, newest first; 0 means 100 of them."""
        _check_bound("page_size", page_size, MAX_PAGE_SIZE, DEFAULT_PAGE_SIZE)
        with translated():
            records = await self._store.list_runs(page_size or DEFAULT_PAGE_SIZE)
        return [to_run(record) for record in records]

    async def stop_run(self, run_id: str) -> coordinator_pb2.Run:
        """Asks it to end after the step in progress, with everything saved."""
        record = await self._record(run_id)
        if record.state.is_final:
            return to_run(record)
        return await self._wish(run_id, stop_requested=True)

    async def pause_run(self, run_id: str) -> coordinator_pb2.Run:
        """Asks it to make no further step until it is resumed."""
        self._check_steps_are_ours(await self._going_on(run_id), "paused")
        return await self._wish(run_id, pause_requested=True)

    async def resume_run(self, run_id: str, overrides: Sequence[str] = ()) -> coordinator_pb2.Run:
        """Cancels the wish to pause; starts a run that failed or was stopped from where it is."""
        record = await self._record(run_id)
        # Early stopping leaves steps, which other settings may make.
        has_steps_left = record.step < record.num_steps and len(overrides) > 0
        if record.state is RunState.SUCCEEDED and not has_steps_left:
            raise _ended(record)
        _check_size("", overrides)
        if record.state.is_final or overrides:
            # It starts a process, and may change the recipe.
            check_caller_may("CreateRun", f"to start run {run_id!r} again")
            if self._creator is None:
                raise PreconditionError(
                    f"run {run_id!r} is {record.state.value}, and this coordinator makes one run "
                    f"alone: `rolemesh train --resume {record.directory}` starts it again once it "
                    "has ended",
                    reason="RESUME_UNAVAILABLE",
                    metadata={"run_id": run_id},
                )
            with translated():
                await self._creator.resume_run(run_id, overrides)
        return await self._wish(run_id, pause_requested=False)

    async def checkpoint_run(self, run_id: str, request_id: str) -> coordinator_pb2.Run:
        """Asks it to save a checkpoint after the step in progress."""
        if not 1 <= len(request_id) <= _MAX_REQUEST_ID_CHARACTERS:
            raise InvalidRequestError(
                f"request_id has {len(request_id)} characters: give 1 to "
                f"{_MAX_REQUEST_ID_CHARACTERS}, e.g. a UUID"
            )
        record = await self._going_on(run_id)
        self._check_steps_are_ours(
            record, "asked for a checkpoint: call SaveCheckpoint of its services instead"
        )
        with translated():
            await self._store.append_entry(run_id, RunStream.CHECKPOINT_WISHES, request_id.encode())
        return await self.get_run(run_id)

    async def attach_run(self, run_id: str) -> coordinator_pb2.AttachRunResponse:
        """Gives a run of algorithm "external" to the caller, and fences off its earlier driver."""
        record = await self._going_on(run_id)
        self._check_is_driven(record)
        with translated():
            epoch = await self._store.next_epoch(run_id)
        return coordinator_pb2.AttachRunResponse(
            fencing_epoch=epoch,
            identity=await asyncio.to_thread(_client_identity, Path(record.directory)),
            services=[
                coordinator_pb2.AttachedService(name=name, **facts)
                for name, facts in sorted(record.services.items())
            ],
        )

    async def log_step(
        self,
        run_id: str,
        fencing_epoch: int,
        step: int,
        metrics: Mapping[str, float],
        samples: Sequence[coordinator_pb2.Sample] = (),
    ) -> coordinator_pb2.Run:
        """Takes the metrics of a step that a client made, and some of its samples."""
        logged = check_step(fencing_epoch, step, metrics, samples)
        self._check_is_driven(await self._going_on(run_id))
        with translated():
            await self._histories.of(run_id).logged.log(fencing_epoch, logged, samples)
        return await self.get_run(run_id)

    # --- what happens in a run ---

    async def watch_run(
        self, run_id: str, after_event_id: str = ""
    ) -> AsyncIterator[coordinator_pb2.RunEvent]:
        """Past and future events after the given one, to the end of the run."""
        async with aclosing(self._watches.follow(run_id, after_event_id)) as events:
            async for event in events:
                yield event

    async def watches_end(self, timeout_s: float) -> None:
        """Returns when all watches have ended, or after timeout_s."""
        await self._watches.end(timeout_s)

    async def get_metrics(
        self,
        run_id: str,
        names: Sequence[str] = (),
        from_step: int = 0,
        max_steps: int = 0,
        *,
        thin: bool = False,
    ) -> coordinator_pb2.GetMetricsResponse:
        """Metrics of steps, in columns."""
        if from_step < 0:
            raise InvalidRequestError(f"from_step is {from_step}: give 0 or more")
        _check_bound("max_steps", max_steps, MAX_STEPS, MAX_STEPS)
        await self._record(run_id)
        history = self._histories.of(run_id)
        with translated():
            await history.refresh()
        columns = [
            (name, column)
            for name, column in sorted(history.columns.items())
            if name != "step" and _is_wanted(name, names)
        ]
        places = [
            place
            for place, step in enumerate(history.steps)
            if step >= from_step
            # Before the first step there is an evaluation, and nothing else.
            and (step or any(not math.isnan(column[place]) for _, column in columns))
        ]
        chosen = (
            _thinned(places, max_steps or MAX_STEPS) if thin else places[: max_steps or MAX_STEPS]
        )
        is_cut = not thin and len(chosen) < len(places)
        return coordinator_pb2.GetMetricsResponse(
            steps=[history.steps[place] for place in chosen],
            series=[
                coordinator_pb2.MetricSeries(name=name, values=[column[place] for place in chosen])
                for name, column in columns
            ],
            next_step=history.steps[places[len(chosen)]] if is_cut else 0,
        )

    async def get_dataflow(self, run_id: str, step: int = 0) -> coordinator_pb2.GetDataflowResponse:
        """The graph of a step; 0 for the step in progress, or else the newest."""
        _check_step(step)
        record = await self._record(run_id)
        history = self._histories.of(run_id)
        with translated():
            flow = await self._store.read_entries(run_id, RunStream.FLOW)
            await history.refresh_graphs()
        if flow and not record.state.is_final:
            in_progress, nodes = read_graph(flow[-1].payload)
            if in_progress not in history.graphs and step in (0, in_progress):
                return to_dataflow(in_progress, nodes, is_made=False)
        wanted = step or max(history.graphs, default=0)
        if wanted not in history.graphs:
            raise _no_step(run_id, "graph", step, list(history.graphs))
        _, nodes = read_graph(history.graphs[wanted])
        return to_dataflow(wanted, nodes, is_made=True)

    async def get_plan(self, run_id: str) -> coordinator_pb2.GetPlanResponse:
        """What was planned of a run, beside what its steps took so far."""
        record = await self._record(run_id)
        if not record.plan:
            return coordinator_pb2.GetPlanResponse()
        history = self._histories.of(run_id)
        with translated():
            await history.refresh()
            await history.refresh_graphs()
        steps = counted(history.graphs)
        plan = plan_message(
            record.plan,
            history.call_seconds(steps),
            history.values("time/step", steps),
            history.values("tokens", steps),
        )
        return coordinator_pb2.GetPlanResponse(plan=plan)

    async def list_samples(self, run_id: str, step: int = 0) -> coordinator_pb2.ListSamplesResponse:
        """Some trajectories of a step; 0 for the newest that has any."""
        _check_step(step)
        await self._record(run_id)
        with translated():
            entries = await self._store.read_entries(run_id, RunStream.SAMPLES)
        kept = {}
        for entry in entries:
            found = coordinator_pb2.ListSamplesResponse.FromString(entry.payload)
            kept[found.step] = found
        steps = sorted(kept)
        if step and step not in kept:
            raise _no_step(run_id, "samples", step, steps)
        answer = kept[step or steps[-1]] if steps else coordinator_pb2.ListSamplesResponse()
        answer.steps.extend(steps)
        return answer

    async def get_device_use(
        self, run_id: str, since: float = 0.0
    ) -> coordinator_pb2.GetDeviceUseResponse:
        """How busy devices were since a Unix time in seconds."""
        if not math.isfinite(since):
            raise InvalidRequestError(f"since is {since}: give a Unix time in seconds")
        await self._record(run_id)
        devices = self._histories.of(run_id).devices
        with translated():
            await devices.refresh()
        return devices.since(since)

    async def list_alerts(self, run_id: str) -> coordinator_pb2.ListAlertsResponse:
        """Alerts, the most pressing first."""
        record = await self._record(run_id)
        history = self._histories.of(run_id)
        with translated():
            await history.refresh()
            await history.refresh_graphs()
            if record.recoveries >= RECOVERIES:
                # There are many events, and few runs recover so often.
                await history.refresh_recoveries()
        newest = list(history.graphs.values())[-RECENT_GRAPHS:]
        # They are computed once for each step, for any number of callers.
        told_of = (len(history.steps), max(history.graphs, default=0), len(history.recoveries))
        if history.alerts_of != told_of:
            records = history.records(newest=record.metrics)
            graphs = [read_graph(graph)[1] for graph in newest]
            use = await self.get_device_use(run_id)
            history.alerts = alerts_of(records, graphs, use, history.recoveries)
            history.alerts_of = told_of
        return coordinator_pb2.ListAlertsResponse(alerts=history.alerts)

    async def read_log(
        self, run_id: str, log: str, offset: int = 0, max_bytes: int = 0
    ) -> coordinator_pb2.ReadLogResponse:
        """A piece of a log; a negative offset counts from its end."""
        _check_bound("max_bytes", max_bytes, MAX_LOG_BYTES, DEFAULT_LOG_BYTES)
        record = await self._record(run_id)
        return await asyncio.to_thread(
            log_piece, record, log, offset, max_bytes or DEFAULT_LOG_BYTES
        )

    async def list_services(self) -> list[coordinator_pb2.RegisteredService]:
        """Services whose lease holds."""
        with translated():
            return [to_registered_service(lease) for lease in await self._store.list_services()]

    # --- what they share ---

    async def _record(self, run_id: str) -> RunRecord:
        with translated():
            return await self._store.get_run(run_id)

    async def _wish(self, run_id: str, **wish: bool) -> coordinator_pb2.Run:
        with translated():
            await self._store.update_run(run_id, **wish)
        return await self.get_run(run_id)

    async def _going_on(self, run_id: str) -> RunRecord:
        record = await self._record(run_id)
        if record.state.is_final:
            raise _ended(record)
        return record

    def _check_is_driven(self, record: RunRecord) -> None:
        """Raises unless clients make the steps of the run, and it is running."""
        run_id = record.run_id
        if record.algorithm != EXTERNAL:
            raise PreconditionError(
                f"run {run_id!r} has the algorithm {record.algorithm!r}, whose steps its "
                f"coordinator makes: give the recipe `algorithm: {{type: {EXTERNAL}}}` to drive "
                "its services yourself",
                reason="RUN_NOT_EXTERNAL",
                metadata={"run_id": run_id},
            )
        if record.state is not RunState.RUNNING or record.stop_requested:
            raise PreconditionError(
                f"run {run_id!r} is {'stopping' if record.stop_requested else record.state.value}: "
                "it can be driven while it is running",
                reason="RUN_NOT_READY",
                metadata={"run_id": run_id},
            )

    def _check_steps_are_ours(self, record: RunRecord, wish: str) -> None:
        if record.algorithm == EXTERNAL:
            raise PreconditionError(
                f"run {record.run_id!r} is driven by a client, who alone knows its steps: it "
                f"cannot be {wish}",
                reason="RUN_EXTERNAL",
                metadata={"run_id": record.run_id},
            )


def _ended(record: RunRecord) -> PreconditionError:
    return PreconditionError(
        f"run {record.run_id!r} has ended: it is {record.state.value}",
        reason="RUN_ENDED",
        metadata={"run_id": record.run_id},
    )


def _check_size(recipe: str, overrides: Sequence[str]) -> None:
    num_bytes = len(recipe.encode()) + sum(len(text.encode()) for text in overrides)
    if num_bytes > _MAX_RECIPE_BYTES:
        raise InvalidRequestError(
            f"recipe and overrides have {num_bytes} bytes: give at most {_MAX_RECIPE_BYTES}",
            reason="RECIPE_INVALID",
        )


def _check_bound(field: str, value: int, most: int, default: int) -> None:
    if not 0 <= value <= most:
        raise InvalidRequestError(f"{field} is {value}: give 1 to {most}, or 0 for {default}")


def _check_step(step: int) -> None:
    if step < 0:
        raise InvalidRequestError(f"step is {step}: give a step from 1 on, or 0 for the newest")


def _no_step(run_id: str, what: str, step: int, known: Sequence[int]) -> NotFoundError:
    kept = f"steps {min(known)} to {max(known)} are kept" if known else "none is kept yet"
    named = f" of step {step}" if step else ""
    return NotFoundError(
        f"run {run_id!r} has no {what}{named}: {kept}",
        reason="STEP_NOT_FOUND",
        metadata={"run_id": run_id, "step": str(step)},
    )


def _is_wanted(name: str, wanted: Sequence[str]) -> bool:
    return not wanted or any(
        name.startswith(one[:-1]) if one.endswith("*") else name == one for one in wanted
    )


def _thinned(places: Sequence[int], most: int) -> Sequence[int]:
    """Every n-th place, counted back from the newest, so that there are at most `most`."""
    every = -(-len(places) // most)
    return places if every <= 1 else places[::-every][::-1]


def _client_identity(directory: Path) -> bytes:
    """By what services of the run in the folder know its client; empty: they speak in clear."""
    try:
        return (directory / CLIENT_FILE).read_bytes()
    except FileNotFoundError:
        return b""
