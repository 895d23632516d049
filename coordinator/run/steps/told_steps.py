"""Telling of steps: the record of each goes once to the journal, files, store, page and console."""

from __future__ import annotations

from collections.abc import Sequence

from rolemesh.coordinator.dataflow.futures import Node
from rolemesh.coordinator.dataflow.journal import Journal
from rolemesh.coordinator.dataflow.loop.clock import now
from rolemesh.coordinator.run.parts import RunParts
from rolemesh.coordinator.run.reporting.early_end import to_the_end
from rolemesh.coordinator.run.results.metrics import (
    dataflow_traffic,
    step_record,
    steps_behind,
    traffic_record,
    traffic_since,
)
from rolemesh.coordinator.run.saving.progress import RECORD_OPERATION
from rolemesh.rpc.channel import MethodTraffic
from rolemesh.rpc.together import together


class ToldSteps:
    """Records of the steps of one attempt. Owner: the coordinator's loop."""

    def __init__(self, parts: RunParts, journal: Journal) -> None:
        """Prepares.

        Args:
            parts: Of the run; its progress holds the newest step's record until that is told.
            journal: Keeps each whole record.
        """
        self._parts = parts
        self._journal = journal
        self._traffic_before = MethodTraffic()
        """Of the coordinator, when the newest step began."""

    def step_begins(self) -> None:
        """Counts the coordinator's traffic from here."""
        self._traffic_before = dataflow_traffic(self._parts.traffic)

    def record(self, step: int, nodes: Sequence[Node], started: float) -> dict[str, float]:
        """What is known of a step by now; `started` is on the loop's clock."""
        behind = steps_behind(nodes, self._parts.progress.actor_versions)
        return {**step_record(step, nodes, now() - started, self._traffic_of_step()), **behind}

    def traffic(self) -> dict[str, float]:
        """What the coordinator has sent and received since the step began, for its record."""
        return traffic_record(self._traffic_of_step())

    def _traffic_of_step(self) -> MethodTraffic:
        return traffic_since(self._traffic_before, dataflow_traffic(self._parts.traffic))

    async def tell(self, *, is_whole: bool = True) -> None:
        """Writes the record of the newest step everywhere, unless that was done.

        Args:
            is_whole: Whether the step was evaluated where that is due. A run that fails before
                tells of the step it has made, and evaluates it when it is resumed.
        """
        if self._parts.progress.unrecorded is not None:
            # A loss ends the attempt at any time: what is half told would not be told again.
            await to_the_end(self._tell(self._parts.progress.unrecorded, is_whole=is_whole))

    async def _tell(self, record: dict[str, float], *, is_whole: bool) -> None:
        step, journal = self._parts.progress.step, self._journal
        noted = [journal.note(step, RECORD_OPERATION, {"record": record})] if is_whole else []
        # Who hears that the step was made may ask for its loads at once.
        await together([*noted, self._parts.writer.tell_loads(step)])
        self._parts.progress.recorded(record)
        # A watch must not miss it, should this process end now.
        self._parts.events.step_made(record)
        # Side by side, since a durable store syncs its disk for what comes alone.
        await together(
            [
                self._parts.writer.write_step(record),
                self._parts.events.flush(),
                self._parts.store.update_run(
                    journal.run_id, epoch=journal.epoch, step=step, metrics=record
                ),
            ]
        )
        self._parts.observer.on_step(record)
