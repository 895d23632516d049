"""The actor service behind the server: its address, and its next process when one is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.run.services.commands import ServiceCommand, service_commands
from rolemesh.coordinator.run.services.launch import Launcher, LaunchError, ServiceExit
from rolemesh.coordinator.sdk import AsyncMesh, RetryPolicy

logger = logging.getLogger(__name__)

ROLE = "actor"
_STARTS = 3
"""How often a lost process is started anew for one call."""

_RETRY = RetryPolicy(budget_s=4.0, first_contact_s=4.0)
"""A lost process is found by its launcher; calls need not wait for it longer."""


class ActorPlace:
    """Starts an actor service for several runs, and starts it again when it ends. Owner: one loop.

    Example::

        async with ActorPlace(recipe, folder, runs=4) as place:
            mesh = place.mesh("a-run")
            ...
            await place.restored(lost)  # after a call could not reach the process at `lost`
    """

    def __init__(self, recipe: Recipe, folder: Path, *, runs: int) -> None:
        """Prepares.

        Args:
            recipe: Its section actor says what the service holds.
            folder: Of the server's files, which the service may read and write.
            runs: Most runs at once.
        """
        self._folder = folder
        make = service_commands(recipe, folder)

        def command(service: str, announce: Path) -> ServiceCommand:
            made = make(service, announce)
            return replace(made, arguments=[*made.arguments, "--runs", str(runs)])

        self._launcher = Launcher([ROLE], command, folder / "logs")
        self._address = ""
        self._has_ended = asyncio.Event()
        self._restart: asyncio.Task[None] | None = None
        self.on_lost: Callable[[str], None] = lambda reason: logger.warning("%s", reason)

    async def __aenter__(self) -> ActorPlace:
        """Starts the service."""
        await self._launcher.__aenter__()
        self._address = (await self._launcher.start())[ROLE]
        self._launcher.on_exit = self._ended
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        """Ends it."""
        if self._restart is not None:
            self._restart.cancel()
        await self._launcher.__aexit__(*exc_info)

    def mesh(self, run_id: str) -> AsyncMesh:
        """A client of the service for a run, of its process as it is now."""
        return AsyncMesh({ROLE: self._address}, run_id=run_id, retry=_RETRY)

    @property
    def address(self) -> str:
        """Of its process as it is now."""
        return self._address

    async def restored(self, lost: str) -> None:
        """Returns once the service is there, in a new process where the last one has ended.

        Args:
            lost: Address of the process that could not be reached.

        Raises:
            LaunchError: It cannot be started again.
        """
        if self._restart is None and lost != self._address:
            # Another run has found it before.
            return
        # A connection breaks before the kernel tells of the process.
        if self._restart is None and not self._has_ended.is_set():
            try:
                await asyncio.wait_for(self._has_ended.wait(), 5.0)
            except TimeoutError:
                return
        if self._restart is None:
            self._restart = asyncio.create_task(self._start_again())
        restart = self._restart
        try:
            await asyncio.shield(restart)
        finally:
            if restart.done() and self._restart is restart:
                self._restart = None

    async def _start_again(self) -> None:
        for number in range(_STARTS):
            self._has_ended.clear()
            try:
                self._address = await self._launcher.restart(ROLE)
                return
            except LaunchError as error:
                # Nobody else tells of a process that ended while it started: the next call begins
                # with another try.
                self._has_ended.set()
                if number == _STARTS - 1:
                    raise
                logger.warning("the actor did not start (%s); trying again", error)

    def _ended(self, end: ServiceExit) -> None:
        self._has_ended.set()
        self.on_lost(end.reason)


def actor_spec(recipe: Recipe, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The section actor as the service gets it, for one model.

    Args:
        recipe: Of the server.
        changes: Of its section model.
    """
    spec = recipe.sent_spec(ROLE)
    return {**spec, "model": {**spec["model"], **changes}}
