"""A run whose steps a client makes: services are started, initialised and held for it."""

from __future__ import annotations

from rolemesh.coordinator.dataflow.futures import Node
from rolemesh.coordinator.run.events import EventLog
from rolemesh.coordinator.run.run_loop import RunLoop
from rolemesh.coordinator.run.wishes import Wishes
from rolemesh.coordinator.state.store import RunState, StateStore
from rolemesh.v1 import coordinator_pb2


class ExternalLoop(RunLoop):
    """Takes the place of a TrainingLoop, and waits for a wish to stop the run.

    AttachRun raises the epoch of the run. This fences off all earlier drivers of the services, also
    this coordinator. Its own writes about the run therefore carry no epoch.

    Owner: one asyncio loop.
    """

    def __init__(self, store: StateStore, run_id: str, wishes: Wishes, events: EventLog) -> None:
        super().__init__(wishes)
        self._store = store
        self._run_id = run_id
        self._events = events

    async def run(self) -> None:
        """Holds the services until a wish to stop."""
        self.activity = "driven by a client"
        await self._store.update_run(self._run_id, state=RunState.RUNNING)
        self._events.state(coordinator_pb2.RUN_STATE_RUNNING)
        await self._events.flush()
        while not self.wishes.is_stop_wanted:
            await self.wishes.change()

    def running(self, service: str) -> list[Node]:
        """No call of the coordinator is in flight."""
        return []
