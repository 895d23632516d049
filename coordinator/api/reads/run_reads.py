"""What a coordinator tells of runs, read from the store and the folders of runs alone."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

from rolemesh.coordinator.api.alerts import RECENT_GRAPHS, RECOVERIES, alerts_of
from rolemesh.coordinator.api.messages import to_dataflow, to_registered_service, to_run
from rolemesh.coordinator.api.reads.logs import log_piece
from rolemesh.coordinator.api.reads.plans import counted, plan_message
from rolemesh.coordinator.api.reads.run_history import RunHistories, read_graph
from rolemesh.coordinator.api.reads.watches import Watches
from rolemesh.coordinator.api.store_errors import translated
from rolemesh.coordinator.state.store import RunRecord, RunStream, StateStore
from rolemesh.rpc.errors import InvalidRequestError, NotFoundError
from rolemesh.v1 import coordinator_pb2

DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000

MAX_STEPS = 1000
"""Most steps in one answer of GetMetrics."""

DEFAULT_LOG_BYTES = 64 * 2**10
MAX_LOG_BYTES = 2**20


class RunReads:
    """The operations that change nothing, the same over every protocol.

    Errors and owner are those of `StoreOperations`, which has these among its own.
    """

    def __init__(self, store: StateStore) -> None:
        """Prepares; nothing is read before the first call.

        Args:
            store: The store that holds the answers.
        """
        self.store = store
        """The store that holds the answers."""
        self._histories = RunHistories(store)
        self._watches = Watches(store)

    async def get_run(self, run_id: str) -> coordinator_pb2.Run:
        """A run."""
        return to_run(await self._record(run_id))

    async def list_runs(self, page_size: int = 0) -> list[coordinator_pb2.Run]:
        """Runs, newest first; 0 means 100 of them."""
        _check_bound("page_size", page_size, MAX_PAGE_SIZE, DEFAULT_PAGE_SIZE)
        with translated():
            records = await self.store.list_runs(page_size or DEFAULT_PAGE_SIZE)
        return [to_run(record) for record in records]

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
            flow = await self.store.read_entries(run_id, RunStream.FLOW)
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
            entries = await self.store.read_entries(run_id, RunStream.SAMPLES)
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

    async def get_expert_loads(
        self, run_id: str, step: int = 0
    ) -> coordinator_pb2.GetExpertLoadsResponse:
        """How often each expert was chosen in a step; 0 for the newest that has any loads."""
        _check_step(step)
        await self._record(run_id)
        history = self._histories.of(run_id)
        with translated():
            await history.refresh_loads()
        steps = sorted(history.loads)
        if step and step not in history.loads:
            raise _no_step(run_id, "loads of experts", step, steps)
        answer = coordinator_pb2.GetExpertLoadsResponse()
        if steps:
            answer.ParseFromString(history.loads[step or steps[-1]])
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
            return [to_registered_service(lease) for lease in await self.store.list_services()]

    async def _record(self, run_id: str) -> RunRecord:
        with translated():
            return await self.store.get_run(run_id)


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
