"""A mesh of simulated services: which processes there are, and what outlives them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rolemesh.coordinator.dataflow.loop.clock import now
from rolemesh.coordinator.simulation.channel import SimulatedChannel
from rolemesh.coordinator.simulation.kept import CallRecord
from rolemesh.coordinator.simulation.service import SimulatedService
from rolemesh.coordinator.simulation.timing import Settings
from rolemesh.rpc.channel import ChannelTraffic
from rolemesh.rpc.members.identity import Identity


@dataclass(frozen=True, slots=True)
class Loss:
    """A process that ended."""

    service: str
    at: float
    """Virtual seconds."""


@dataclass(eq=False, kw_only=True)
class SimulatedMesh:
    """The processes of one simulated run. Owner: one event loop.

    Example: `await mesh.restart("critic")` returns the address of a new process, which has taken
    `settings.start_s` to start.
    """

    services: Iterable[str]
    settings: Settings
    estimator_columns: tuple[str, ...]
    """What the recipe's estimator makes; () where it has none."""
    on_exit: Callable[[str, str], None] = lambda service, reason: None
    """Told of a process that ends by itself, and why, as the launcher tells a run."""
    calls: list[CallRecord] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    cuts: dict[str, dict[int, int]] = field(default_factory=dict)
    saved: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._by_name: dict[str, SimulatedService] = {}
        self._by_address: dict[str, SimulatedService] = {}
        self._started = 0
        self.addresses = {name: self._start(name) for name in self.services}

    def _start(self, name: str) -> str:
        self._started += 1
        address = f"{name}:{self._started}"
        self._by_name[name] = self._by_address[address] = SimulatedService(name, address, self)
        return address

    def at(self, address: str) -> SimulatedService | None:
        """The process that answers at an address, if one does by now."""
        found = self._by_address.get(address)
        return found if found is not None and found.is_alive else None

    def service(self, name: str) -> SimulatedService:
        """The newest process of a service."""
        return self._by_name[name]

    def open_channel(
        self, address: str, traffic: ChannelTraffic, identity: Identity | None
    ) -> SimulatedChannel:
        """Opens a channel to whatever answers at an address."""
        return SimulatedChannel(address, traffic, self.at)

    async def restart(self, name: str) -> str:
        """Ends what is left of a service, and returns the address of its next process."""
        self._by_name[name].end()
        await asyncio.sleep(self.settings.start_s)
        return self._start(name)

    async def lose_processes(self) -> None:
        """Ends processes as the faults say; returns after the last of them."""
        begun = now()
        for number, at in enumerate(self.settings.faults.loss_times()):
            await asyncio.sleep(begun + at - now())
            alive = sorted(name for name, one in self._by_name.items() if one.is_alive)
            if alive:
                victim = self.settings.faults.victim(number, alive)
                self._by_name[victim].end()
                self.losses.append(Loss(victim, now()))
                self.on_exit(victim, f"{victim} ({self._by_name[victim].address}) was lost")
