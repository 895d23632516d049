"""Services that join a run and leave it, while its steps go on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rolemesh.coordinator.dataflow.calls.connection import RoleConnection
from rolemesh.coordinator.dataflow.errors import RunError
from rolemesh.coordinator.dataflow.journal import Journal
from rolemesh.coordinator.dataflow.mesh import RunMesh
from rolemesh.coordinator.recipe.role_names import role_of
from rolemesh.coordinator.run.parts import RunParts
from rolemesh.coordinator.run.services.registered import LOOK_S, RegisteredServices
from rolemesh.coordinator.run.steps.training import TrainingLoop
from rolemesh.coordinator.state.registrations import Registration
from rolemesh.rpc.errors import RolemeshError

SERVICES_OPERATION = "run.services"
"""Operation of the journal's entry that says who joined before a step, and who had left."""

ABSENT_S = 5.0
"""A service whose lease has ended leaves after so long. Where the store was away, or the
coordinator at which services register, they register again within it."""

_ANSWER_S = 60.0
"""Longest wait for the first answer of a service that joins: it has registered already."""


class ChangingServices:
    """Lets services of one attempt join and leave, as they register.

    Invariant: services join between two steps, with models loaded. They leave at any time, as long
    as their role keeps as many as the recipe wants at least: the calls that such a service has not
    answered are made by others, and so are those of its answers that are still to be read. What is
    sampled does not depend on who samples.

    Owner: the run's loop.
    """

    def __init__(
        self,
        registered: RegisteredServices,
        parts: RunParts,
        mesh: RunMesh,
        loop: TrainingLoop,
        journal: Journal,
        *,
        watch: Callable[[RoleConnection], None],
        tell: Callable[[], Awaitable[None]],
        on_lost: Callable[[str, str], None],
    ) -> None:
        """Prepares.

        Args:
            registered: Finds services.
            parts: Of the run.
            mesh: The services of the attempt.
            loop: Makes the steps, and calls `turn` before each.
            journal: Keeps who joined and left.
            watch: Begins to watch a service.
            tell: Writes down which services take part.
            on_lost: Told of a service without which too few are left, and why.
        """
        self._registered = registered
        self._recipe = recipe = parts.recipe
        self._mesh = mesh
        self._loop = loop
        self._journal = journal
        self._observer = parts.observer
        self._watch = watch
        self._tell = tell
        self._on_lost = on_lost
        self._names = [n for r in recipe.roles if recipe.changes(r) for n in recipe.services_of(r)]
        self._in_use: dict[str, str] = {}
        """Incarnations of services that take part, as far as they are known."""
        self._absent_since: dict[str, float] = {}
        """When services that take part were first found without a lease, on the loop's clock."""
        self._seen: dict[str, Registration] = {}
        """Registrations of others when they were first seen: a renewed one is of a process that
        lives."""
        self._refused: dict[str, str] = {}
        """Incarnations that could not join."""
        self._joining: dict[str, asyncio.Task[RoleConnection]] = {}
        self._gone: set[str] = set()
        """Those among them that are not there any more."""
        self._left: dict[str, str] = {}
        """Those that have left since the last step began, and why."""
        for name in self._names:
            if name in mesh.connections:
                mesh.connections[name].may_leave = True

    async def run(self) -> None:
        """Looks for services until cancelled; raises the errors of the store."""
        try:
            while True:
                now = await self._registered.now()
                for name in self._names:
                    self._look(name, now.get(name))
                await asyncio.sleep(LOOK_S)
        finally:
            for task in self._joining.values():
                task.cancel()
            for result in await asyncio.gather(*self._joining.values(), return_exceptions=True):
                if isinstance(result, RoleConnection):
                    # It holds the run, and is given back with the others.
                    self._mesh.join(result)

    def _look(self, name: str, one: Registration | None) -> None:
        connection = self._mesh.connections.get(name)
        if connection is not None:
            if not connection.has_left:
                self._look_at_member(connection, one)
        elif one is None or one.is_leaving:
            self._seen.pop(name, None)
            self._gone.add(name)
        elif name in self._joining or self._refused.get(name) == one.incarnation:
            return
        elif self._seen.setdefault(name, one) != one:
            self._gone.discard(name)
            self._joining[name] = asyncio.create_task(self._load(name, one))

    def _look_at_member(self, connection: RoleConnection, one: Registration | None) -> None:
        """Lets a service that takes part go if its registration says so."""
        name = connection.service
        if one is None:
            now = asyncio.get_running_loop().time()
            if now - self._absent_since.setdefault(name, now) >= ABSENT_S:
                # Whether it is really gone, its connection says, if no other one can do its part.
                self.leave(name, "its lease has ended")
            return
        self._absent_since.pop(name, None)
        is_same = self._in_use.setdefault(name, one.incarnation) == one.incarnation
        if is_same and one.address == connection.address and not one.is_leaving:
            return
        reason = "it drains" if one.is_leaving else f"{one.address} has its number now"
        if not self.leave(name, reason):
            self._on_lost(name, f"{name} leaves: {reason}, and too few are left without it")

    async def _load(self, name: str, one: Registration) -> RoleConnection:
        """Gives a service the run; it waits for the end of the step then."""
        self._observer.on_event(f"{name} at {one.address} is about to join")
        try:
            joining = await self._mesh.loaded(
                name, one.address, self._recipe, _ANSWER_S, self._loop.step
            )
        except (RolemeshError, RunError) as error:
            self._refused[name] = one.incarnation
            self._observer.on_event(f"{name} at {one.address} cannot join: {error}")
            raise
        self._in_use[name] = one.incarnation
        return joining

    def has_left(self, service: str) -> bool:
        """Whether a service has left in the step that is made."""
        known = self._mesh.connections.get(service)
        return known is not None and known.has_left

    def _others(self, service: str) -> list[str]:
        """Services of the same role that stay."""
        return [
            one.service
            for one in self._mesh.connections.values()
            if one.role == role_of(service) and one.service != service and not one.has_left
        ]

    def can_spare(self, service: str) -> bool:
        """Whether a service may leave: its role keeps as many as the recipe wants at least."""
        if service not in self._names or service not in self._mesh.connections:
            return False
        return len(self._others(service)) >= self._recipe.service(role_of(service)).replicas

    def leave(self, service: str, reason: str) -> bool:
        """Lets a service go; returns whether it may.

        Args:
            service: Its name.
            reason: For people.
        """
        if not self.can_spare(service):
            return False
        self._mesh.connections[service].leave()
        self._left[service] = reason
        self._in_use.pop(service, None)
        self._absent_since.pop(service, None)
        self._loop.left(service)
        self._observer.on_event(
            f"{service} leaves in step {self._loop.step + 1}: {reason}; its calls are made by "
            f"{', '.join(self._others(service))}"
        )
        return True

    async def turn(self, step: int) -> None:
        """Between two steps: takes in who has loaded, and lets go who has left.

        Args:
            step: That is made next.

        Raises:
            StateStoreError: The store failed.
        """
        left, self._left = self._left, {}
        for service in left:
            await self._mesh.drop(service)
        joined = []
        for service, task in list(self._joining.items()):
            if not task.done():
                continue
            del self._joining[service]
            self._seen.pop(service, None)
            error = task.exception()
            if isinstance(error, RolemeshError | RunError):
                continue  # it was told of
            if error is not None:
                raise error
            if service in self._gone:
                await task.result().close()
                continue
            self._mesh.join(task.result())
            self._loop.joined(service)
            self._watch(task.result())
            joined.append(service)
        if not left and not joined:
            return
        there = {role_of(name): self._there(role_of(name)) for name in (*left, *joined)}
        if "rollout" in there:
            self._loop.use(there["rollout"])
        await self._tell()
        told = {"joined": joined, "left": dict(left), "services": there}
        await self._journal.note(step, SERVICES_OPERATION, told)
        for service in joined:
            at = self._mesh.connections[service].address
            self._observer.on_event(f"{service} at {at} joins: it takes part from step {step} on")

    def _there(self, role: str) -> list[str]:
        """The services of a role that take part, in the order of their numbers."""
        return [name for name in self._recipe.services_of(role) if name in self._mesh.connections]
