"""Calls of an endpoint, dealt out to the generation replicas of its service."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol

import grpc

from rolemesh.engine.rollout.endpoint.calls import EndpointCall, EndpointCalls
from rolemesh.engine.rollout.endpoint.wire import pack_call, unpack_output
from rolemesh.rpc.errors import InvalidRequestError
from rolemesh.v1 import endpoint_pb2, endpoint_pb2_grpc

MAX_PLACES = 65_536
"""Sessions of which it is remembered where their calls go; those used last."""


class Calls(Protocol):
    """What samples calls, as a front needs it."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do for any call."""

    @property
    def num_open(self) -> int:
        """Calls that have not ended."""

    def begin(self, call: EndpointCall) -> None:
        """Has a call sampled as soon as there is a turn."""

    def cancel(self, call_id: str) -> None:
        """Ends a call that nobody listens to any more."""

    def wait(self) -> None:
        """Waits a moment for a call, unless this rank has some. On the compute thread."""

    def fail(self, engine: Any, error: BaseException) -> None:
        """Ends all calls with an error. On the compute thread."""

    def close(self, engine: Any, error: BaseException) -> None:
        """Ends all calls with an error, and those that still come. On the compute thread."""


class RemoteCalls:
    """Calls that the first rank of another generation replica samples. From any thread."""

    def __init__(
        self, channel: grpc.aio.Channel, run_id: str, loop: asyncio.AbstractEventLoop
    ) -> None:
        """Takes the channel to it, and the loop that owns the channel."""
        self._channel = channel
        self._run_id = run_id
        self._loop = loop
        self._open: dict[str, EndpointCall] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}

    @property
    def num_open(self) -> int:
        """Calls that have not ended."""
        return len(self._open)

    def begin(self, call: EndpointCall) -> None:
        """Hands a call to the other rank."""
        self._open[call.call_id] = call
        self._loop.call_soon_threadsafe(self._begin, call)

    def cancel(self, call_id: str) -> None:
        """Ends a call that nobody listens to any more; one that has ended already is none."""
        if self._open.pop(call_id, None) is not None:
            self._loop.call_soon_threadsafe(self._cancel, call_id)

    def fail(self, error: BaseException) -> None:
        """Ends all calls with an error."""
        for call_id, call in list(self._open.items()):
            self.cancel(call_id)
            call.told(error)

    def _begin(self, call: EndpointCall) -> None:
        if call.call_id in self._open:
            task = self._loop.create_task(self._ask(call))
            self._asking[call.call_id] = task
            task.add_done_callback(lambda _: self._asking.pop(call.call_id, None))

    def _cancel(self, call_id: str) -> None:
        if call_id in self._asking:
            self._asking[call_id].cancel()

    async def _ask(self, call: EndpointCall) -> None:
        said: Any = RuntimeError("another rank ended a call without saying so")
        try:
            request = endpoint_pb2.SampleCallRequest(
                run_id=self._run_id,
                call=pack_call(call.prompt, call.params, call.images).encode(),
            )
            stub = endpoint_pb2_grpc.EndpointServiceStub(self._channel)
            async for answer in stub.SampleCall(request):
                output = unpack_output(answer.output)
                # The other rank has a name of its own for it.
                output.request_id = call.call_id
                if output.finished:
                    said = output
                    break
                if call.call_id in self._open:
                    call.told(output)
        except InvalidRequestError as error:
            said = ValueError(error.message)
        except Exception as error:  # each is its caller's to hear
            said = error
        # Unless it was cancelled meanwhile.
        if self._open.pop(call.call_id, None) is not None:
            call.told(said)


class Replicas:
    """Calls of an endpoint over all generation replicas of a service.

    All calls of a session go to one replica, which has the keys and values of its history; a new
    session's go where the fewest calls are.

    Invariant: as `EndpointCalls`.
    """

    def __init__(self, own: EndpointCalls, others: Sequence[RemoteCalls]) -> None:
        """Takes the replica of this rank, and the others."""
        self._own = own
        self._others = tuple(others)
        self._all: tuple[EndpointCalls | RemoteCalls, ...] = (own, *others)
        self._places: OrderedDict[str, int] = OrderedDict()
        """Number of the replica, by session."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do for any call."""
        return self._own.is_empty and not any(one.num_open for one in self._others)

    @property
    def num_open(self) -> int:
        """Calls that have not ended."""
        return sum(one.num_open for one in self._all)

    def begin(self, call: EndpointCall) -> None:
        """Has a call sampled by the replica of its session, or the one with the fewest calls."""
        place = self._places.pop(call.session_id, None) if call.session_id else None
        if place is None:
            open_calls = [one.num_open for one in self._all]
            place = open_calls.index(min(open_calls))
        if call.session_id:
            self._places[call.session_id] = place
            if len(self._places) > MAX_PLACES:
                self._places.popitem(last=False)
        self._all[place].begin(call)

    def cancel(self, call_id: str) -> None:
        """Ends a call that nobody listens to any more; one that has ended already is none."""
        for one in self._all:
            one.cancel(call_id)

    def wait(self) -> None:
        """Waits a moment for a call of this rank's replica, unless it has some."""
        self._own.wait()

    def fail(self, engine: Any, error: BaseException) -> None:
        """Ends all calls with an error, and takes those of this rank out of its engine."""
        self._own.fail(engine, error)
        for one in self._others:
            one.fail(error)

    def close(self, engine: Any, error: BaseException) -> None:
        """Ends all calls with an error, and those of this rank that still come."""
        self._own.close(engine, error)
        for one in self._others:
            one.fail(error)
