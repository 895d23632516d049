"""Operations of a model in the order that its client numbered them, whatever order they come in."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from rolemesh.coordinator.tinker.forms.forms import WireError

T = TypeVar("T")

GAP_S = 330.0
"""How long an operation waits for an earlier one that has not come. Clients that have lost a call
send it again for less long."""


class Turns:
    """Lets one operation after another through. Owner: one loop.

    Example: operation 2, which came first, waits until 1 has been made or has failed.
    """

    def __init__(self, *, gap_s: float = GAP_S) -> None:
        self._gap_s = gap_s
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

        Raises:
            WireError: An earlier one did not come.
        """
        if number == 0:
            return await work()
        self._here.append(number)
        try:
            async with self._changed:
                while number > self._next:
                    await self._next_moved(number)
            try:
                return await work()
            finally:
                async with self._changed:
                    self._pass(number)
        finally:
            self._here.remove(number)

    async def _next_moved(self, number: int) -> None:
        """Returns once the next one has come, at the latest, and raises where it does not."""
        missing = self._next
        if missing in self._here:
            await self._changed.wait_for(lambda: self._next != missing)
            return
        try:
            async with asyncio.timeout(self._gap_s):
                await self._changed.wait_for(lambda: self._next != missing)
        except TimeoutError:
            if self._next == missing and missing not in self._here:
                self._pass(number)
                raise WireError(
                    "seq_id",
                    number,
                    f"call {missing} of this model did not come: load its newest "
                    "weights with a new client",
                ) from None

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
