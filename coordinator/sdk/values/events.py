"""Events of a run, as immutable values."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rolemesh.coordinator.sdk.values.messages import from_message, to_time
from rolemesh.coordinator.sdk.values.runs import RunState
from rolemesh.v1 import coordinator_pb2


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened in a run."""

    event_id: str
    """From here a watch goes on."""
    time: datetime.datetime
    step: int
    """Steps finished by then."""

    @staticmethod
    def of(event: coordinator_pb2.RunEvent) -> Event:
        """From its message; one of a kind that this version does not know is a bare Event."""
        head: dict[str, Any] = {
            "event_id": event.event_id,
            "time": to_time(event.time),
            "step": event.step,
        }
        name = event.WhichOneof("event")
        return from_message(_KINDS[name], getattr(event, name), **head) if name else Event(**head)


@dataclass(frozen=True, slots=True)
class StateChanged(Event):
    """The run is in another state."""

    state: RunState
    failure: str
    """Why it failed, or what it recovers from; empty otherwise."""


@dataclass(frozen=True, slots=True)
class StepMade(Event):
    """A step was made."""

    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Evaluated(Event):
    """The weights were evaluated on held-out prompts or rows."""

    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class CheckpointSaved(Event):
    """A checkpoint of all roles was saved."""

    directory: str
    """On the coordinator's host."""


@dataclass(frozen=True, slots=True)
class Recovered(Event):
    """The run goes on after a failure; `step` steps were kept."""

    cause: str
    """What had failed."""
    seconds: float
    """From the failure until steps are made again."""
    restarted: tuple[str, ...]
    """Services whose models were loaded anew; the others kept theirs."""
    lost_steps: int
    """Steps that had been made before the failure and are made again: their events come again."""


@dataclass(frozen=True, slots=True)
class Resumed(Event):
    """The run goes on in another process; it has made `step` steps, and makes later ones again."""

    where: str
    """Where these were read, e.g. "its journal"."""


@dataclass(frozen=True, slots=True)
class Noted(Event):
    """Something worth a line."""

    text: str


_KINDS: Mapping[str, type[Event]] = {
    "state": StateChanged,
    "step_made": StepMade,
    "evaluated": Evaluated,
    "checkpoint_saved": CheckpointSaved,
    "note": Noted,
    "recovered": Recovered,
    "resumed": Resumed,
}
"""By the name of what an event holds."""
