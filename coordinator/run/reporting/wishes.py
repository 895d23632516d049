"""Wishes of users for a run that goes on: to stop, to pause, to save a checkpoint."""

from __future__ import annotations

import asyncio

from rolemesh.coordinator.dataflow.observer import RunObserver
from rolemesh.coordinator.run.reporting.events import EventLog
from rolemesh.coordinator.state.store import RunStream, StateStore
from rolemesh.v1 import coordinator_pb2


class Wishes:
    """The wishes of one run, from the store and from signals.

    A wish to pause stays until it is cancelled, one for a checkpoint until it is served. A wish to
    stop stays.

    Owner: one asyncio loop. `stop` may be called from a signal handler of the loop.
    """

    def __init__(
        self, store: StateStore, run_id: str, events: EventLog, observer: RunObserver
    ) -> None:
        self.is_stop_wanted = False
        self.is_pause_wanted = False
        self.is_paused = False
        """Whether the run waits between two steps; set by the loop that makes the steps."""
        self._store = store
        self._run_id = run_id
        self._events = events
        self._observer = observer
        self._seen: set[str] = set()
        self._is_checkpoint_wanted = False
        self._changed = asyncio.Event()

    def stop(self, hint: str = "") -> None:
        """Asks the run to end after the step in progress; `hint` says what else can be asked."""
        if self.is_stop_wanted:
            return
        self.is_stop_wanted = True
        self._changed.set()
        self._events.state(coordinator_pb2.RUN_STATE_STOPPING)
        self._observer.on_event(
            f"stopping after the step in progress: it is saved and the model exported{hint}"
        )

    async def read(self) -> None:
        """Looks for new wishes in the store."""
        record = await self._store.get_run(self._run_id)
        if record.stop_requested:
            self.stop()
        elif self.is_stop_wanted:
            # The wish came as a signal. The store must show it, too.
            await self._store.update_run(self._run_id, stop_requested=True)
        if record.pause_requested != self.is_pause_wanted:
            self._pause(record.pause_requested)
        for entry in await self._store.read_entries(self._run_id, RunStream.CHECKPOINT_WISHES):
            request_id = entry.payload.decode()
            if request_id not in self._seen:
                self._seen.add(request_id)
                self._is_checkpoint_wanted = True
                self._changed.set()

    def _pause(self, is_wanted: bool) -> None:
        self.is_pause_wanted = is_wanted
        self._changed.set()
        if is_wanted:
            self._events.state(coordinator_pb2.RUN_STATE_PAUSING)
            self._observer.on_event("pausing after the step in progress, until the run is resumed")
        elif not self.is_paused:
            self._events.state(coordinator_pb2.RUN_STATE_RUNNING)

    def take_checkpoint(self) -> bool:
        """Whether a checkpoint was asked for since the last call."""
        taken, self._is_checkpoint_wanted = self._is_checkpoint_wanted, False
        return taken

    async def change(self) -> None:
        """Returns once there is a wish that was not there at the last return."""
        await self._changed.wait()
        self._changed.clear()
