"""Pools: named device sets whose roles take turns, while pools run side by side."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from rolemesh.coordinator.recipe import PoolSpec


@dataclass
class Pool:
    """A device set and its one lease.

    Invariant: at most one holder. When the lease gets free, the waiting call that was made first
    has it next, whichever became ready first: the order of work does not depend on timing.

    Owner: one asyncio loop.
    """

    name: str
    devices: tuple[str, ...]
    is_held: bool = False
    _waiting: list[tuple[tuple[int, ...], asyncio.Future[None]]] = field(default_factory=list)

    @asynccontextmanager
    async def lease(self, order: tuple[int, ...]) -> AsyncIterator[None]:
        """Holds the devices.

        Args:
            order: Place of the call among all calls, unique; the lowest waiting one is next.
        """
        await self._acquire(order)
        try:
            yield
        finally:
            self._pass_on()

    async def _acquire(self, order: tuple[int, ...]) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (order, turn))
        try:
            # Whoever becomes ready in the same turn of the loop takes part in the choice.
            await asyncio.sleep(0)
            if not self.is_held:
                self._pass_on()
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                # Cancelled in the same turn of the loop in which the lease was given.
                self._pass_on()
            turn.cancel()
            raise

    def _pass_on(self) -> None:
        self.is_held = False
        while self._waiting:
            _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                self.is_held = True
                turn.set_result(None)
                return


class Pools:
    """Which pool a role stands in."""

    def __init__(self, specs: Mapping[str, PoolSpec]) -> None:
        self._by_role: dict[str, Pool] = {}
        for name, spec in specs.items():
            pool = Pool(name=name, devices=spec.devices)
            for role in spec.roles:
                self._by_role[role] = pool

    def of(self, role: str) -> Pool:
        """The role's pool, or ValueError."""
        if role not in self._by_role:
            raise ValueError(
                f"pools: role {role!r} stands in no pool; add it to the roles of one of them"
            )
        return self._by_role[role]
