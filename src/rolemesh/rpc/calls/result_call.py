"""A call that streams its progress before its result."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator
from contextlib import aclosing
from typing import Any, Generic, TypeVar

from rolemesh.rpc.errors import DeadlineError, InternalError
from rolemesh.v1 import operation_pb2

Result = TypeVar("Result")

ProgressCallback = Callable[[operation_pb2.Progress], None]
"""Gets how far a call is."""


class ResultCall(Generic[Result]):
    """A call in flight whose last message carries the result. Owner: the loop that started it.

    Await it, or its `result`, for the result; iterate over it for the messages as they come.

    Example: made = await client.compute_values(key, experience).result(on_progress)
    """

    def __init__(
        self, stream: Any, peer: str, field: str = "result", *, idle_s: float | None = None
    ) -> None:
        """Takes a call that was started.

        Args:
            stream: The messages; each has a oneof `event` with a field `progress`.
            peer: The service that they come from, for errors.
            field: The field of `event` that holds the result.
            idle_s: After how many seconds with nothing but the same progress the call is given up;
                None: never.
        """
        self._stream = stream
        self._idle_s = idle_s
        self._peer = peer
        self._field = field
        self._newest = operation_pb2.Progress()
        """What the newest sign of life says."""
        self._moved_at: float | None = None
        """When it began to say so, on the loop's clock."""

    def __await__(self) -> Generator[Any, None, Result]:
        """The result; raises as `result` does."""
        return self.result().__await__()

    def __aiter__(self) -> AsyncIterator[Any]:
        """The messages; raises RolemeshError. Leaving early cancels the call."""
        return self._messages()

    def cancel(self) -> None:
        """Ends the call."""
        self._stream.cancel()

    async def result(
        self,
        on_progress: ProgressCallback | None = None,
        on_block: Callable[[Any], None] | None = None,
    ) -> Result:
        """Follows the call to its end and returns the result.

        Args:
            on_progress: Gets signs of life.
            on_block: Gets parts of the result, where the call sends any.

        Raises:
            RolemeshError: The call failed, or ended without a result.
        """
        result: Result | None = None
        # Not `self._messages()`: a second generator is a tenth of what it costs to send a call.
        messages = aiter(self._stream)
        try:
            while (message := await self._next(messages)) is not None:
                match message.WhichOneof("event"):
                    case "progress" if on_progress is not None:
                        on_progress(message.progress)
                    case "block" if on_block is not None:
                        on_block(message.block)
                    case self._field:
                        result = getattr(message, self._field)
        finally:
            await messages.aclose()
        if result is None:
            raise InternalError(f"{self._peer} ended the call without a result")
        return result

    async def _messages(self) -> AsyncGenerator[Any, None]:
        async with aclosing(aiter(self._stream)) as messages:
            while (message := await self._next(messages)) is not None:
                yield message

    async def _next(self, messages: AsyncIterator[Any]) -> Any | None:
        """The next message, or None at the end; raises where the call is idle for too long."""
        if self._idle_s is None:
            return await anext(messages, None)
        loop = asyncio.get_running_loop()
        if self._moved_at is None:
            self._moved_at = loop.time()
        try:
            async with asyncio.timeout_at(self._moved_at + self._idle_s):
                message = await anext(messages, None)
        except TimeoutError:
            raise DeadlineError(
                f"{self._peer} has told of no progress for {self._idle_s:.0f} s"
                + (f", since {self._newest.stage!r}" if self._newest.stage else "")
                + ": see its log",
                reason="CALL_IDLE",
            ) from None
        # A sign of life that says what the last one said is no progress.
        if message is not None and (
            message.WhichOneof("event") != "progress" or message.progress != self._newest
        ):
            self._moved_at, self._newest = loop.time(), message.progress
        return message
