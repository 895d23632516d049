"""Pools: named device sets whose roles take turns, while pools run side by side."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from rolemesh.coordinator.dataflow.loop.clock import now
from rolemesh.coordinator.recipe.role_names import role_of
from rolemesh.coordinator.recipe.roles.placement import PoolSpec

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


@dataclass(eq=False, slots=True)
class _Waiting:
    """A call that waits for a lease."""

    order: tuple[int, ...]
    """Its place among all calls, unique."""
    service: str
    """Who is to compute; of a call that several services may make, the name of a pool."""
    turn: asyncio.Future[Pool]
    """Gets the pool whose lease the call has."""

    def __lt__(self, other: _Waiting) -> bool:
        return self.order < other.order

    async def comes(self, give: Callable[[], None]) -> Pool:
        """Returns once the call has a lease. `give` hands out what is free."""
        try:
            # Services that become ready in the same turn of the loop take part in the choice.
            await asyncio.sleep(0)
            give()
            return await self.turn
        except asyncio.CancelledError:
            if self.turn.done() and not self.turn.cancelled():
                # Cancelled in the same turn of the loop in which the lease was given.
                self.turn.result().pass_on()
            self.turn.cancel()
            raise


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
    service: str | None = None
    """The one service that computes here, of a role that has several."""
    replicas: Replicas | None = None
    """The services of that role."""
    awake: str | None = None
    """The service on the devices, where roles sleep."""
    holder: str | None = None
    """The service that has the lease."""
    _num_holders: int = 0
    """A call, and the load of the process that it waits for."""
    _moving: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while services are put to sleep, woken or loaded."""
    _waiting: list[_Waiting] = field(default_factory=list)

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

    def acquire(self, order: tuple[int, ...], service: str) -> Awaitable[Pool]:
        """Waits for the lease; gives this pool. A caller that has it must `pass_on`."""
        turn: asyncio.Future[Pool] = asyncio.get_running_loop().create_future()
        waiting = _Waiting(order, service, turn)
        self._waiting.append(waiting)
        return waiting.comes(self.give)

    def pass_on(self) -> None:
        """Lets the lease go; the last who has it gives it to the next service."""
        self._num_holders -= 1
        if self._num_holders:
            return
        self.holder = None
        if self.replicas is not None:
            self.replicas.free[self.name] = self
        self.give()

    def retire(self) -> None:
        """Takes no more calls that other services may make."""
        if self.replicas is not None:
            self.replicas.free.pop(self.name, None)
            self.replicas = None

    def give(self) -> None:
        """Gives the lease, where it is free, to the waiting call that has it next."""
        if self.is_held:
            return
        waiting = self._waiting = [one for one in self._waiting if not one.turn.done()]
        if self.replicas is not None:
            waiting = waiting + self.replicas.first()
        if not waiting:
            return
        # Nearly always it is one, and a step may make a thousand calls in one instant.
        chosen = waiting[0] if len(waiting) == 1 else min(waiting, key=self._place)
        self.holder, self._num_holders = self.service or chosen.service, 1
        if self.replicas is not None:
            del self.replicas.free[self.name]
        chosen.turn.set_result(self)

    def _place(self, one: _Waiting) -> tuple[bool, tuple[int, ...]]:
        return (self.service or one.service) != self.awake, one.order


class Replicas:
    """Calls that any service of a role may make, where each has a pool of its own.

    What a call costs does not grow with the number of services.

    Owner: one asyncio loop.
    """

    def __init__(self) -> None:
        self.free: dict[str, Pool] = {}
        """Pools that no service holds, by name; the last one got free last."""
        self._waiting: list[_Waiting] = []
        """A heap: the call that was made first is the first to have a pool."""

    def acquire(self, order: tuple[int, ...], preferred: Pool) -> Awaitable[Pool]:
        """Waits for a lease: that of the preferred pool where it is free, else of another one.

        Where none is free, it is the pool that gets free first. A caller that has it must
        `pass_on`.
        """
        turn: asyncio.Future[Pool] = asyncio.get_running_loop().create_future()
        waiting = _Waiting(order, preferred.name, turn)
        heapq.heappush(self._waiting, waiting)
        return waiting.comes(self._give)

    def add(self, pool: Pool) -> None:
        """Takes one more pool, which no service holds."""
        self.free[pool.name] = pool
        self._give()

    def first(self) -> list[_Waiting]:
        """The call that has a pool next, if one waits."""
        while self._waiting and self._waiting[0].turn.done():
            heapq.heappop(self._waiting)
        return self._waiting[:1]

    def _give(self) -> None:
        while self.free and (first := self.first()):
            pool = self.free.get(first[0].service) or next(iter(self.free.values()))
            pool.give()


class Pools:
    """The pool of each service."""

    def __init__(
        self,
        specs: Mapping[str, PoolSpec],
        sleeper: Sleeper | None = None,
        replicas: Mapping[str, Sequence[str]] | None = None,
        changing: Collection[str] = (),
    ) -> None:
        """Makes the pools.

        Args:
            specs: Pools by name.
            sleeper: Moves roles of pools that let them sleep; None: no role sleeps.
            replicas: Names of the services of a role, where it has several. Each has devices of
                its own and a lease of its own.
            changing: Roles whose services may `join` and `leave`, each of which is in a pool of its
                own.
        """
        self._changing: dict[str, tuple[str, PoolSpec, Replicas]] = {}
        self._by_service: dict[str, Pool] = {}
        for name, spec in specs.items():
            pool = Pool(name, spec.devices, sleeper if spec.lets_roles_sleep else None)
            for role in spec.roles:
                self._by_service[role] = pool
                services = (replicas or {}).get(role, ())
                if role in changing:
                    self._changing[role] = name, spec, Replicas()
                    for service in services:
                        self.join(service)
                elif len(services) > 1:
                    self._by_service |= _of_replicas(name, spec, services, pool.sleeper)

    def of(self, service: str) -> Pool:
        """The service's pool, or ValueError."""
        if service not in self._by_service:
            raise ValueError(
                f"pools: service {service!r} stands in no pool; add its role to the roles of one"
            )
        return self._by_service[service]

    def join(self, service: str) -> None:
        """Makes the pool of one more service of a role whose services change."""
        name, spec, together = self._changing[role_of(service)]
        number = service.rpartition("-")[2]
        pool = Pool(f"{name}/{number}", spec.devices, None, service, together)
        self._by_service[service] = pool
        together.add(pool)

    def leave(self, service: str) -> None:
        """Has the other services of its role make what they may make of its calls."""
        self._by_service[service].retire()

    def acquire(
        self, service: str, order: tuple[int, ...], *, or_another: bool = False
    ) -> Awaitable[Pool]:
        """Waits for a lease. A caller that has it must `pass_on`.

        Args:
            service: Who computes.
            order: Place of the call among all calls, unique.
            or_another: Whether another service of the role may compute instead, when it is free
                before this one is. The pool's `holder` says who does.
        """
        pool = self.of(service)
        role = role_of(service)
        # The pool of a service that has left belongs to none.
        together = self._changing[role][2] if role in self._changing else pool.replicas
        if or_another and together is not None:
            return together.acquire(order, pool)
        return pool.acquire(order, service)

    @asynccontextmanager
    async def awake(self, service: str, step: int) -> AsyncIterator[None]:
        """The service awake on its devices, for what is no node: a checkpoint, an export."""
        async with self.of(service).lease((step, AFTER_ALL_NODES), service):
            yield


def _of_replicas(
    name: str, spec: PoolSpec, services: Sequence[str], sleeper: Sleeper | None
) -> dict[str, Pool]:
    """The pool of each service of a role, which has several."""
    together, pools = Replicas(), {}
    for index, service in enumerate(services):
        devices = spec.devices[index :: len(services)] or spec.devices
        pools[service] = Pool(f"{name}/{index}", devices, sleeper, service, together)
    together.free.update((pool.name, pool) for pool in pools.values())
    return pools
