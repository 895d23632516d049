"""Services of a run that register themselves: waited for, and found in the store."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from rolemesh.coordinator.recipe.schema import Recipe, role_of
from rolemesh.coordinator.run.launch import LaunchError
from rolemesh.coordinator.state.registrations import Registration
from rolemesh.coordinator.state.store import StateStore

_LOOK_S = 0.5
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

    async def addresses(self, services: Iterable[str], deadline_s: float) -> dict[str, str]:
        """The address of each service, once all are there.

        Args:
            services: Names of services that register.
            deadline_s: Longest wait, in seconds.

        Raises:
            LaunchError: Some have not come; names them, and what has registered instead.
            StateStoreError: The store failed.
        """
        missing = {service: self._place(service) for service in services}
        found: dict[str, str] = {}
        seen: Mapping[str, Registration] | None = None
        try:
            async with asyncio.timeout(deadline_s):
                while missing:
                    now = {one.place: one for one in await self._store.registrations(self._mesh)}
                    seen = now if seen is None else seen
                    for service, place in list(missing.items()):
                        one = now.get(place)
                        if one is not None and not one.is_leaving and one != seen.get(place):
                            found[service] = one.address
                            del missing[service]
                    if missing:
                        await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            raise LaunchError(await self._not_there(missing, deadline_s)) from None
        return found

    def _place(self, service: str) -> str:
        role = role_of(service)
        return f"{role}/{self._recipe.services_of(role).index(service)}"

    async def _not_there(self, missing: Mapping[str, str], deadline_s: float) -> str:
        told = ", ".join(
            f"{service} ({_flags(self._recipe, service, place)})"
            for service, place in missing.items()
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
