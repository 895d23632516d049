"""Event streams, at the level of ASGI: no socket hides what is sent and what is left behind."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from starlette.types import Message, Scope
from support.rest_servers import NO_PAGES, client_of, refused

from rolemesh.coordinator.api.http import events as events_module
from rolemesh.coordinator.api.http.app import make_app
from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.store import RunRecord, RunState, RunStream, StateStore
from rolemesh.rpc.errors import UnavailableError
from rolemesh.v1 import coordinator_pb2

NEVER_S = 3600.0


def note(number: int) -> coordinator_pb2.RunEvent:
    event = coordinator_pb2.RunEvent(step=number, note=coordinator_pb2.Note(text=f"line {number}"))
    event.time.FromSeconds(1_767_225_600 + number)
    return event


def ended() -> coordinator_pb2.RunEvent:
    change = coordinator_pb2.RunStateChange(state=coordinator_pb2.RUN_STATE_SUCCEEDED)
    event = coordinator_pb2.RunEvent(step=99, state=change)
    event.time.FromSeconds(1_767_225_700)
    return event


async def store_with(*events: coordinator_pb2.RunEvent) -> StateStore:
    store = MemoryStateStore()
    await store.create_run(
        RunRecord(run_id="r", name="n", num_steps=9, directory="", created_at=1.0, updated_at=1.0)
    )
    for event in events:
        if event.HasField("state"):
            await store.update_run("r", state=RunState.SUCCEEDED)
        await store.append_entry("r", RunStream.EVENTS, event.SerializeToString())
    return store


class Feed:
    """Operations whose events are put in by the test, and which see when nobody reads any more."""

    def __init__(self, *, has_ended: bool = False) -> None:
        self._has_ended = has_ended
        self.queue: asyncio.Queue[coordinator_pb2.RunEvent | Exception | None] = asyncio.Queue()
        self.num_taken = 0
        self.num_open = 0

    async def get_run(self, run_id: str) -> coordinator_pb2.Run:
        states = coordinator_pb2.RUN_STATE_RUNNING, coordinator_pb2.RUN_STATE_STOPPED
        return coordinator_pb2.Run(run_id=run_id, state=states[self._has_ended])

    async def watch_run(
        self, run_id: str, after_event_id: str = ""
    ) -> AsyncIterator[coordinator_pb2.RunEvent]:
        self.num_open += 1
        try:
            while (event := await self.queue.get()) is not None:
                if isinstance(event, Exception):
                    raise event
                self.num_taken += 1
                event.event_id = str(self.num_taken)
                yield event
        finally:
            self.num_open -= 1


class Reader:
    """One request for events; `take` is what it does with each message that it is sent."""

    def __init__(self, app: Any, query: str = "", last_event_id: str | None = None) -> None:
        headers = [(b"host", b"localhost")]
        if last_event_id is not None:
            headers.append((b"last-event-id", last_event_id.encode()))
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "GET",
            "scheme": "http",
            "path": "/api/v1/runs/r/events",
            "raw_path": b"/api/v1/runs/r/events",
            "query_string": query.encode(),
            "headers": headers,
            "server": ("127.0.0.1", 80),
        }
        self.messages: list[Message] = []
        self.may_send = asyncio.Event()
        self.may_send.set()
        self._changed = asyncio.Event()
        self._gone = asyncio.Event()
        self._is_asked = False
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> Message:
        if not self._is_asked:
            self._is_asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await self.may_send.wait()
        self.messages.append(message)
        self._changed.set()

    def hang_up(self) -> None:
        self._gone.set()

    @property
    def status(self) -> int:
        status: int = self.messages[0]["status"]
        return status

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.messages).decode()

    @property
    def events(self) -> list[dict[str, str]]:
        """Fields of each event, comments and retry left out."""
        blocks = (block.splitlines() for block in self.text.split("\n\n"))
        found = [dict(line.split(": ", 1) for line in lines if line[0] != ":") for lines in blocks]
        return [fields for fields in found if "data" in fields]

    @property
    def numbers(self) -> list[int]:
        return [json.loads(event["data"])["step"] for event in self.events]

    async def until(self, is_so: Callable[["Reader"], bool]) -> None:
        while not is_so(self):
            self._changed.clear()
            await self._changed.wait()


async def test_events_come_in_order_and_the_stream_ends_after_the_final_state() -> None:
    store = await store_with(note(1), note(2), ended())
    reader = Reader(make_app(StoreOperations(store), pages=NO_PAGES))
    await reader.task

    assert reader.status == 200
    headers = dict(reader.messages[0]["headers"])
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert headers[b"cache-control"] == b"no-store"
    assert [event["event"] for event in reader.events] == ["note", "note", "state"]
    assert reader.numbers == [1, 2, 99]
    ids = [entry.entry_id for entry in await store.read_entries("r", RunStream.EVENTS)]
    assert [event["id"] for event in reader.events] == ids
    assert [json.loads(event["data"])["event_id"] for event in reader.events] == ids
    assert reader.messages[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


@pytest.mark.parametrize("way", ["header", "query", "both"])
@pytest.mark.parametrize("num_seen", [0, 1, 4])
async def test_a_reader_that_comes_back_misses_none_and_gets_none_twice(
    num_seen: int, way: str
) -> None:
    store = await store_with(*(note(number) for number in range(5)), ended())
    ids = [entry.entry_id for entry in await store.read_entries("r", RunStream.EVENTS)]
    last = ids[num_seen - 1] if num_seen else ""
    # A browser asks the same URL again, and says in the header what has come since.
    query = f"after={last if way == 'query' else ids[0] if way == 'both' else ''}"
    reader = Reader(
        make_app(StoreOperations(store), pages=NO_PAGES),
        query,
        last_event_id=None if way == "query" else last,
    )
    await reader.task

    seen = 1 if way == "both" and num_seen == 0 else num_seen
    assert [event["id"] for event in reader.events] == ids[seen:]


async def test_whoever_has_all_events_of_an_ended_run_is_told_not_to_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(events_module, "FIRST_ANSWER_S", 0.0)
    feed = Feed(has_ended=True)
    app = make_app(feed, pages=NO_PAGES)  # type: ignore[arg-type]
    with nothing_left(feed, app):
        reader = Reader(app)
        for _ in range(100):
            await asyncio.sleep(0)
        assert not reader.messages
        # That there are no more is known after a while.
        feed.queue.put_nowait(None)
        await reader.task
    assert reader.status == 204


async def test_events_that_are_no_longer_kept_are_a_problem_before_the_stream_begins() -> None:
    operations = StoreOperations(await store_with(note(1)))
    async with client_of(operations) as client:
        refused(await client.get("/api/v1/runs/r/events?after=unknown"), 410, "EVENTS_EXPIRED")
        refused(await client.get("/api/v1/runs/nobody/events"), 404, "RUN_NOT_FOUND")


async def test_a_silent_stream_sends_comments_and_then_what_happens() -> None:
    feed = Feed()
    feed.queue.put_nowait(note(1))
    app = make_app(feed, pages=NO_PAGES, heartbeat_s=0.01)  # type: ignore[arg-type]
    reader = Reader(app)
    await reader.until(lambda one: one.text.count(": heartbeat\n\n") >= 3)
    feed.queue.put_nowait(note(2))
    await reader.until(lambda one: len(one.events) == 2)
    feed.queue.put_nowait(None)
    await reader.task

    assert reader.numbers == [1, 2]


async def test_a_store_that_fails_in_between_is_told_of_in_the_stream() -> None:
    feed = Feed()
    feed.queue.put_nowait(note(1))
    feed.queue.put_nowait(UnavailableError("the store is gone", reason="STORE_UNAVAILABLE"))
    reader = Reader(make_app(feed, pages=NO_PAGES))  # type: ignore[arg-type]
    await reader.task

    first, second = reader.events
    assert (first["event"], second["event"]) == ("note", "problem")
    # Without an id: whoever comes back names the last event that there was.
    assert "id" not in second
    assert json.loads(second["data"])["reason"] == "STORE_UNAVAILABLE"
    assert feed.num_open == 0


@contextlib.contextmanager
def nothing_left(feed: Feed, app: Any) -> Any:
    before = asyncio.all_tasks()
    yield
    assert feed.num_open == 0
    assert asyncio.all_tasks() == before
    assert app.state.streams._num_open == 0


async def test_a_reader_that_hangs_up_leaves_nothing_behind() -> None:
    feed = Feed()
    feed.queue.put_nowait(note(1))
    app = make_app(feed, pages=NO_PAGES)  # type: ignore[arg-type]
    with nothing_left(feed, app):
        reader = Reader(app)
        await reader.until(lambda one: len(one.events) == 1)
        reader.hang_up()
        await reader.task


async def test_a_reader_that_takes_nothing_holds_one_event_and_leaves_nothing_behind() -> None:
    feed = Feed()
    for number in range(1000):
        feed.queue.put_nowait(note(number))
    app = make_app(feed, pages=NO_PAGES)  # type: ignore[arg-type]
    with nothing_left(feed, app):
        reader = Reader(app)
        await reader.until(lambda one: len(one.events) == 3)
        reader.may_send.clear()
        for _ in range(100):
            await asyncio.sleep(0)
        # What it was sent, what waits to be sent, and the one read ahead.
        assert feed.num_taken <= len(reader.events) + 2
        reader.hang_up()
        reader.may_send.set()
        await reader.task


async def test_streams_end_with_the_coordinator_and_readers_come_back_for_the_rest() -> None:
    feed = Feed()
    feed.queue.put_nowait(note(1))
    app = make_app(feed, pages=NO_PAGES)  # type: ignore[arg-type]
    with nothing_left(feed, app):
        reader = Reader(app)
        await reader.until(lambda one: len(one.events) == 1)
        app.state.streams.close()
        await reader.task
    assert reader.messages[-1]["more_body"] is False


async def test_a_stream_ends_when_it_is_as_old_as_it_may_get() -> None:
    feed = Feed()
    app = make_app(feed, pages=NO_PAGES, stream_lifetime_s=0.01)  # type: ignore[arg-type]
    feed.queue.put_nowait(note(1))
    with nothing_left(feed, app):
        reader = Reader(app)
        await reader.task
    assert reader.messages[-1]["more_body"] is False


async def test_streams_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "MAX_STREAMS", 2)
    monkeypatch.setattr(events_module, "FIRST_ANSWER_S", 0.01)
    feed = Feed()
    app = make_app(feed, pages=NO_PAGES, heartbeat_s=NEVER_S)  # type: ignore[arg-type]
    with nothing_left(feed, app):
        readers = [Reader(app) for _ in range(2)]
        for reader in readers:
            await reader.until(lambda one: bool(one.messages))
        third = Reader(app)
        await third.task
        assert third.status == 429
        readers[0].hang_up()
        await readers[0].task
        fourth = Reader(app)
        await fourth.until(lambda one: bool(one.messages))
        assert fourth.status == 200
        for reader in (readers[1], fourth):
            reader.hang_up()
            await reader.task
