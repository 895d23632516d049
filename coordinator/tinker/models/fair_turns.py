"""Whose call the actor service works at next, where several clients wait: fair by tokens."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass

AT_ONCE = 2
"""Calls that are let through together: one that is computed, and one whose batch travels."""


@dataclass(frozen=True, slots=True)
class Client:
    """Who asks: an owner's session."""

    owner: str
    session_id: str = ""


@dataclass(slots=True, eq=False)
class _Waiting:
    number: int
    client: Client
    tokens: int
    let_through: asyncio.Future[None]


class _Shares:
    """Who of several has had the least of late: start-time fair queueing."""

    def __init__(self) -> None:
        self._now = 0.0
        """Virtual time, in tokens: that at which the newest call began."""
        self._used_until: dict[Hashable, float] = {}

    def begins_at(self, name: Hashable) -> float:
        """When the next call of one would begin."""
        return max(self._now, self._used_until.get(name, 0.0))

    def use(self, name: Hashable, tokens: int) -> None:
        """Told that a call begins."""
        self._now = self.begins_at(name)
        used = {one: until for one, until in self._used_until.items() if until > self._now}
        self._used_until = {**used, name: self._now + tokens}


class FairTurns:
    """Lets calls through by start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996).

    Each owner has the same share of the tokens, and each of his sessions the same share of that, as
    far as they ask for it; who did not ask saves nothing up. Calls of one client stay in their
    order. Owner: one loop.

    Example: one client has 100 calls of 1,000 tokens waiting when another one brings a call of 50.
    That call is the next one.
    """

    def __init__(self, at_once: int = AT_ONCE) -> None:
        """Takes how many calls are let through together."""
        self._free = at_once
        self._owners = _Shares()
        self._sessions: dict[str, _Shares] = {}
        self._waiting: list[_Waiting] = []
        self._numbers = itertools.count()

    @asynccontextmanager
    async def turn(self, client: Client, tokens: int) -> AsyncIterator[None]:
        """Waits for a call's turn, which lasts until the end of the block.

        Args:
            client: Who asks.
            tokens: That the call computes, at most.
        """
        let_through = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(next(self._numbers), client, tokens, let_through))
        self._let_through()
        try:
            await let_through
        except asyncio.CancelledError:
            if let_through.cancelled():
                self._waiting = [one for one in self._waiting if one.let_through is not let_through]
            else:
                self._end()
            raise
        try:
            yield
        finally:
            self._end()

    def _end(self) -> None:
        self._free += 1
        self._let_through()

    def _let_through(self) -> None:
        while self._free and (waiting := [one for one in self._waiting if _waits(one)]):
            first = min(waiting, key=self._place)
            self._waiting = [one for one in waiting if one is not first]
            self._free -= 1
            self._owners.use(first.client.owner, first.tokens)
            self._shares(first.client).use(first.client, first.tokens)
            first.let_through.set_result(None)
        if not self._waiting:
            self._sessions.clear()

    def _place(self, one: _Waiting) -> tuple[float, float, int]:
        session = self._shares(one.client).begins_at(one.client)
        return self._owners.begins_at(one.client.owner), session, one.number

    def _shares(self, client: Client) -> _Shares:
        return self._sessions.setdefault(client.owner, _Shares())


def _waits(one: _Waiting) -> bool:
    """Whether it was not given up."""
    return not one.let_through.done()
