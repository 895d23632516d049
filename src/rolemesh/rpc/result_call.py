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
        async with aclosing(self._messages()) as messages:
            async for message in messages:
                match message.WhichOneof("event"):
                    case "progress" if on_progress is not None:
                        on_progress(message.progress)
                    case "block" if on_block is not None:
                        on_block(message.block)
                    case self._field:
                        result = getattr(message, self._field)
        if result is None:
            raise InternalError(f"{self._peer} ended the call without a result")
        return result

    async def _messages(self) -> AsyncGenerator[Any, None]:
        loop = asyncio.get_running_loop()
        newest, moved_at = operation_pb2.Progress(), loop.time()
        async with aclosing(aiter(self._stream)) as messages:
            while True:
                ends_at = None if self._idle_s is None else moved_at + self._idle_s
                try:
                    async with asyncio.timeout_at(ends_at):
                        message = await anext(messages, None)
                except TimeoutError:
                    raise DeadlineError(
                        f"{self._peer} has told of no progress for {self._idle_s:.0f} s"
                        + (f", since {newest.stage!r}" if newest.stage else "")
                        + ": see its log",
                        reason="CALL_IDLE",
                    ) from None
                if message is None:
                    return
                # A sign of life that says what the last one said is no progress.
                if message.WhichOneof("event") != "progress" or message.progress != newest:
                    moved_at = loop.time()
                    newest = message.progress
                yield message
