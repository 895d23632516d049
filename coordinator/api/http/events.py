"""The events of a run as server-sent events (WHATWG HTML, section 9.2).

The `id` of an event is that of the store. A reader that comes back with its last id therefore gets
every later event once, from any coordinator on the store.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from rolemesh.coordinator.api.http.conversion import to_plain
from rolemesh.coordinator.api.http.exposition import RequestMetrics
from rolemesh.coordinator.api.http.problems import to_problem
from rolemesh.rpc.errors import CapacityError, RolemeshError
from rolemesh.v1 import coordinator_pb2

MAX_STREAMS = 100
"""Most streams that are open at once; one more is refused."""

FIRST_ANSWER_S = 0.5
"""How long a stream waits for its first event before it begins: the first may be an error."""

END_S = 4.0
"""The same for a run that has ended: the end of its stream is about to come."""

RETRY_MS = 1000
"""Pause that a browser is told to make before it connects again."""

EVENT_STREAM_TYPE = "text/event-stream"

EVENT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["event", "data"],
    "properties": {
        "id": {"type": "string"},
        "event": {
            "enum": [
                *(one.name for one in coordinator_pb2.RunEvent.DESCRIPTOR.oneofs[0].fields),
                "problem",
            ]
        },
        "data": {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": {
                "anyOf": [
                    {"$ref": "#/components/schemas/RunEvent"},
                    {"$ref": "#/components/schemas/Problem"},
                ]
            },
        },
        "retry": {"type": "integer"},
    },
}
"""How the OpenAPI document describes one event."""


class EventStreams:
    """The open streams of an app.

    Owner: one asyncio loop. At most MAX_STREAMS are open; `close` ends them all, and none opens
    afterwards. When a reader is gone, or its stream has reached its lifetime, the iterator of its
    events is closed before its request ends.
    """

    def __init__(self, metrics: RequestMetrics, *, heartbeat_s: float, lifetime_s: float) -> None:
        self._metrics = metrics
        self._heartbeat_s = heartbeat_s
        self._lifetime_s = lifetime_s
        self._num_open = 0
        self._closing = asyncio.Event()

    def close(self) -> None:
        """Ends all streams; readers come back to the next coordinator."""
        self._closing.set()

    async def open(
        self,
        events: AsyncIterator[coordinator_pb2.RunEvent],
        request_id: str,
        *,
        has_ended: bool,
    ) -> Response:
        """The answer that sends events; 204 if there will be none, so that the reader stays away.

        Args:
            events: The events to send.
            request_id: Id of the request.
            has_ended: Whether the run has ended.

        Raises:
            RolemeshError: Reading the first event failed with it.
        """
        if self._num_open >= MAX_STREAMS:
            raise CapacityError(
                f"{MAX_STREAMS} event streams are open, as many as there may be: close one",
                reason="TOO_MANY_STREAMS",
                retryable=True,
            )
        reading = _Reading(events)
        self._num_open += 1
        self._metrics.event_streams.set(self._num_open)
        try:
            timeout_s = END_S if has_ended else FIRST_ANSWER_S
            is_over = await reading.wait(timeout_s) and reading.peek() is None
        except BaseException:
            await self.release(reading)
            raise
        if not is_over:
            return _EventStreamResponse(self, reading, request_id)
        await self.release(reading)
        return Response(status_code=204)

    async def send(self, reading: _Reading, request_id: str, receive: Receive, send: Send) -> None:
        """Sends the body of a stream until the stream, the reader or the coordinator ends."""
        sending = asyncio.create_task(self._send_events(reading, request_id, send))
        ends = (
            sending,
            asyncio.create_task(_disconnected(receive)),
            asyncio.create_task(self._closing.wait()),
        )
        try:
            await asyncio.wait(ends, timeout=self._lifetime_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in ends:
                task.cancel()
            outcomes = await asyncio.gather(*ends, return_exceptions=True)
        if isinstance(outcomes[0], Exception):
            raise outcomes[0]
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def release(self, reading: _Reading) -> None:
        """Closes the source of a stream, and makes room for another stream."""
        self._num_open -= 1
        self._metrics.event_streams.set(self._num_open)
        await reading.close()

    async def _send_events(self, reading: _Reading, request_id: str, send: Send) -> None:
        await send(_body(f"retry: {RETRY_MS}\n\n"))
        while True:
            if not await reading.wait(self._heartbeat_s):
                await send(_body(": heartbeat\n\n"))
                continue
            try:
                event = reading.peek()
            except RolemeshError as error:
                # The status has been sent already.
                await send(_body(_frame("problem", to_problem(error, request_id))))
                return
            if event is None:
                return
            kind = event.WhichOneof("event")
            await send(_body(_frame(kind, to_plain(event), event_id=event.event_id)))
            reading.advance()


class _Reading:
    """Reads events one ahead, so that waiting for one with a time limit loses none."""

    def __init__(self, events: AsyncIterator[coordinator_pb2.RunEvent]) -> None:
        self._events = events
        self.advance()

    def advance(self) -> None:
        self._next = asyncio.ensure_future(anext(self._events, None))

    async def wait(self, timeout_s: float) -> bool:
        """Waits at most so long; returns whether the next event, the end or an error has come."""
        done, _ = await asyncio.wait((self._next,), timeout=timeout_s)
        return bool(done)

    def peek(self) -> coordinator_pb2.RunEvent | None:
        """The next event, which wait() has seen; None at the end."""
        return self._next.result()

    async def close(self) -> None:
        self._next.cancel()
        await asyncio.gather(self._next, return_exceptions=True)
        if isinstance(self._events, AsyncGenerator):
            await self._events.aclose()


class _EventStreamResponse(Response):
    media_type = EVENT_STREAM_TYPE

    def __init__(self, streams: EventStreams, reading: _Reading, request_id: str) -> None:
        self._streams = streams
        self._reading = reading
        self._request_id = request_id
        self.status_code = 200
        self.background = None
        # A proxy that buffers would hold events back.
        self.init_headers({"x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        try:
            await send({"type": "http.response.start", **start})
            await self._streams.send(self._reading, self._request_id, receive, send)
        finally:
            await self._streams.release(self._reading)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _body(text: str) -> Message:
    return {"type": "http.response.body", "body": text.encode(), "more_body": True}


def _frame(kind: str | None, data: dict[str, Any], *, event_id: str | None = None) -> str:
    head = "" if event_id is None else f"id: {event_id}\n"
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return f"{head}event: {kind}\ndata: {text}\n\n"
