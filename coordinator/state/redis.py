"""A store on any Redis >= 7 or Valkey server.

Only commands of the 7.2 subset are used. Each atomic operation is one Lua script: the server checks
the fence when it writes, so a coordinator that has lost its run cannot write late.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, cast

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError, TimeoutError

from rolemesh.coordinator.recipe.addresses import masked_url
from rolemesh.coordinator.state.store import (
    NUM_GRAPHS_KEPT,
    EntryExpiredError,
    GraphEntry,
    JournalEntry,
    MetricEntry,
    RunExistsError,
    RunNotFoundError,
    RunRecord,
    RunState,
    RunStream,
    ServiceLease,
    StaleEpochError,
    StateStore,
    StoreRefusedError,
    StoreUnavailableError,
    StreamEntry,
    check_run_changes,
)

_PREFIX = "rolemesh"
_ENTRY_ID = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")
_CONNECT_TIMEOUT_S = 5.0
_COMMAND_TIMEOUT_S = 10.0
_MAX_CONNECTIONS = 16
"""Calls of hundreds of services may end at once; their entries then wait for a connection."""

# Each script answers {code, value}: 0 done, 1 stale epoch (value: the current one), 2 no such run
# (or, for create, a run of that id exists).
_CREATE_RUN = """
if redis.call('EXISTS', KEYS[1]) == 1 then return {2, 0} end
for i = 1, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
return {0, 0}
"""
_UPDATE_RUN = """
if redis.call('EXISTS', KEYS[1]) == 0 then return {2, 0} end
local current = tonumber(redis.call('GET', KEYS[2]) or '0')
if ARGV[1] ~= '' and tonumber(ARGV[1]) < current then return {1, current} end
for i = 2, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
return {0, 0}
"""
_APPEND_JOURNAL = """
local current = tonumber(redis.call('GET', KEYS[2]) or '0')
if tonumber(ARGV[1]) < current then return {1, current} end
local known = redis.call('HGET', KEYS[3], ARGV[2])
if known then return {0, known} end
local id = redis.call('XADD', KEYS[1], '*', 'entry', ARGV[3])
redis.call('HSET', KEYS[3], ARGV[2], id)
return {0, id}
"""
_APPEND_ENTRY = """
local current = tonumber(redis.call('GET', KEYS[2]) or '0')
if ARGV[1] ~= '' and tonumber(ARGV[1]) < current then return {1, current} end
return {0, redis.call('XADD', KEYS[1], 'MAXLEN', '=', ARGV[2], '*', 'payload', ARGV[3])}
"""


class RedisStateStore(StateStore):
    """Keeps runs in hashes, appended entries in streams, and leases in keys with a time to live.

    Keys of one run share a hash tag, so the scripts also work on a cluster. Nothing is retried: if
    the answer to a write is lost, the caller gets an error, and may repeat it under the same key.
    """

    def __init__(
        self,
        url: str,
        *,
        client: redis.asyncio.Redis | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Prepares the connection; nothing is sent before the first call.

        Args:
            url: URL of the server, e.g. redis://127.0.0.1:6379/0.
            client: A client to use instead of one made from the URL (for tests).
            clock: Returns the Unix time in seconds.

        Raises:
            ValueError: The URL cannot be read.
        """
        self.url = url
        self._clock = clock
        self._client = client or _client(url)

    @asynccontextmanager
    async def _translated(self) -> AsyncIterator[None]:
        try:
            yield
        except (RedisConnectionError, TimeoutError, OSError) as error:
            raise StoreUnavailableError(self.url, error) from error
        except ResponseError as error:
            raise StoreRefusedError(self.url, error) from error

    async def _command(self, *arguments: Any) -> Any:
        return await self._finished(self._client.execute_command(*arguments))  # type: ignore[no-untyped-call]

    async def _script(self, script: str, keys: list[str], arguments: list[Any]) -> Any:
        return await self._finished(self._client.eval(script, len(keys), *keys, *arguments))

    async def _finished(self, command: Awaitable[Any]) -> Any:
        """Awaits a command in such a way that the caller can always be cancelled.

        The client writes through asyncio.wait_for. Before Python 3.12 this loses a cancellation
        that comes just as the write ends (CPython issue 86296), and a run that waited for a
        cancelled watcher never ended. The command itself is finished in the background.
        """
        task = asyncio.ensure_future(command)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        async with self._translated():
            return await asyncio.shield(task)

    def _key(self, run_id: str, what: str) -> str:
        return f"{_PREFIX}:{{{run_id}}}:{what}"

    async def ping(self) -> None:
        """Returns when the server answers."""
        await self._command("PING")

    async def close(self) -> None:
        """Closes the connections."""
        async with self._translated():
            await self._client.aclose()

    # --- registry ---

    async def register_service(self, lease: ServiceLease, ttl_s: float) -> ServiceLease:
        """Enters or renews a service."""
        entered = dataclasses.replace(lease, lease_until=self._clock() + ttl_s)
        name = f"{lease.role}/{lease.address}"
        value = json.dumps(dataclasses.asdict(entered))
        await self._command(
            "SET", f"{_PREFIX}:service:{name}", value, "PX", max(1, int(ttl_s * 1000))
        )
        await self._command("SADD", f"{_PREFIX}:services", name)
        return entered

    async def remove_service(self, role: str, address: str) -> None:
        """Takes a service out."""
        name = f"{role}/{address}"
        await self._command("DEL", f"{_PREFIX}:service:{name}")
        await self._command("SREM", f"{_PREFIX}:services", name)

    async def list_services(self) -> list[ServiceLease]:
        """Services whose lease holds."""
        names = sorted(await self._command("SMEMBERS", f"{_PREFIX}:services"))
        leases = []
        for name in names:
            value = await self._command("GET", f"{_PREFIX}:service:{name.decode()}")
            if value is None:
                await self._command("SREM", f"{_PREFIX}:services", name)
            else:
                leases.append(ServiceLease(**json.loads(value)))
        return leases

    # --- runs ---

    async def create_run(self, record: RunRecord) -> None:
        """Enters a run."""
        code, _ = await self._script(
            _CREATE_RUN, [self._key(record.run_id, "run")], _fields(dataclasses.asdict(record))
        )
        if code == 2:
            raise RunExistsError(record.run_id)
        await self._command("ZADD", f"{_PREFIX}:runs", record.created_at, record.run_id)

    async def get_run(self, run_id: str) -> RunRecord:
        """The run."""
        flat = await self._command("HGETALL", self._key(run_id, "run"))
        items = flat.items() if isinstance(flat, dict) else zip(flat[::2], flat[1::2], strict=True)
        values = {name.decode(): json.loads(value) for name, value in items}
        if not values:
            raise RunNotFoundError(run_id)
        return RunRecord(**{**values, "state": RunState(values["state"])})

    async def list_runs(self, limit: int = 100) -> list[RunRecord]:
        """Newest first."""
        run_ids = await self._command("ZREVRANGE", f"{_PREFIX}:runs", 0, limit - 1)
        records = []
        for run_id in run_ids:
            # A run that was removed in between must not hide the others.
            with contextlib.suppress(RunNotFoundError):
                records.append(await self.get_run(run_id.decode()))
        return records

    async def update_run(self, run_id: str, *, epoch: int | None = None, **changes: Any) -> None:
        """Changes fields of a run."""
        check_run_changes(changes)
        code, current = await self._script(
            _UPDATE_RUN,
            [self._key(run_id, "run"), self._key(run_id, "epoch")],
            ["" if epoch is None else epoch, *_fields({"updated_at": self._clock(), **changes})],
        )
        if code == 2:
            raise RunNotFoundError(run_id)
        if code == 1:
            raise StaleEpochError(run_id, cast(int, epoch), int(current))

    async def next_epoch(self, run_id: str) -> int:
        """Takes the run over."""
        return int(await self._command("INCR", self._key(run_id, "epoch")))

    # --- journal and metrics ---

    async def append_journal(self, run_id: str, entry: JournalEntry) -> str:
        """Appends once."""
        values = dataclasses.asdict(entry)
        del values["entry_id"]
        code, value = await self._script(
            _APPEND_JOURNAL,
            [self._key(run_id, what) for what in ("journal", "epoch", "journal-keys")],
            [entry.epoch, entry.key, json.dumps(values)],
        )
        if code == 1:
            raise StaleEpochError(run_id, entry.epoch, int(value))
        return str(value.decode())

    async def read_journal(self, run_id: str, after_id: str = "") -> list[JournalEntry]:
        """Entries after the given one."""
        rows = await self._read_stream(self._key(run_id, "journal"), after_id, None)
        return [
            JournalEntry(entry_id=entry_id, **json.loads(fields[b"entry"]))
            for entry_id, fields in rows
        ]

    async def append_metrics(self, run_id: str, values: Mapping[str, float]) -> str:
        """Appends one object."""
        entry_id = await self._command(
            "XADD", self._key(run_id, "metrics"), "*", "values", json.dumps(dict(values))
        )
        return str(entry_id.decode())

    async def read_metrics(
        self, run_id: str, after_id: str = "", limit: int = 1000
    ) -> list[MetricEntry]:
        """Objects after the given one."""
        rows = await self._read_stream(self._key(run_id, "metrics"), after_id, limit)
        return [
            MetricEntry(entry_id=entry_id, values=json.loads(fields[b"values"]))
            for entry_id, fields in rows
        ]

    async def append_graph(self, run_id: str, step: int, graph: bytes) -> str:
        """Appends one graph, and lets the oldest go."""
        bound = ("MAXLEN", "=", NUM_GRAPHS_KEPT)
        fields = ("step", step, "graph", graph)
        entry_id = await self._command("XADD", self._key(run_id, "graphs"), *bound, "*", *fields)
        return str(entry_id.decode())

    async def read_graphs(
        self, run_id: str, after_id: str = "", limit: int = NUM_GRAPHS_KEPT
    ) -> list[GraphEntry]:
        """Graphs after the given one."""
        rows = await self._read_stream(self._key(run_id, "graphs"), after_id, limit)
        return [
            GraphEntry(entry_id=entry_id, step=int(fields[b"step"]), graph=fields[b"graph"])
            for entry_id, fields in rows
        ]

    async def append_entry(
        self, run_id: str, stream: RunStream, payload: bytes, epoch: int | None = None
    ) -> str:
        """Appends one entry, and lets the oldest go."""
        code, value = await self._script(
            _APPEND_ENTRY,
            [self._key(run_id, stream.value), self._key(run_id, "epoch")],
            ["" if epoch is None else epoch, stream.keep, payload],
        )
        if code == 1:
            raise StaleEpochError(run_id, cast(int, epoch), int(value))
        return str(value.decode())

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
            found = await self._command("XRANGE", key, after_id, "+", "COUNT", limit + 1)
            if not found or found[0][0].decode() != after_id:
                raise EntryExpiredError(run_id, stream, after_id)
            rows = [(entry_id.decode(), fields) for entry_id, fields in found[1:]]
        return [
            StreamEntry(entry_id=entry_id, payload=fields[b"payload"]) for entry_id, fields in rows
        ]

    async def _read_stream(
        self, key: str, after_id: str, limit: int | None
    ) -> list[tuple[str, dict[bytes, bytes]]]:
        start = f"({after_id}" if after_id else "-"
        bound = [] if limit is None else ["COUNT", limit]
        rows = await self._command("XRANGE", key, start, "+", *bound)
        return [(entry_id.decode(), fields) for entry_id, fields in rows]


def _client(url: str) -> redis.asyncio.Redis:
    try:
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            url,
            max_connections=_MAX_CONNECTIONS,
            # Seconds that a command waits for a connection.
            timeout=_COMMAND_TIMEOUT_S,
            # RESP2: the answers of stream commands have another shape in RESP3.
            protocol=2,
            socket_connect_timeout=_CONNECT_TIMEOUT_S,
            socket_timeout=_COMMAND_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
        )
        return redis.asyncio.Redis.from_pool(pool)
    except ValueError as error:
        shown = masked_url(url)
        # The cause may contain a part of the password, so it is not chained.
        cause = f" ({error})" if shown == url else ""
        raise ValueError(
            f"store.url is {shown!r}, which cannot be read{cause}: give host, port and number, "
            "e.g. redis://127.0.0.1:6379/0, and write special characters of a password as %XX"
        ) from None


def _fields(values: Mapping[str, Any]) -> list[str]:
    """Alternating names and JSON values, as HSET takes them."""
    flat: list[str] = []
    for name, value in values.items():
        flat += [name, json.dumps(dict(value) if isinstance(value, Mapping) else value)]
    return flat
