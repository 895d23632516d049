"""Services of a run that register themselves: waited for, and found in the store."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence

from rolemesh.coordinator.recipe.role_names import role_of
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.run.services.launch import LaunchError
from rolemesh.coordinator.state.registrations import Registration
from rolemesh.coordinator.state.store import StateStore

LOOK_S = 0.5
"""Pause between two looks into the store."""


class RegisteredServices:
    """Finds the services of one mesh by the places at which they have registered.

    A service counts once it has renewed its lease since it was first looked for: the lease of a
    process that has died goes on for some seconds.

    Owner: the run's loop.
    """

    def __init__(self, store: StateStore, mesh: str, recipe: Recipe) -> None:
        """Prepares.

        Args:
            store: Into which a coordinator enters them.
            mesh: Of the run's coordinator (`Identity.mesh`).
            recipe: Of the run.
        """
        self._store = store
        self._mesh = mesh
        self._recipe = recipe

    async def now(self) -> dict[str, Registration]:
        """What has registered, by name of the service; without those that the recipe has not.

        Raises:
            StateStoreError: The store failed.
        """
        names = {
            self._place(name): name
            for role in self._recipe.roles
            if self._recipe.service(role).registers
            for name in self._recipe.services_of(role)
        }
        known = await self._store.registrations(self._mesh)
        return {names[one.place]: one for one in known if one.place in names}

    async def addresses(self, services: Iterable[str], deadline_s: float) -> dict[str, str]:
        """The address of each service, once all are there.

        Of a role whose services may join and leave, it gives those that are there, once there are
        as many as the recipe wants at least.

        Args:
            services: Names of services that register.
            deadline_s: Longest wait, in seconds.

        Raises:
            LaunchError: Some have not come; names them, and what has registered instead.
            StateStoreError: The store failed.
        """
        services = tuple(services)
        found: dict[str, str] = {}
        seen: Mapping[str, Registration] | None = None
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    now = await self.now()
                    seen = now if seen is None else seen
                    for service in services:
                        one = now.get(service)
                        if one is None or one.is_leaving:
                            found.pop(service, None)
                        elif one != seen.get(service):
                            found[service] = one.address
                    if not self._missing(services, found):
                        return found
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            missing = self._missing(services, found)
            raise LaunchError(await self._not_there(missing, deadline_s)) from None

    def _missing(self, services: Sequence[str], found: Collection[str]) -> list[str]:
        """Services that have to come, or could."""
        missing = []
        for role in dict.fromkeys(role_of(service) for service in services):
            absent = [s for s in services if role_of(s) == role and s not in found]
            num_found = sum(role_of(service) == role for service in found)
            is_enough = num_found >= self._recipe.service(role).replicas
            if not (self._recipe.changes(role) and is_enough):
                missing += absent
        return missing

    def _place(self, service: str) -> str:
        role = role_of(service)
        return f"{role}/{self._recipe.services_of(role).index(service)}"

    async def _not_there(self, missing: Iterable[str], deadline_s: float) -> str:
        told = ", ".join(
            f"{service} ({_flags(self._recipe, service, self._place(service))})"
            for service in missing
        )
        others = ", ".join(
            f"{one.place} at {one.address}" for one in await self._store.registrations(self._mesh)
        )
        return (
            f"not registered within {deadline_s:g} s (run.recovery.wait_s): {told}. Start what is "
            "missing with an identity of this mesh and --register-at the member_port of its "
            f"coordinator; registered are {others or 'none'}"
        )


def _flags(recipe: Recipe, service: str, place: str) -> str:
    """What starts a service that registers, as far as it follows from its name."""
    role, number = role_of(service), place.rpartition("/")[2]
    several = f" --number {number}" if len(recipe.services_of(role)) > 1 else ""
    return f"rolemesh serve {role}{several}"
