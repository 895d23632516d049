"""A store on any Redis >= 7 or Valkey server.

Only commands of the 7.2 subset are used. Each atomic operation is one Lua script: the server checks
the fence when it writes, so a coordinator that has lost its run cannot write late.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import redis.asyncio

from rolemesh.coordinator.state import redis_scripts as scripts
from rolemesh.coordinator.state.errors import (
    JournalLostError,
    RunExistsError,
    RunNotFoundError,
    StaleEpochError,
)
from rolemesh.coordinator.state.redis_link import OUTAGE_S, RedisLink
from rolemesh.coordinator.state.registrations import Registration
from rolemesh.coordinator.state.store import (
    STREAMS_OF_STEPS,
    EntryExpiredError,
    JournalEntry,
    MetricEntry,
    RunRecord,
    RunState,
    RunStream,
    ServiceLease,
    StateStore,
    StreamEntry,
    check_run_changes,
    rewind_entry,
)

_PREFIX = "rolemesh"
_ENTRY_ID = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")
_REWIND_PAGE = 256
"""Entries that the server looks at in one go when a run goes back."""


class RedisStateStore(StateStore):
    """Keeps runs in hashes, appended entries in streams, and leases in keys with a time to live.

    Keys of one run share a hash tag, so the scripts also work on a cluster. A server that goes away
    is waited for, and what was sent to it is sent again: commands by themselves are safe to repeat,
    and scripts remember their request.
    """

    def __init__(
        self,
        url: str,
        *,
        password: str | None = None,
        client: redis.asyncio.Redis | None = None,
        clock: Callable[[], float] = time.time,
        outage_s: float = OUTAGE_S,
    ) -> None:
        """Prepares the connection; nothing is sent before the first call.

        Args:
            url: URL of the server, e.g. redis://127.0.0.1:6379/0.
            password: Of the URL's user, or of the server; None: it asks for none.
            client: A client to use instead of one made from the URL (for tests).
            clock: Returns the Unix time in seconds.
            outage_s: How long a server that has answered before is waited for, in seconds; at most
                redis_scripts.REMEMBERED_S / 2.

        Raises:
            ValueError: The URL cannot be read, or `outage_s` is too long.
        """
        if outage_s > scripts.REMEMBERED_S / 2:
            raise ValueError(
                f"outage_s is {outage_s}: give at most {scripts.REMEMBERED_S / 2}, since the "
                f"server remembers a request for {scripts.REMEMBERED_S} s"
            )
        self.url = url
        self._clock = clock
        self._link = RedisLink(url, password=password, client=client, outage_s=outage_s)

    async def _changed(
        self, script: str, run_id: str, names: Sequence[str], arguments: Sequence[Any]
    ) -> tuple[int, Any]:
        """Runs a script that changes a run once, however often it has to be sent."""
        request = self._key(run_id, f"request:{uuid.uuid4().hex}")
        keys = [request, *(self._key(run_id, name) for name in names)]
        code, value = await self._link.script(script, keys, arguments)
        return code, value

    def _check(self, run_id: str, epoch: int | None, code: int, value: Any) -> None:
        """Raises what a script's refusal means."""
        if code == scripts.STALE_EPOCH:
            raise StaleEpochError(run_id, cast(int, epoch), int(value))
        if code == scripts.LOST:
            raise JournalLostError(self.url, run_id, cast(int, epoch), int(value))

    def _key(self, run_id: str, what: str) -> str:
        return f"{_PREFIX}:{{{run_id}}}:{what}"

    async def ping(self) -> None:
        """Returns when the server answers."""
        await self._link.ping()

    async def close(self) -> None:
        """Closes the connections."""
        await self._link.close()

    # --- registry ---

    async def register_service(self, lease: ServiceLease, ttl_s: float) -> ServiceLease:
        """Enters or renews a service."""
        entered = dataclasses.replace(lease, lease_until=self._clock() + ttl_s)
        name = f"{lease.role}/{lease.address}"
        value = json.dumps(dataclasses.asdict(entered))
        await self._link.command(
            "SET", f"{_PREFIX}:service:{name}", value, "PX", max(1, int(ttl_s * 1000))
        )
        await self._link.command("SADD", f"{_PREFIX}:services", name)
        return entered

    async def remove_service(self, role: str, address: str) -> None:
        """Takes a service out."""
        name = f"{role}/{address}"
        await self._link.command("DEL", f"{_PREFIX}:service:{name}")
        await self._link.command("SREM", f"{_PREFIX}:services", name)

    async def list_services(self) -> list[ServiceLease]:
        """Services whose lease holds."""
        kept, ended = await self._leased(f"{_PREFIX}:services", f"{_PREFIX}:service:")
        if ended:
            await self._link.command("SREM", f"{_PREFIX}:services", *ended)
        return [ServiceLease(**json.loads(value)) for value in kept]

    async def _leased(self, names_key: str, prefix: str) -> tuple[list[bytes], list[bytes]]:
        """Values of the names in a set whose lease holds, in order; and the names of the others."""
        names = sorted(await self._link.command("SMEMBERS", names_key))
        # At once: one after the other, a thousand services would take a thousand round trips.
        keys = [prefix + name.decode() for name in names]
        values = await self._link.command("MGET", *keys) if keys else []
        ended = [name for name, value in zip(names, values, strict=True) if value is None]
        return [value for value in values if value is not None], ended

    async def enter(self, registration: Registration, ttl_s: float) -> Registration:
        """Gives a process its place."""
        entered = dataclasses.replace(registration, lease_until=self._clock() + ttl_s)
        value = entered.incarnation + json.dumps(dataclasses.asdict(entered))
        code, known = await self._link.script(
            scripts.ENTER,
            [_place_key(entered), _places_key(entered.mesh)],
            [entered.incarnation, value, max(1, int(ttl_s * 1000)), entered.place],
        )
        return _registration(known) if code == scripts.EXISTS else entered

    async def take_out(self, registration: Registration) -> None:
        """Frees the place of a process."""
        await self._link.script(
            scripts.TAKE_OUT,
            [_place_key(registration), _places_key(registration.mesh)],
            [registration.incarnation, registration.place],
        )

    async def registrations(self, mesh: str) -> list[Registration]:
        """Those whose lease holds."""
        kept, _ = await self._leased(_places_key(mesh), f"{_places_key(mesh)}:")
        return sorted(map(_registration, kept), key=lambda one: (one.role, one.number))

    # --- runs ---

    async def create_run(self, record: RunRecord) -> None:
        """Enters a run."""
        fields = _fields(dataclasses.asdict(record))
        code, _ = await self._changed(scripts.CREATE_RUN, record.run_id, ["run"], fields)
        if code == scripts.EXISTS:
            raise RunExistsError(record.run_id)
        await self._link.command("ZADD", f"{_PREFIX}:runs", record.created_at, record.run_id)

    async def get_run(self, run_id: str) -> RunRecord:
        """The run."""
        flat = await self._link.command("HGETALL", self._key(run_id, "run"))
        items = flat.items() if isinstance(flat, dict) else zip(flat[::2], flat[1::2], strict=True)
        values = {name.decode(): json.loads(value) for name, value in items}
        if not values:
            raise RunNotFoundError(run_id)
        return RunRecord(**{**values, "state": RunState(values["state"])})

    async def list_runs(self, limit: int = 100) -> list[RunRecord]:
        """Newest first."""
        run_ids = await self._link.command("ZREVRANGE", f"{_PREFIX}:runs", 0, limit - 1)
        records = []
        for run_id in run_ids:
            # A run that was removed in between must not hide the others.
            with contextlib.suppress(RunNotFoundError):
                records.append(await self.get_run(run_id.decode()))
        return records

    async def update_run(self, run_id: str, *, epoch: int | None = None, **changes: Any) -> None:
        """Changes fields of a run."""
        check_run_changes(changes)
        code, current = await self._changed(
            scripts.UPDATE_RUN,
            run_id,
            ["run", "epoch"],
            ["" if epoch is None else epoch, *_fields({"updated_at": self._clock(), **changes})],
        )
        self._check(run_id, epoch, code, current)
        if code == scripts.ABSENT:
            raise RunNotFoundError(run_id)

    async def next_epoch(self, run_id: str, *, at_least: int = 1, led: int | None = None) -> int:
        """Takes the run over."""
        code, epoch = await self._changed(
            scripts.NEXT_EPOCH, run_id, ["epoch"], ["" if led is None else led, at_least]
        )
        self._check(run_id, led, code, epoch)
        return int(epoch)

    # --- journal and metrics ---

    async def append_journal(self, run_id: str, entry: JournalEntry) -> str:
        """Appends once."""
        return await self._append_journal(run_id, entry, ["journal", "epoch", "journal-keys"])

    async def _append_journal(self, run_id: str, entry: JournalEntry, names: list[str]) -> str:
        values = dataclasses.asdict(entry)
        del values["entry_id"]
        code, value = await self._link.script(
            scripts.APPEND_JOURNAL,
            [self._key(run_id, name) for name in names],
            [entry.epoch, entry.key, json.dumps(values)],
        )
        self._check(run_id, entry.epoch, code, value)
        return str(value.decode())

    async def read_journal(self, run_id: str, after_id: str = "") -> list[JournalEntry]:
        """Entries after the given one."""
        rows = await self._read_stream(self._key(run_id, "journal"), after_id, None)
        return [
            JournalEntry(entry_id=entry_id, **json.loads(fields[b"entry"]))
            for entry_id, fields in rows
        ]

    async def append_metrics(
        self, run_id: str, values: Mapping[str, float], epoch: int | None = None
    ) -> str:
        """Appends one object."""
        fields: list[Any] = ["values", json.dumps(dict(values))]
        if "step" in values:
            fields += ["step", int(values["step"])]
        return await self._append(run_id, "metrics", fields, epoch=epoch)

    async def read_metrics(
        self, run_id: str, after_id: str = "", limit: int = 1000
    ) -> list[MetricEntry]:
        """Objects after the given one."""
        rows = await self._read_stream(self._key(run_id, "metrics"), after_id, limit)
        return [
            MetricEntry(entry_id=entry_id, values=json.loads(fields[b"values"]))
            for entry_id, fields in rows
        ]

    async def _append(
        self,
        run_id: str,
        stream: str,
        fields: Sequence[Any],
        *,
        keep: int | None = None,
        epoch: int | None = None,
    ) -> str:
        fence, bound = ("" if value is None else value for value in (epoch, keep))
        code, value = await self._changed(
            scripts.APPEND, run_id, [stream, "epoch"], [fence, bound, *fields]
        )
        self._check(run_id, epoch, code, value)
        return str(value.decode())

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
        fields: list[Any] = [_payload_field(stream), payload]
        if step is not None:
            fields += ["step", step]
        return await self._append(run_id, stream.value, fields, keep=stream.keep, epoch=epoch)

    async def read_entries(
        self, run_id: str, stream: RunStream, after_id: str = "", limit: int = 1000
    ) -> list[StreamEntry]:
        """Entries after the given one."""
        key = self._key(run_id, stream.value)
        if not after_id:
            rows = await self._read_stream(key, "", limit)
        elif not _ENTRY_ID.fullmatch(after_id):
            raise EntryExpiredError(run_id, stream, after_id)
        else:
            # One command reads from the given entry on: it cannot be dropped between two commands.
            found = await self._link.command("XRANGE", key, after_id, "+", "COUNT", limit + 1)
            if not found or found[0][0].decode() != after_id:
                raise EntryExpiredError(run_id, stream, after_id)
            rows = [(entry_id.decode(), fields) for entry_id, fields in found[1:]]
        name = _payload_field(stream).encode()
        return [
            StreamEntry(
                entry_id=entry_id,
                payload=fields[name],
                step=int(fields[b"step"]) if b"step" in fields else None,
            )
            for entry_id, fields in rows
        ]

    async def rewind(self, run_id: str, step: int, *, epoch: int) -> str:
        """Removes what later steps left behind."""
        for stream in ("metrics", *(one.value for one in STREAMS_OF_STEPS)):
            keys = [self._key(run_id, stream), self._key(run_id, "epoch")]
            after = ""
            while True:
                code, value = await self._link.script(
                    scripts.REMOVE_LATER, keys, [epoch, step, after, _REWIND_PAGE]
                )
                self._check(run_id, epoch, code, value)
                after = value.decode()
                if not after:
                    break
        return await self._append_journal(
            run_id, rewind_entry(step, epoch), ["journal", "epoch", "journal-keys", "rewind"]
        )

    async def newest_rewind(self, run_id: str) -> str:
        """Which entry of the journal says so."""
        entry_id = await self._link.command("GET", self._key(run_id, "rewind"))
        return "" if entry_id is None else str(entry_id.decode())

    async def _read_stream(
        self, key: str, after_id: str, limit: int | None
    ) -> list[tuple[str, dict[bytes, bytes]]]:
        start = f"({after_id}" if after_id else "-"
        bound = [] if limit is None else ["COUNT", limit]
        rows = await self._link.command("XRANGE", key, start, "+", *bound)
        return [(entry_id.decode(), fields) for entry_id, fields in rows]


def _places_key(mesh: str) -> str:
    """Key of the places that a mesh has; keys of each place begin with it."""
    return f"{_PREFIX}:{{places:{mesh}}}"


def _place_key(registration: Registration) -> str:
    return f"{_places_key(registration.mesh)}:{registration.place}"


def _registration(value: bytes) -> Registration:
    """What stands at a place, behind the name of its process."""
    return Registration(**json.loads(value[value.index(b"{") :]))


def _payload_field(stream: RunStream) -> str:
    """Name of the payload in an entry of a stream, as it stands in stores that are in use."""
    return "graph" if stream is RunStream.GRAPHS else "payload"


def _fields(values: Mapping[str, Any]) -> list[str]:
    """Alternating names and JSON values, as HSET takes them."""
    flat: list[str] = []
    for name, value in values.items():
        flat += [name, json.dumps(dict(value) if isinstance(value, Mapping) else value)]
    return flat
