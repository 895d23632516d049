"""The services of one run: met, given their part of the run, told what they may drop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any

from rolemesh.coordinator.connection import RoleConnection, to_struct
from rolemesh.coordinator.journal import Journal
from rolemesh.coordinator.observer import RunObserver
from rolemesh.coordinator.recipe import Recipe
from rolemesh.rpc.channel import ChannelTraffic
from rolemesh.rpc.errors import RolemeshError
from rolemesh.v1 import experience_pb2, operation_pb2, worker_pb2

TRAINED_ROLES = ("actor", "critic")
"""Roles whose weights change: the ones with a part in a checkpoint."""


class Mesh:
    """Connections to the services of a run, by role. Owner: the coordinator's loop."""

    def __init__(
        self, addresses: Mapping[str, str], roles: Iterable[str], observer: RunObserver
    ) -> None:
        """Opens channels; nothing is sent yet.

        Args:
            addresses: "host:port" by role.
            roles: The roles that the algorithm asks for.
            observer: Is told how far they are.
        """
        self.traffic = ChannelTraffic()
        self.connections = {
            role: RoleConnection(role, addresses[role], self.traffic) for role in roles
        }
        self.facts: dict[str, Mapping[str, str]] = {}
        self._observer = observer

    @property
    def trained(self) -> list[RoleConnection]:
        """The connections of the roles whose weights change."""
        return [known for role, known in self.connections.items() if role in TRAINED_ROLES]

    async def meet(self, deadline_s: float) -> None:
        """Returns once every service answers and can stand in for its role.

        Raises:
            RunError: One does not within deadline_s seconds, or is another role.
        """

        async def one(connection: RoleConnection) -> None:
            self._observer.on_phase(connection.role, "start", 0, 0)
            await connection.wait_healthy(deadline_s)
            await connection.learn_capabilities()

        await together(one(connection) for connection in self.connections.values())

    async def initialize(self, recipe: Recipe, journal: Journal) -> None:
        """Gives every service its section of the recipe, side by side.

        Raises:
            RolemeshError: A service refuses or fails.
        """
        await together(
            self._initialize(connection, recipe, journal)
            for connection in self.connections.values()
        )

    async def _initialize(
        self, connection: RoleConnection, recipe: Recipe, journal: Journal
    ) -> None:
        role = connection.role
        key = journal.next_key(0, f"{role}.initialize")
        request = worker_pb2.InitializeRequest(
            key=key, spec=to_struct(getattr(recipe, role)), run_seed=recipe.run.seed
        )

        def on_progress(progress: operation_pb2.Progress) -> None:
            stage = f"initialize: {progress.stage}"
            self._observer.on_phase(role, stage, progress.done, progress.total)

        self._observer.on_phase(role, "initialize", 0, 0)
        message = await connection.finish(connection.worker.Initialize(request), on_progress)
        connection.policy_version = message.result.policy_version
        self.facts[role] = dict(message.result.facts)
        await journal.acknowledge(key, {"policy_version": connection.policy_version})
        self._observer.on_phase(role, "", 0, 0)
        size = message.result.num_parameters
        self._observer.on_event(f"{role} is ready" + (f", {size:,} parameters" if size else ""))

    async def release(self, journal: Journal, through_step: int) -> None:
        """Drops the experience of this step and earlier ones, wherever it is held."""
        request = experience_pb2.ReleaseRequest(
            run_id=journal.run_id, through_step=through_step, fencing_epoch=journal.epoch
        )
        await together(
            _awaited(connection.experience.Release(request))
            for connection in self.connections.values()
            if connection.serves("rolemesh.v1.ExperienceService")
        )

    async def give_back(self, roles: Iterable[str], journal: Journal, timeout_s: float) -> None:
        """Lets services that outlive the run take part in another one.

        A service that does not say so in time is named to the observer: the run has ended already,
        and a service that still computes frees itself afterwards.
        """
        request = worker_pb2.DrainRequest(run_id=journal.run_id, fencing_epoch=journal.epoch)

        async def one(connection: RoleConnection) -> None:
            try:
                await connection.worker.Drain(request, timeout=timeout_s)
            except RolemeshError as error:
                self._observer.on_event(
                    f"{connection.role} at {connection.address} may not be free: {error.message}"
                )

        await together(one(self.connections[role]) for role in roles)

    async def close(self) -> None:
        """Lets the channels go."""
        await asyncio.gather(*(connection.close() for connection in self.connections.values()))


async def _awaited(call: Any) -> Any:
    return await call


async def together(works: Iterable[Coroutine[Any, Any, Any]]) -> None:
    """Runs coroutines side by side; the first failure cancels the others and is raised alone."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
