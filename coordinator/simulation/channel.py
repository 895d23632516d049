"""Channels to simulated services: what a coordinator's client calls instead of a connection."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator
from typing import Any, Protocol

from rolemesh.rpc.channel import ChannelTraffic, MeshChannel, MethodTraffic
from rolemesh.rpc.errors import UnavailableError


class FarEnd(Protocol):
    """What answers at an address."""

    def answer(self, method: str, request: Any) -> Any:
        """The response, as an awaitable; of a method with many responses, their iterator.

        Args:
            method: Full name, "/package.Service/Method".
            request: Its message, which is not to be changed.
        """


class SimulatedChannel(MeshChannel):
    """A channel within the process. Messages are passed on as they are, and counted by their size.

    Owner: one event loop.
    """

    def __init__(
        self, address: str, traffic: ChannelTraffic, find: Callable[[str], FarEnd | None]
    ) -> None:
        """Takes who knows what answers at an address: None where nothing does by now."""
        self.address = address
        self.traffic = traffic
        self._find = find

    async def close(self, grace: float | None = None) -> None:
        """Nothing is to be closed."""

    def _any_method(self, full_method: str, *_: Any, **__: Any) -> Any:
        traffic = self.traffic.of(full_method)

        def begin(request: Any, *, timeout: float | None = None, **_: Any) -> _Call:
            traffic.calls += 1
            traffic.sent_bytes += request.ByteSize()
            far_end = self._find(self.address)
            if far_end is None:
                return _Call(_refused(self.address), traffic)
            return _Call(far_end.answer(full_method, request), traffic)

        return begin

    unary_unary = unary_stream = stream_unary = stream_stream = _any_method


class _Call:
    """A call in flight: await it for one response, or iterate over it for many."""

    idle_s = None
    """A simulated service does not hang silently."""

    def __init__(self, answer: Any, traffic: MethodTraffic) -> None:
        self._answer = answer
        self._traffic = traffic

    def __await__(self) -> Generator[Any, None, Any]:
        response = yield from self._answer.__await__()
        self._traffic.received_bytes += response.ByteSize()
        return response

    async def __aiter__(self) -> AsyncIterator[Any]:
        answer = self._answer
        if not hasattr(answer, "__aiter__"):
            await answer
        try:
            async for response in answer:
                self._traffic.received_bytes += response.ByteSize()
                yield response
        finally:
            await answer.aclose()

    def cancel(self) -> None:
        """Does nothing: the task that awaits or iterates is cancelled by itself."""


async def _refused(address: str) -> None:
    raise broken(address)


def broken(address: str) -> UnavailableError:
    """What a client raises where its peer is gone."""
    error = UnavailableError(f"{address}: the simulated process is gone")
    error.is_broken_connection = True
    return error
