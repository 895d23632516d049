"""Operations of a model in the order that its client numbered them, whatever order they come in."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


class Turns:
    """Lets one operation after another through. Owner: one loop.

    Example: operation 2, which came first, waits until 1 has been made or has failed.
    """

    def __init__(self) -> None:
        self._next = 1
        self._changed = asyncio.Condition()

    async def take(self, number: int, work: Callable[[], Awaitable[T]]) -> T:
        """Makes an operation in its turn.

        Args:
            number: From 1; 0: it has none, and is made at once.
            work: Makes it.
        """
        if number == 0:
            return await work()
        async with self._changed:
            await self._changed.wait_for(lambda: number <= self._next)
        try:
            return await work()
        finally:
            async with self._changed:
                self._next = max(self._next, number + 1)
                self._changed.notify_all()

    def begin_at(self, number: int) -> None:
        """Has the first operation be this one: of a model that begins with saved weights."""
        self._next = max(self._next, number)
