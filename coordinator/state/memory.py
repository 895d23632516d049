"""A store in the coordinator's own memory, for unit tests: nothing outlives the process."""

from __future__ import annotations

import bisect
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from rolemesh.coordinator.state.errors import (
    JournalLostError,
    RunExistsError,
    RunNotFoundError,
    StaleEpochError,
)
from rolemesh.coordinator.state.registrations import Registration
from rolemesh.coordinator.state.store import (
    STREAMS_OF_STEPS,
    EntryExpiredError,
    JournalEntry,
    MetricEntry,
    RunRecord,
    RunStream,
    ServiceLease,
    StateStore,
    StreamEntry,
    check_run_changes,
    rewind_entry,
)

Entry = TypeVar("Entry")


class MemoryStateStore(StateStore):
    """Dictionaries behind the contract.

    No method awaits anything between reading and writing, so each is atomic on the loop.
    """

    url = "memory:"

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._services: dict[tuple[str, str], ServiceLease] = {}
        self._places: dict[tuple[str, str, int], Registration] = {}
        self._runs: dict[str, RunRecord] = {}
        self._epochs: dict[str, int] = {}
        self._journals: dict[str, dict[str, JournalEntry]] = {}
        self._metrics: dict[str, list[MetricEntry]] = {}
        self._streams: dict[tuple[str, RunStream], deque[StreamEntry]] = {}
        self._rewinds: dict[str, str] = {}
        self._next_id = 0

    async def ping(self) -> None:
        """Memory always answers."""

    async def close(self) -> None:
        """Does nothing: there is no connection."""

    def _make_id(self) -> str:
        # Fixed width, so that ids order as text: consumers compare them with after_id.
        self._next_id += 1
        return f"{self._next_id:020d}"

    def _check_epoch(self, run_id: str, epoch: int | None) -> None:
        current = self._epochs.get(run_id, 0)
        if epoch is None:
            return
        if epoch < current:
            raise StaleEpochError(run_id, epoch, current)
        if epoch > current:
            raise JournalLostError(self.url, run_id, epoch, current)

    async def register_service(self, lease: ServiceLease, ttl_s: float) -> ServiceLease:
        """Enters or renews a service."""
        entered = dataclasses.replace(lease, lease_until=self._clock() + ttl_s)
        self._services[lease.role, lease.address] = entered
        return entered

    async def remove_service(self, role: str, address: str) -> None:
        """Takes a service out."""
        self._services.pop((role, address), None)

    async def list_services(self) -> list[ServiceLease]:
        """Services whose lease holds."""
        now = self._clock()
        self._services = {k: v for k, v in self._services.items() if v.lease_until > now}
        return [self._services[key] for key in sorted(self._services)]

    async def enter(self, registration: Registration, ttl_s: float) -> Registration:
        """Gives a process its place."""
        place = registration.mesh, registration.role, registration.number
        known, now = self._places.get(place), self._clock()
        if (
            known is not None
            and known.lease_until > now
            and known.incarnation != registration.incarnation
        ):
            return known
        self._places[place] = dataclasses.replace(registration, lease_until=now + ttl_s)
        return self._places[place]

    async def take_out(self, registration: Registration) -> None:
        """Frees the place of a process."""
        place = registration.mesh, registration.role, registration.number
        known = self._places.get(place)
        if known is not None and known.incarnation == registration.incarnation:
            del self._places[place]

    async def registrations(self, mesh: str) -> list[Registration]:
        """Those whose lease holds."""
        now = self._clock()
        self._places = {k: v for k, v in self._places.items() if v.lease_until > now}
        return [self._places[key] for key in sorted(self._places) if key[0] == mesh]

    async def create_run(self, record: RunRecord) -> None:
        """Enters a run."""
        if record.run_id in self._runs:
            raise RunExistsError(record.run_id)
        self._runs[record.run_id] = record

    async def get_run(self, run_id: str) -> RunRecord:
        """The run."""
        if run_id not in self._runs:
            raise RunNotFoundError(run_id)
        return self._runs[run_id]

    async def list_runs(self, limit: int = 100) -> list[RunRecord]:
        """Newest first."""
        # Equal times are ordered by id, so that the order is stable.
        records = self._runs.values()
        return sorted(records, key=lambda one: (one.created_at, one.run_id), reverse=True)[:limit]

    async def update_run(self, run_id: str, *, epoch: int | None = None, **changes: Any) -> None:
        """Changes fields of a run."""
        check_run_changes(changes)
        self._check_epoch(run_id, epoch)
        record = await self.get_run(run_id)
        self._runs[run_id] = dataclasses.replace(record, **{"updated_at": self._clock(), **changes})

    async def next_epoch(self, run_id: str, *, at_least: int = 1, led: int | None = None) -> int:
        """Takes the run over."""
        self._check_epoch(run_id, led)
        self._epochs[run_id] = max(self._epochs.get(run_id, 0) + 1, at_least)
        return self._epochs[run_id]

    async def append_journal(self, run_id: str, entry: JournalEntry) -> str:
        """Appends once."""
        self._check_epoch(run_id, entry.epoch)
        journal = self._journals.setdefault(run_id, {})
        if entry.key not in journal:
            journal[entry.key] = dataclasses.replace(entry, entry_id=self._make_id())
        return journal[entry.key].entry_id

    async def read_journal(self, run_id: str, after_id: str = "") -> list[JournalEntry]:
        """Entries after the given one."""
        entries = self._journals.get(run_id, {}).values()
        return [entry for entry in entries if entry.entry_id > after_id]

    async def append_metrics(
        self, run_id: str, values: Mapping[str, float], epoch: int | None = None
    ) -> str:
        """Appends one object."""
        self._check_epoch(run_id, epoch)
        entry = MetricEntry(entry_id=self._make_id(), values=dict(values))
        self._metrics.setdefault(run_id, []).append(entry)
        return entry.entry_id

    async def read_metrics(
        self, run_id: str, after_id: str = "", limit: int = 1000
    ) -> list[MetricEntry]:
        """Objects after the given one."""
        found = [entry for entry in self._metrics.get(run_id, []) if entry.entry_id > after_id]
        return found[:limit]

    async def append_entry(
        self,
        run_id: str,
        stream: RunStream,
        payload: bytes,
        epoch: int | None = None,
        *,
        step: int | None = None,
    ) -> str:
        """Appends one entry, and lets the oldest go."""
        self._check_epoch(run_id, epoch)
        entry = StreamEntry(entry_id=self._make_id(), payload=payload, step=step)
        self._streams.setdefault((run_id, stream), deque(maxlen=stream.keep)).append(entry)
        return entry.entry_id

    async def read_entries(
        self, run_id: str, stream: RunStream, after_id: str = "", limit: int = 1000
    ) -> list[StreamEntry]:
        """Entries after the given one."""
        kept = list(self._streams.get((run_id, stream), ()))
        if not after_id:
            return kept[:limit]
        # Ids order as text.
        place = bisect.bisect_left(kept, after_id, key=lambda entry: entry.entry_id)
        if place == len(kept) or kept[place].entry_id != after_id:
            raise EntryExpiredError(run_id, stream, after_id)
        return kept[place + 1 : place + 1 + limit]

    async def rewind(self, run_id: str, step: int, *, epoch: int) -> str:
        """Removes what later steps left behind."""
        self._check_epoch(run_id, epoch)
        _keep(self._metrics.get(run_id), lambda entry: entry.values.get("step", 0) <= step)
        for stream in STREAMS_OF_STEPS:
            _keep(self._streams.get((run_id, stream)), lambda entry: (entry.step or 0) <= step)
        self._rewinds[run_id] = await self.append_journal(run_id, rewind_entry(step, epoch))
        return self._rewinds[run_id]

    async def newest_rewind(self, run_id: str) -> str:
        """Which entry of the journal says so."""
        return self._rewinds.get(run_id, "")


def _keep(entries: list[Entry] | deque[Entry] | None, is_kept: Callable[[Entry], bool]) -> None:
    if entries is not None:
        kept = [entry for entry in entries if is_kept(entry)]
        entries.clear()
        entries.extend(kept)
