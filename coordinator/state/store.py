"""Contract of the store, which keeps state of the coordinator outside its memory.

Registry with leases, run records, the fencing epoch, the journal of acknowledged operations,
the metric stream, and bounded streams of events, executed graphs, samples, loads of experts, device
use and wishes.
All implementations behave alike: one contract suite runs over them.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rolemesh.coordinator.state.errors import StateStoreError
from rolemesh.coordinator.state.registrations import Registration


class RunState(StrEnum):
    """Life of a run. A wish to stop or to pause is a field of RunRecord, not a state."""

    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    RECOVERING = "recovering"
    SUCCEEDED = "succeeded"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def is_final(self) -> bool:
        """Whether no other state follows."""
        return self in (RunState.SUCCEEDED, RunState.STOPPED, RunState.FAILED)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """A run as the store knows it."""

    run_id: str
    name: str
    num_steps: int
    """Steps planned."""
    directory: str
    """Folder of the run's files, on the coordinator's host."""
    created_at: float
    """Unix time, seconds."""
    updated_at: float
    """Unix time, seconds."""
    state: RunState = RunState.STARTING
    step: int = 0
    """Steps finished."""
    algorithm: str = ""
    """Type of its algorithm."""
    activity: str = ""
    """What it does right now, e.g. "step 3"; of a run that early stopping ended, why."""
    services: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Role, address and policy_version by name of the service, once all are initialised. The
    version is that of the initialisation."""
    stop_requested: bool = False
    """Whether the run is to end after the step in progress."""
    pause_requested: bool = False
    """Whether the run is to pause before its next step."""
    failure: str = ""
    """Why it failed, empty otherwise."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the newest step."""
    recoveries: int = 0
    """How often it had to recover from a failure."""
    plan: Mapping[str, Any] = field(default_factory=dict)
    """What its recipe says was planned, as JSON values; empty where it was not planned."""


UPDATABLE_FIELDS = frozenset(
    field.name for field in dataclasses.fields(RunRecord) if field.name not in ("run_id",)
)
"""Fields that update_run may change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceLease:
    """A service in the registry."""

    role: str
    address: str
    run_id: str = ""
    """Run that it takes part in."""
    name: str = ""
    """Its name in that run, e.g. "actor" or "rollout-1"."""
    pid: int = 0
    """Process id on its host, 0 when not known."""
    status: str = ""
    """Its last status, in plain words."""
    lease_until: float = 0.0
    """Unix time, seconds, at which the lease ends unless it is renewed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JournalEntry:
    """One acknowledged operation, or the commit of a step."""

    epoch: int
    step: int
    operation: str
    sequence: int
    result: Mapping[str, Any]
    """Summary as JSON values: versions and references, never data."""
    entry_id: str = ""
    """Id from the store; ids are ordered by time of append."""

    @property
    def key(self) -> str:
        """Key of the operation: a second append with the same key changes nothing."""
        return f"{self.epoch}/{self.step}/{self.operation}/{self.sequence}"


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricEntry:
    """One object of the metric stream."""

    entry_id: str
    values: Mapping[str, float]


REWIND_OPERATION = "run.rewind"
"""Operation of the journal's entry that says to which step a run went back."""


def rewind_entry(step: int, epoch: int) -> JournalEntry:
    """The journal's entry of a run that went back to a step."""
    return JournalEntry(epoch=epoch, step=step, operation=REWIND_OPERATION, sequence=0, result={})


class RunStream(StrEnum):
    """Streams of a run beside journal and metrics. Payloads are opaque bytes."""

    EVENTS = "events"
    """Events of the run, for its watches."""
    GRAPHS = "graphs"
    """The executed graphs of the newest steps: JSON with step and nodes, as in a line of
    dataflow.jsonl. A graph has some kilobytes; the folder of the run has all of them."""
    SAMPLES = "samples"
    """Some trajectories of a step."""
    EXPERTS = "experts"
    """Loads of the experts of a step. Of a large mixture, an entry has some ten kilobytes; the
    folder of the run has more of them."""
    DEVICES = "devices"
    """How busy the devices were."""
    FLOW = "flow"
    """The graph of the step in progress."""
    CHECKPOINT_WISHES = "checkpoint-wishes"
    """Ids of requests for a checkpoint."""

    @property
    def keep(self) -> int:
        """Newest entries of a run that a store keeps."""
        return _KEPT[self]


_KEPT = {
    RunStream.EVENTS: 100_000,
    RunStream.GRAPHS: 256,
    RunStream.SAMPLES: 64,
    RunStream.EXPERTS: 256,
    RunStream.DEVICES: 3_600,
    RunStream.FLOW: 1,
    RunStream.CHECKPOINT_WISHES: 256,
}

STREAMS_OF_STEPS = (RunStream.GRAPHS, RunStream.SAMPLES, RunStream.EXPERTS, RunStream.FLOW)
"""Those whose entries `rewind` removes when it takes their step back."""


class EntryExpiredError(StateStoreError):
    """Entries after one that is no longer kept were requested: some may be missing in between."""

    def __init__(self, run_id: str, stream: RunStream, entry_id: str) -> None:
        self.run_id = run_id
        self.stream = stream
        self.entry_id = entry_id
        super().__init__(
            f"run {run_id!r}: {stream.value} after {entry_id!r} cannot be given without a gap, "
            f"since that one is not kept any longer (or never was): of {stream.value} the newest "
            f"{stream.keep} are; begin anew"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamEntry:
    """One entry of a RunStream."""

    entry_id: str
    payload: bytes
    step: int | None = None
    """Step that it is of; None: of no step."""


class StateStore(ABC):
    """Keeps everything that outlives a call, a step, or the coordinator.

    Invariant: after `next_epoch` returned n, every write with an epoch below n is refused with
    StaleEpochError, from every caller. One with an epoch above the newest is refused with
    JournalLostError: the store has lost its data. Entry ids are opaque, and "" stands for the
    beginning.

    A store that goes away for a while is waited for. A call that returns has had its effect once;
    one that raises StoreUnavailableError may have had it or not.

    Owner: one asyncio loop; methods may be called concurrently on it.
    """

    url: str
    """URL of the store, for messages to people."""

    @abstractmethod
    async def ping(self) -> None:
        """Returns when the store answers, or raises StoreUnavailableError."""

    @abstractmethod
    async def close(self) -> None:
        """Closes the connections."""

    # --- registry ---

    @abstractmethod
    async def register_service(self, lease: ServiceLease, ttl_s: float) -> ServiceLease:
        """Enters or renews a service; it drops out after ttl_s seconds without a renewal."""

    @abstractmethod
    async def remove_service(self, role: str, address: str) -> None:
        """Removes a service. An unknown one is ignored."""

    @abstractmethod
    async def list_services(self) -> list[ServiceLease]:
        """Services whose lease holds, ordered by role and address."""

    @abstractmethod
    async def enter(self, registration: Registration, ttl_s: float) -> Registration:
        """Gives a process its place for ttl_s seconds, or renews that, unless another one has it.

        Returns:
            Who has the place now: the caller, or another incarnation whose lease holds.
        """

    @abstractmethod
    async def take_out(self, registration: Registration) -> None:
        """Frees the place of a process, where it has it."""

    @abstractmethod
    async def registrations(self, mesh: str) -> list[Registration]:
        """Those of a mesh whose lease holds, ordered by role and number."""

    # --- runs ---

    @abstractmethod
    async def create_run(self, record: RunRecord) -> None:
        """Enters a run, or raises RunExistsError."""

    @abstractmethod
    async def get_run(self, run_id: str) -> RunRecord:
        """The run, or RunNotFoundError."""

    @abstractmethod
    async def list_runs(self, limit: int = 100) -> list[RunRecord]:
        """Newest first."""

    @abstractmethod
    async def update_run(self, run_id: str, *, epoch: int | None = None, **changes: Any) -> None:
        """Changes fields of a run, and nothing else.

        Args:
            run_id: The run.
            epoch: Epoch of the coordinator that owns the run; None for a wish from outside.
            **changes: New values of fields of RunRecord.

        Raises:
            RunNotFoundError: No such run.
            StaleEpochError: `epoch` is older than the newest one.
            JournalLostError: `epoch` is newer than the newest one.
            ValueError: A name is not a field that can be changed.
        """

    @abstractmethod
    async def next_epoch(self, run_id: str, *, at_least: int = 1, led: int | None = None) -> int:
        """Takes the run over: raises its epoch and returns it (the first is 1).

        Args:
            run_id: The run.
            at_least: Lowest epoch to return. Services refuse an older one than they know, so a
                caller that knows of an epoch asks for the next: the store may have lost it.
            led: Epoch under which the caller leads the run. It gets the next one only as long as
                no other has taken the run over. None: it takes the run over, from any other.

        Raises:
            StaleEpochError: `led` is older than the newest one.
            JournalLostError: `led` is newer than the newest one.
        """

    # --- journal and metrics ---

    @abstractmethod
    async def append_journal(self, run_id: str, entry: JournalEntry) -> str:
        """Appends and returns the entry's id; a repeat of the same key returns the first id.

        Raises:
            StaleEpochError: The entry's epoch is older than the newest one.
            JournalLostError: The entry's epoch is newer than the newest one.
        """

    @abstractmethod
    async def read_journal(self, run_id: str, after_id: str = "") -> list[JournalEntry]:
        """Entries after the given one, oldest first."""

    @abstractmethod
    async def append_metrics(
        self, run_id: str, values: Mapping[str, float], epoch: int | None = None
    ) -> str:
        """Appends one object and returns its id. Its value "step" says which step it is of.

        Raises:
            StaleEpochError: `epoch` is older than the newest one.
        """

    @abstractmethod
    async def read_metrics(
        self, run_id: str, after_id: str = "", limit: int = 1000
    ) -> list[MetricEntry]:
        """Objects after the given one, oldest first; also when the given one was removed."""

    @abstractmethod
    async def append_entry(
        self,
        run_id: str,
        stream: RunStream,
        payload: bytes,
        epoch: int | None = None,
        *,
        step: int | None = None,
    ) -> str:
        """Appends to a stream of a run and returns the entry's id.

        Only the stream's `keep` newest entries are kept: the oldest is dropped for it.

        Args:
            run_id: The run.
            stream: Which of its streams.
            payload: What to keep.
            epoch: Epoch of the coordinator that owns the run; None for a wish from outside.
            step: Step that it is of; `rewind` removes those of later steps. None: of no step.

        Raises:
            StaleEpochError: `epoch` is older than the newest one.
            JournalLostError: `epoch` is newer than the newest one.
        """

    @abstractmethod
    async def read_entries(
        self, run_id: str, stream: RunStream, after_id: str = "", limit: int = 1000
    ) -> list[StreamEntry]:
        """Entries after the given one, oldest first, none left out.

        Raises:
            EntryExpiredError: `after_id` is no longer kept, so entries after it may be gone, too.
        """

    @abstractmethod
    async def rewind(self, run_id: str, step: int, *, epoch: int) -> str:
        """Removes what steps after `step` left in metrics, graphs, samples, loads and flow.

        Journal, events and device use stay. At last an entry of operation REWIND_OPERATION is
        appended to the journal, once for each epoch and step; its id is returned.

        Args:
            run_id: The run.
            step: Newest step that stays; 0 keeps none.
            epoch: Epoch of the coordinator that owns the run.

        Raises:
            StaleEpochError: `epoch` is older than the newest one.
            JournalLostError: `epoch` is newer than the newest one.
        """

    @abstractmethod
    async def newest_rewind(self, run_id: str) -> str:
        """Id of the journal's entry of the newest `rewind`, "" when there was none.

        A reader that keeps what it has read reads anew when it changes.
        """


def check_run_changes(changes: Mapping[str, Any]) -> None:
    """Raises ValueError for a name that is not a field of RunRecord that may be changed."""
    for name in changes:
        if name not in UPDATABLE_FIELDS:
            raise ValueError(
                f"{name}: no field of a run that can be changed; fields are "
                f"{', '.join(sorted(UPDATABLE_FIELDS))}"
            )
