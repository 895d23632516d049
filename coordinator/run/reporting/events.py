"""Events of a run: its own process writes each once, in order, to the run's stream."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rolemesh.coordinator.api.messages import to_timestamp
from rolemesh.coordinator.dataflow.loop.clock import unix_time
from rolemesh.coordinator.dataflow.observer import RunObserver
from rolemesh.coordinator.state.store import RunStream, StateStore
from rolemesh.v1 import coordinator_pb2


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovered:
    """One recovery of a run, for its events and its summary."""

    step: int
    """Steps that were kept."""
    cause: str
    """What had failed."""
    seconds: float = 0.0
    """From the failure until steps were made again; 0 where they have not stopped."""
    restarted: tuple[str, ...] = ()
    """Services that were initialised anew; the others kept their models."""
    lost_steps: int = 0
    """Steps that had been made and are made again, since only an older state was left of them."""

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {**asdict(self), "restarted": list(self.restarted)}


class EventLog:
    """Collects events and appends them to the store.

    Collecting takes no time and cannot fail, so a signal handler or an observer may do it. `flush`
    appends the collected events. No event is appended twice: if its append fails, it is dropped.

    Owner: one asyncio loop.

    Example::

        events.note("held-out score ...")
        await events.flush()
    """

    def __init__(self, store: StateStore, run_id: str, epoch: int | None = None) -> None:
        """Prepares.

        Args:
            store: Store that gets the events.
            run_id: Id of the run.
            epoch: Epoch under which they are appended; see the attribute.
        """
        self.step = 0
        """Steps finished; every event carries them."""
        self.epoch = epoch
        """Epoch of the run; None before the run has one, and when a client holds the newest."""
        self._store = store
        self._run_id = run_id
        self._waiting: deque[coordinator_pb2.RunEvent] = deque()
        self._turn = asyncio.Lock()

    def state(self, state: coordinator_pb2.RunState.ValueType, failure: str = "") -> None:
        """The run is in another state."""
        change = coordinator_pb2.RunStateChange(state=state, failure=failure)
        self._add(coordinator_pb2.RunEvent(state=change))

    def step_made(self, record: Mapping[str, float]) -> None:
        """A step was made."""
        self._add(coordinator_pb2.RunEvent(step_made=coordinator_pb2.StepMade(metrics=record)))

    def evaluated(self, scalars: Mapping[str, float]) -> None:
        """The policy was evaluated."""
        self._add(coordinator_pb2.RunEvent(evaluated=coordinator_pb2.Evaluated(metrics=scalars)))

    def checkpoint_saved(self, directory: str) -> None:
        """A checkpoint of all roles is complete."""
        saved = coordinator_pb2.CheckpointSaved(directory=directory)
        self._add(coordinator_pb2.RunEvent(checkpoint_saved=saved))

    def recovered(self, recovered: Recovered) -> None:
        """The run goes on after a failure."""
        told = coordinator_pb2.Recovered(**recovered.to_dict())
        self._add(coordinator_pb2.RunEvent(recovered=told))

    def resumed(self, step: int, where: str) -> None:
        """The run goes on in another process; `where` says from what, for people."""
        self.step = step
        told = coordinator_pb2.Resumed(step=step, where=where)
        self._add(coordinator_pb2.RunEvent(resumed=told))

    def note(self, text: str) -> None:
        """Something worth a line happened."""
        self._add(coordinator_pb2.RunEvent(note=coordinator_pb2.Note(text=text)))

    def _add(self, event: coordinator_pb2.RunEvent) -> None:
        event.step = self.step
        event.time.CopyFrom(to_timestamp(unix_time()))
        self._waiting.append(event)

    async def flush(self) -> None:
        """Appends the collected events; raises the errors of the store."""
        async with self._turn:
            while self._waiting:
                payload = self._waiting.popleft().SerializeToString()
                await self._store.append_entry(self._run_id, RunStream.EVENTS, payload, self.epoch)


class NotingObserver:
    """An observer that passes everything on, and makes an event of every line."""

    def __init__(self, shown: RunObserver, events: EventLog) -> None:
        self._shown = shown
        self._events = events

    def on_phase(self, role: str, stage: str, done: int, total: int) -> None:
        """Passes it on."""
        self._shown.on_phase(role, stage, done, total)

    def on_estimate(self, step: int, seconds: float, gone_s: float) -> None:
        """Passes it on."""
        self._shown.on_estimate(step, seconds, gone_s)

    def on_step(self, record: Mapping[str, float]) -> None:
        """Passes it on. The loop that made the step writes the event."""
        self._shown.on_step(record)

    def on_event(self, text: str) -> None:
        """Passes it on, and notes it as an event."""
        self._events.note(text)
        self._shown.on_event(text)

    def show(self, text: str) -> None:
        """Passes a line on that has an event of another kind."""
        self._shown.on_event(text)
