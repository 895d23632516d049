"""Telling of steps: the record of each goes once to the journal, files, store, page and console."""

from __future__ import annotations

from collections.abc import Sequence

from rolemesh.coordinator.dataflow.clock import now
from rolemesh.coordinator.dataflow.futures import Node
from rolemesh.coordinator.dataflow.journal import Journal
from rolemesh.coordinator.dataflow.observer import RunObserver
from rolemesh.coordinator.run.reporting.early_end import to_the_end
from rolemesh.coordinator.run.reporting.events import EventLog
from rolemesh.coordinator.run.results.metrics import (
    MetricsWriter,
    dataflow_traffic,
    step_record,
    steps_behind,
    traffic_record,
    traffic_since,
)
from rolemesh.coordinator.run.saving.progress import RECORD_OPERATION, RunProgress
from rolemesh.coordinator.state.store import StateStore
from rolemesh.rpc.channel import ChannelTraffic, MethodTraffic
from rolemesh.rpc.together import together


class ToldSteps:
    """Records of the steps of one attempt. Owner: the coordinator's loop."""

    def __init__(
        self,
        progress: RunProgress,
        journal: Journal,
        store: StateStore,
        writer: MetricsWriter,
        observer: RunObserver,
        events: EventLog,
        traffic: ChannelTraffic,
    ) -> None:
        """Prepares.

        Args:
            progress: Of the run: holds the record of the newest step until it is told.
            journal: Keeps each whole record.
            store: Holds the run's entry, with its newest step and metrics.
            writer: Writes the run's files.
            observer: Observer that is told of each record.
            events: Events of the run, for the page.
            traffic: Of the coordinator's channels.
        """
        self._progress = progress
        self._journal = journal
        self._store = store
        self._writer = writer
        self._observer = observer
        self._events = events
        self._traffic = traffic
        self._traffic_before = MethodTraffic()
        """Of the coordinator, when the newest step began."""

    def step_begins(self) -> None:
        """Counts the coordinator's traffic from here."""
        self._traffic_before = dataflow_traffic(self._traffic)

    def record(self, step: int, nodes: Sequence[Node], started: float) -> dict[str, float]:
        """What is known of a step by now; `started` is on the loop's clock."""
        behind = steps_behind(nodes, self._progress.actor_versions)
        return {**step_record(step, nodes, now() - started, self._traffic_of_step()), **behind}

    def traffic(self) -> dict[str, float]:
        """What the coordinator has sent and received since the step began, for its record."""
        return traffic_record(self._traffic_of_step())

    def _traffic_of_step(self) -> MethodTraffic:
        return traffic_since(self._traffic_before, dataflow_traffic(self._traffic))

    async def tell(self, *, is_whole: bool = True) -> None:
        """Writes the record of the newest step everywhere, unless that was done.

        Args:
            is_whole: Whether the step was evaluated where that is due. A run that fails before
                tells of the step it has made, and evaluates it when it is resumed.
        """
        if self._progress.unrecorded is not None:
            # A loss ends the attempt at any time: what is half told would not be told again.
            await to_the_end(self._tell(self._progress.unrecorded, is_whole=is_whole))

    async def _tell(self, record: dict[str, float], *, is_whole: bool) -> None:
        step, journal = self._progress.step, self._journal
        if is_whole:
            await journal.note(step, RECORD_OPERATION, {"record": record})
        self._progress.recorded(record)
        # A watch must not miss it, should this process end now.
        self._events.step_made(record)
        # Side by side, since a durable store syncs its disk for what comes alone.
        await together(
            [
                self._writer.write_step(record),
                self._events.flush(),
                self._store.update_run(
                    journal.run_id, epoch=journal.epoch, step=step, metrics=record
                ),
            ]
        )
        self._observer.on_step(record)
