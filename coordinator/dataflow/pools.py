"""Pools: named device sets whose roles take turns, while pools run side by side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from rolemesh.coordinator.dataflow.clock import now
from rolemesh.coordinator.recipe.placement import PoolSpec

MOVES = ("sleep", "wake")
"""Phases before a node starts: other roles leave its devices, then its own role comes back."""

AFTER_ALL_NODES = 2**62
"""Place in the order of calls of what is no node of a step."""

_BEFORE_ALL_NODES = -1
"""The same, of what the nodes of a step wait for."""


class Sleeper(Protocol):
    """Takes roles off their devices, and brings them back."""

    async def sleep(self, service: str, step: int) -> None:
        """Moves what the service holds to host memory, during a step."""

    async def wake(self, service: str, step: int) -> None:
        """Brings it back."""


@dataclass
class Pool:
    """A device set and its one lease.

    Invariant: at most one service holds it. When the lease gets free, a waiting call of the service
    that is awake has it next, and otherwise the one that was made first. Where roles sleep, at most
    one of them is awake.

    Owner: one asyncio loop.

    Example::

        async with pool.lease((step, node_id), "critic") as switched:
            ...  # the critic is awake, alone; switched == {"sleep": 0.8, "wake": 1.1} or {}
    """

    name: str
    devices: tuple[str, ...]
    sleeper: Sleeper | None = None
    """Puts roles to sleep while others compute; None leaves all of them where they are."""
    awake: str | None = None
    """The service on the devices, where roles sleep."""
    num_switches: int = 0
    """Times that another service was woken."""
    holder: str | None = None
    """The service that has the lease."""
    _num_holders: int = 0
    """A call, and the load of the process that it waits for."""
    _moving: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while services are put to sleep, woken or loaded."""
    _waiting: list[tuple[tuple[int, ...], str, asyncio.Future[None]]] = field(default_factory=list)

    @property
    def is_held(self) -> bool:
        """Whether a service has the lease."""
        return self.holder is not None

    @asynccontextmanager
    async def lease(self, order: tuple[int, ...], service: str) -> AsyncIterator[dict[str, float]]:
        """Holds the devices, with the service awake on them.

        Args:
            order: Place of the call among all calls, unique; the lowest waiting one is next.
            service: Who computes.

        Yields:
            Seconds that putting to sleep and waking took, by phase; nothing where no service moved.
        """
        await self.acquire(order, service)
        try:
            yield await self.switch_to(service, order[0])
        finally:
            self.pass_on()

    async def switch_to(self, service: str, step: int) -> dict[str, float]:
        """Wakes the service for the holder of the lease; gives the seconds of each phase."""
        if self.sleeper is None:
            return {}
        async with self._moving:
            if self.awake == service:
                return {}
            seconds = await self._vacate(self.sleeper, step)
            started = now()
            await self.sleeper.wake(service, step)
            self.awake = service
            self.num_switches += 1
            return {**seconds, "wake": now() - started}

    async def _vacate(self, sleeper: Sleeper, step: int) -> dict[str, float]:
        """Puts the service that is awake to sleep."""
        if self.awake is None:
            return {}
        started, previous = now(), self.awake
        # Half asleep is not awake: should the move fail, the next holder wakes it again.
        self.awake = None
        await sleeper.sleep(previous, step)
        return {"sleep": now() - started}

    @asynccontextmanager
    async def loading(self, service: str, step: int) -> AsyncIterator[None]:
        """Holds the devices while the new process of a lost service loads its models on them.

        A call of the service may wait for that process, and hold the lease meanwhile: both have it
        then. Where no role sleeps, nothing is held.
        """
        if self.sleeper is None:
            yield
            return
        if self.holder == service:
            self._num_holders += 1
        else:
            await self.acquire((step, _BEFORE_ALL_NODES), service)
        try:
            async with self._moving:
                if self.awake != service:
                    await self._vacate(self.sleeper, step)
                # Should it fail, its calls fail too: no other service takes its turn.
                self.awake = service
                yield
        finally:
            self.pass_on()

    async def acquire(self, order: tuple[int, ...], service: str) -> None:
        """Waits for the lease. A caller that has it must `pass_on`."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((order, service, turn))
        try:
            # Services that become ready in the same turn of the loop take part in the choice.
            await asyncio.sleep(0)
            if not self.is_held:
                self._give()
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                # Cancelled in the same turn of the loop in which the lease was given.
                self.pass_on()
            turn.cancel()
            raise

    def pass_on(self) -> None:
        """Lets the lease go; the last who has it gives it to the next service."""
        self._num_holders -= 1
        if self._num_holders == 0:
            self._give()

    def _give(self) -> None:
        self.holder = None
        self._waiting = [waiter for waiter in self._waiting if not waiter[2].done()]
        if not self._waiting:
            return
        chosen = min(self._waiting, key=lambda waiter: (waiter[1] != self.awake, waiter[0]))
        self._waiting.remove(chosen)
        self.holder, self._num_holders = chosen[1], 1
        chosen[2].set_result(None)


class Pools:
    """The pool of each service."""

    def __init__(
        self,
        specs: Mapping[str, PoolSpec],
        sleeper: Sleeper | None = None,
        replicas: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Makes the pools.

        Args:
            specs: Pools by name.
            sleeper: Moves roles of pools that let them sleep; None: no role sleeps.
            replicas: Names of the services of a role, where it has several. Each has devices of
                its own and a lease of its own.
        """
        self._by_service: dict[str, Pool] = {}
        for name, spec in specs.items():
            pool = Pool(name, spec.devices, sleeper if spec.lets_roles_sleep else None)
            for role in spec.roles:
                self._by_service[role] = pool
                services = (replicas or {}).get(role, ())
                for index, service in enumerate(services if len(services) > 1 else ()):
                    devices = spec.devices[index :: len(services)] or spec.devices
                    self._by_service[service] = Pool(f"{name}/{index}", devices, pool.sleeper)

    def of(self, service: str) -> Pool:
        """The service's pool, or ValueError."""
        if service not in self._by_service:
            raise ValueError(
                f"pools: service {service!r} stands in no pool; add its role to the roles of one"
            )
        return self._by_service[service]

    @asynccontextmanager
    async def lease(
        self, services: Sequence[str], order: tuple[int, ...]
    ) -> AsyncIterator[tuple[str, dict[str, float]]]:
        """Holds the devices of one of several services: of the first one listed that is free.

        Where none is, of the one that gets free first.

        Args:
            services: Those that may compute, the preferred one first.
            order: Place of the call among all calls, unique.

        Yields:
            The service, and the seconds of `Pool.lease`.
        """
        if len(services) == 1:
            # By far the most calls, and a step may make a thousand of them in one instant.
            async with self.of(services[0]).lease(order, services[0]) as switched:
                yield services[0], switched
            return
        pools = [self.of(service) for service in services]
        waits = [
            asyncio.ensure_future(pool.acquire(order, service))
            for pool, service in zip(pools, services, strict=True)
        ]
        chosen: int | None = None
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            chosen = next(index for index, wait in enumerate(waits) if wait.done())
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
            for index, wait in enumerate(waits):
                if index != chosen and not wait.cancelled():
                    pools[index].pass_on()
        try:
            yield services[chosen], await pools[chosen].switch_to(services[chosen], order[0])
        finally:
            pools[chosen].pass_on()

    @asynccontextmanager
    async def awake(self, service: str, step: int) -> AsyncIterator[None]:
        """The service awake on its devices, for what is no node: a checkpoint, an export."""
        async with self.of(service).lease((step, AFTER_ALL_NODES), service):
            yield
