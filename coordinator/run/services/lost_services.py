"""Services of a run whose process is gone or of no use any more, and how they come back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from rolemesh.coordinator.dataflow.observer import RunObserver
from rolemesh.coordinator.recipe.role_names import role_of
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.run.services.launch import LaunchError, ServiceExit

MEET_AGAIN_DEADLINE_S = 20.0
"""Longest wait after a failure for a service of ours that was not reported as lost. One that does
not answer by then is started again."""

Restart = Callable[[str], Awaitable[str]]
"""Ends what is left of a service, starts it again, and gives its address."""


class LostServices:
    """Notes which services are lost, and starts those again that were started for the run.

    Owner: the run's loop.
    """

    def __init__(
        self,
        recipe: Recipe,
        addresses: Mapping[str, str],
        restart: Restart | None,
        observer: RunObserver,
        start_deadline_s: float,
    ) -> None:
        """Prepares.

        Args:
            recipe: Of the run; services with an address in it are started by others.
            addresses: "host:port" by name of the service.
            restart: Starts a service again that was started for the run, or finds one that
                registers itself; None: others do that.
            observer: Is told what is started.
            start_deadline_s: Longest wait for the first answer of a new process, in seconds.
        """
        self.names: dict[str, str] = {}
        """Those that are lost, and why; a service whose process is being started again is not."""
        self.new = set(addresses)
        """Those whose process was started, and has not had the run yet."""
        self.addresses = dict(addresses)
        """Of all services, where they are by now."""
        self._recipe = recipe
        self._restart = restart
        self._observer = observer
        self._start_deadline_s = start_deadline_s
        self._noted = asyncio.Event()

    def note(self, service: str, why: str) -> None:
        """Notes that a service is lost; the first reason stays."""
        self.names.setdefault(service, why)
        self._noted.set()

    def deadlines_s(self, services: Collection[str], *, is_first: bool) -> dict[str, float]:
        """Longest wait for the first answer of each service, in seconds.

        Args:
            services: All of the run.
            is_first: Whether the run has not met its services before.
        """

        def deadline_s(service: str) -> float:
            if self._is_of_others(service) and not is_first:
                return self._recipe.run.recovery.wait_s
            return self._start_deadline_s if service in self.new else MEET_AGAIN_DEADLINE_S

        return {service: deadline_s(service) for service in services}

    async def start(self) -> None:
        """Starts all lost services of ours again, side by side: also those lost meanwhile.

        Raises:
            LaunchError: One did not start; it counts as lost still.
        """
        # Others start theirs, and the next attempt waits for them.
        own = {name: why for name, why in self.names.items() if not self._is_of_others(name)}
        self.names = own
        if self._restart is None:
            self.names.clear()
        starts: dict[str, asyncio.Future[None]] = {}
        try:
            while self.names or starts:
                self._noted.clear()
                for service in sorted(self.names.keys() - starts.keys()):
                    starts[service] = asyncio.ensure_future(self._start(service))
                await self._next_event(starts.values())
                for service in [name for name, start in starts.items() if start.done()]:
                    # One that is lost again by now is started again.
                    starts.pop(service).result()
        finally:
            for start in starts.values():
                start.cancel()
            await asyncio.gather(*starts.values(), return_exceptions=True)

    async def _next_event(self, starts: Iterable[asyncio.Future[Any]]) -> None:
        """Returns when a start has ended, or another service is lost."""
        noted: asyncio.Future[Any] = asyncio.ensure_future(self._noted.wait())
        try:
            await asyncio.wait((noted, *starts), return_when=asyncio.FIRST_COMPLETED)
        finally:
            noted.cancel()

    async def start_one(self, service: str) -> tuple[str, float]:
        """Starts a lost service again where it is ours; where not, it is only waited for.

        Returns:
            Its address, and the longest wait for its first answer in seconds.

        Raises:
            LaunchError: It did not start; it counts as lost still.
        """
        if self._is_of_others(service):
            del self.names[service]
            return self.addresses[service], self._recipe.run.recovery.wait_s
        if self._restart is None:
            del self.names[service]
            return self.addresses[service], MEET_AGAIN_DEADLINE_S
        await self._start(service)
        return self.addresses[service], self._start_deadline_s

    async def _start(self, service: str) -> None:
        assert self._restart is not None
        self._observer.on_phase(service, "start", 0, 0)
        why = self.names.pop(service)
        try:
            self.addresses[service] = await self._restart(service)
            self.new.add(service)
        except BaseException as error:
            self.names.setdefault(service, why)
            if isinstance(error, OSError):
                # No memory for a process, no room for its log: that may pass.
                raise LaunchError(f"{service} could not be started again: {error}") from error
            raise

    def told(self) -> str:
        """What a recovery begins with, in words."""
        own = sorted(name for name in self.names if self._recipe.address(name) is None)
        others = sorted(self.names.keys() - own)
        starts = f"; {_are(own)} started again" if own and self._restart else ""
        return starts + (f"; {_are(others)} waited for" if others else "")

    def _is_of_others(self, service: str) -> bool:
        """Whether it comes back at its address, and nothing is to be done here.

        One that registers may come back at another address, which `restart` finds. Which of those
        are there that join and leave, the next attempt finds.
        """
        return bool(self._recipe.address(service)) or self._recipe.changes(role_of(service))

    def found(self, addresses: Mapping[str, str]) -> None:
        """Told which services of roles that change are there, before an attempt begins."""
        for name in [name for name in self.addresses if self._recipe.changes(role_of(name))]:
            if self.addresses[name] != addresses.get(name):
                del self.addresses[name]
        self.new |= addresses.keys() - self.addresses.keys()
        self.addresses |= addresses


def telling_of_another_start(
    recipe: Recipe, observer: RunObserver
) -> Callable[[ServiceExit], None] | None:
    """What `Launcher` tells of a service that was killed before the run had met it.

    None where the run is to survive no failure.
    """

    def tell(end: ServiceExit) -> None:
        observer.on_event(f"{end.role} is started once more: {end.reason}")

    return tell if recipe.run.recovery.attempts else None


def _are(services: Sequence[str]) -> str:
    return f"{', '.join(services)} {'is' if len(services) == 1 else 'are'}"
