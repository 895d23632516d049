"""What steps of a run left: metrics, graphs and loads of experts, read from the store once."""

from __future__ import annotations

import asyncio
import json
import math
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from rolemesh.coordinator.api.reads.device_history import DeviceHistory
from rolemesh.coordinator.api.reads.logged_steps import LoggedSteps
from rolemesh.coordinator.dataflow.futures import Node
from rolemesh.coordinator.dataflow.trace import call_seconds
from rolemesh.coordinator.state.store import EntryExpiredError, RunStream, StateStore
from rolemesh.v1 import coordinator_pb2

_PAGE = 1000
_FIRST_RECORDS = 10
_NEWEST_RECORDS = 1000


class RunHistory:
    """Records and graphs of one run; `refresh` reads those that came since the last time.

    After a rewind everything is read anew, so steps that the run took back are gone from here, too.
    Of a step that was made twice without one, the last record counts. Owner: one asyncio loop.
    """

    def __init__(self, store: StateStore, run_id: str) -> None:
        self._store = store
        self._run_id = run_id
        self.devices = DeviceHistory(store, run_id)
        self.logged = LoggedSteps(store, run_id)
        self._rewind_id = ""
        self.recoveries: list[coordinator_pb2.Recovered] = []
        """Recoveries, oldest first."""
        self._recoveries_id = ""
        self._begin()
        # Two callers that read at the same time would count a record twice.
        self._turn = asyncio.Lock()

    def _begin(self) -> None:
        self.steps: list[int] = []
        """Steps with a record, ascending."""
        self.columns: dict[str, array[float]] = {}
        """One value a step by name of the metric; NaN where a step has none."""
        self.graphs: dict[int, bytes] = {}
        """Graphs as the store has them, by step, ascending."""
        self.loads: dict[int, bytes] = {}
        """Loads of experts as the store has them, by step, ascending."""
        self._call_seconds: dict[int, dict[str, float]] = {}
        self.alerts: list[coordinator_pb2.Alert] = []
        self.alerts_of = (0, 0, 0)
        """Number of steps, newest graph and number of recoveries of which the alerts tell."""
        self._metrics_id = ""
        self._entry_ids: dict[RunStream, str] = {}
        """The newest entries that were read of streams of steps."""

    async def _begin_after_rewind(self) -> None:
        rewind_id = await self._store.newest_rewind(self._run_id)
        if rewind_id != self._rewind_id:
            self._begin()
            self._rewind_id = rewind_id

    async def refresh(self) -> None:
        """Reads the records that came since the last time."""
        async with self._turn:
            await self._begin_after_rewind()
            while True:
                entries = await self._store.read_metrics(self._run_id, self._metrics_id, _PAGE)
                for entry in entries:
                    self._add(entry.values)
                    self._metrics_id = entry.entry_id
                if len(entries) < _PAGE:
                    return

    def _add(self, values: Mapping[str, float]) -> None:
        step = int(values["step"])
        while self.steps and self.steps[-1] >= step:
            self.steps.pop()
            for column in self.columns.values():
                column.pop()
        place = len(self.steps)
        self.steps.append(step)
        for name, value in values.items():
            if name not in self.columns:
                self.columns[name] = array("d", [math.nan]) * place
            self.columns[name].append(value)
        for column in self.columns.values():
            if len(column) == place:
                column.append(math.nan)

    async def refresh_graphs(self) -> None:
        """Reads the graphs that came since the last time."""
        async with self._turn:
            await self._begin_after_rewind()
            for step in await self._read_steps(RunStream.GRAPHS, self.graphs):
                self._call_seconds.pop(step, None)

    async def refresh_loads(self) -> None:
        """Reads the loads of experts that came since the last time."""
        async with self._turn:
            await self._begin_after_rewind()
            await self._read_steps(RunStream.EXPERTS, self.loads)

    async def _read_steps(self, stream: RunStream, kept: dict[int, bytes]) -> list[int]:
        """Takes what came since the last time into `kept`; returns of which steps it is."""
        after = self._entry_ids.get(stream, "")
        try:
            entries = await self._store.read_entries(self._run_id, stream, after)
        except EntryExpiredError:
            # More came since than are kept.
            entries = await self._store.read_entries(self._run_id, stream)
        steps = []
        for entry in entries:
            assert entry.step is not None
            kept.pop(entry.step, None)
            kept[entry.step] = entry.payload
            self._entry_ids[stream] = entry.entry_id
            steps.append(entry.step)
        for old in list(kept)[: -stream.keep]:
            del kept[old]
        return steps

    def call_seconds(self, steps: Sequence[int]) -> Mapping[int, Mapping[str, float]]:
        """Seconds by name of the call, of steps whose graphs are kept. Each is read once."""
        known = self._call_seconds
        self._call_seconds = {
            step: known.get(step) or call_seconds(read_graph(self.graphs[step])[1])
            for step in steps
        }
        return self._call_seconds

    def values(self, name: str, steps: Sequence[int]) -> dict[int, float]:
        """A metric of steps, of those that have it."""
        wanted, column = set(steps), self.columns.get(name, ())
        return {
            step: value
            for step, value in zip(self.steps, column, strict=False)
            if step in wanted and math.isfinite(value)
        }

    async def refresh_recoveries(self) -> None:
        """Reads the recoveries that came since the last time."""
        async with self._turn:
            while True:
                try:
                    entries = await self._store.read_entries(
                        self._run_id, RunStream.EVENTS, self._recoveries_id, _PAGE
                    )
                except EntryExpiredError:
                    # More events came since than are kept.
                    self.recoveries, self._recoveries_id = [], ""
                    continue
                for entry in entries:
                    event = coordinator_pb2.RunEvent.FromString(entry.payload)
                    if event.HasField("recovered"):
                        self.recoveries.append(event.recovered)
                    self._recoveries_id = entry.entry_id
                if len(entries) < _PAGE:
                    return

    def records(self, newest: Mapping[str, float]) -> list[Mapping[str, float]]:
        """The newest records, oldest first, and before them the very first ones.

        Args:
            newest: The last of them as it was written: in columns, a value that is no number and
                one that is missing are the same.
        """
        first = range(min(_FIRST_RECORDS, len(self.steps)))
        last = range(max(len(first), len(self.steps) - _NEWEST_RECORDS), len(self.steps))
        records: list[Mapping[str, float]] = [
            {
                name: column[place]
                for name, column in self.columns.items()
                if not math.isnan(column[place])
            }
            for place in (*first, *last)
        ]
        if records and records[-1]["step"] == newest.get("step"):
            records[-1] = newest
        return records


class RunHistories:
    """The histories of the runs that were asked for last."""

    def __init__(self, store: StateStore, keep: int = 8) -> None:
        self._store = store
        self._keep = keep
        self._known: OrderedDict[str, RunHistory] = OrderedDict()

    def of(self, run_id: str) -> RunHistory:
        """The history of a run."""
        history = self._known.pop(run_id, None) or RunHistory(self._store, run_id)
        self._known[run_id] = history
        while len(self._known) > self._keep:
            self._known.popitem(last=False)
        return history


def read_graph(graph: bytes) -> tuple[int, Sequence[Node]]:
    """Step and nodes of a graph as the store has it."""
    record = json.loads(graph)
    return record["step"], [Node.from_dict(node) for node in record["nodes"]]
