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
        self._here: list[int] = []
        """Numbers of operations that wait or are being made."""
        self._passed: set[int] = set()
        """Later numbers than the next one whose operations will not come."""
        self._changed = asyncio.Condition()

    async def take(self, number: int, work: Callable[[], Awaitable[T]]) -> T:
        """Makes an operation in its turn.

        Args:
            number: From 1; 0: it has none, and is made at once.
            work: Makes it.
        """
        if number == 0:
            return await work()
        self._here.append(number)
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: number <= self._next)
            try:
                return await work()
            finally:
                async with self._changed:
                    self._pass(number)
        finally:
            self._here.remove(number)

    def begin_at(self, number: int) -> None:
        """Has the first operation be this one: of a model that begins with saved weights.

        Where others wait or are being made it is not the first, and nothing changes.
        """
        if not self._here:
            self._next = max(self._next, number)

    async def refused(self, number: int) -> None:
        """Told that an operation was refused, whose client counts on: the next has its turn."""
        async with self._changed:
            if number not in self._here:
                self._pass(number)

    def _pass(self, number: int) -> None:
        if number >= self._next:
            self._passed.add(number)
        while self._next in self._passed:
            self._passed.remove(self._next)
            self._next += 1
        self._changed.notify_all()
