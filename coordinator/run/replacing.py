"""Replacement of a service that is only read from, while the other services go on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from rolemesh.coordinator.dataflow.errors import RunError, ServiceLostError
from rolemesh.coordinator.recipe.schedule import SyncSamplerSpec
from rolemesh.coordinator.recipe.schema import role_of
from rolemesh.coordinator.run.attempt import Attempt
from rolemesh.coordinator.run.launch import LaunchError
from rolemesh.coordinator.run.recovery import RecoveryBudget, told_of
from rolemesh.coordinator.run.summary import Recovered
from rolemesh.coordinator.run.training import TrainingLoop
from rolemesh.coordinator.state.store import StateStoreError
from rolemesh.rpc.errors import RolemeshError

READ_ROLES = ("reference", "reward", "cost")
"""Roles that keep nothing from call to call, unless they are trained. So do rollout services that
sample the step which is made: what they have beside their models, the actor gives again."""

StartAgain = Callable[[str], Awaitable[tuple[str, float]]]
"""Starts a service again where it is ours. Gives its address, and the longest wait for its first
answer in seconds."""


class Replacements:
    """Replaces lost services of one attempt that are only read from. Owner: the run's loop.

    Calls of such a service wait for its new process, and what it had answered in this step is asked
    for again where a later call reads it. Trained roles go on with what they have, so nothing goes
    back. What cannot be replaced ends the attempt, like the loss of a trained role.
    """

    def __init__(
        self,
        attempt: Attempt,
        budget: RecoveryBudget,
        start_again: StartAgain,
        on_recovered: Callable[[Recovered], None],
    ) -> None:
        """Prepares.

        Args:
            attempt: One whose services all hold the run.
            budget: Counts the failures of the run.
            start_again: Starts a lost service.
            on_recovered: Told of each replacement that has succeeded.
        """
        self._attempt = attempt
        self._budget = budget
        self._start_again = start_again
        self._on_recovered = on_recovered
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """Replacements in progress, by service."""
        self._starting: set[str] = set()
        """Services whose new process is not there yet."""
        attempt.mesh.replaceable = replaceable_services(attempt)

    def take(self, service: str, reason: str) -> bool:
        """Begins to replace a service that is lost; False where that ends the attempt."""
        if service in self._starting:
            return True  # more news of the same loss
        if service not in self._attempt.mesh.replaceable or service in self._tasks:
            return False
        loop, error = self._attempt.loop, ServiceLostError(service, reason, "")
        assert isinstance(loop, TrainingLoop)
        pause_s = self._budget.pause_s(error, loop.step)
        if pause_s is None:
            return False
        self._attempt.mesh.connections[service].lost()
        loop.lost(service)
        self._starting.add(service)
        task = asyncio.create_task(self._replace(service, told_of(error), pause_s))
        self._tasks[service] = task
        task.add_done_callback(lambda _: self._tasks.pop(service, None))
        return True

    async def close(self) -> None:
        """Gives up the replacements in progress."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _replace(self, service: str, cause: str, pause_s: float) -> None:
        attempt, begun = self._attempt, time.monotonic()
        parts, mesh = attempt.parts, attempt.mesh
        parts.observer.on_event(f"{cause}; {service} is replaced while the step goes on")
        try:
            await asyncio.sleep(pause_s)
            address, deadline_s = await self._start_again(service)
            self._starting.discard(service)
            assert isinstance(attempt.loop, TrainingLoop)
            await mesh.replace(
                service,
                address,
                parts.recipe,
                deadline_s,
                attempt.loop.step,
                attempt.loop.prepare,
            )
            services = {name: known.facts() for name, known in mesh.connections.items()}
            recoveries = (await parts.store.get_run(parts.run_id)).recoveries + 1
            await parts.store.update_run(
                parts.run_id, epoch=attempt.epoch, services=services, recoveries=recoveries
            )
        except (RunError, LaunchError, RolemeshError, StateStoreError) as error:
            attempt.lost(service, f"{service} could not be replaced: {error}")
            return
        finally:
            self._starting.discard(service)
        self._on_recovered(
            Recovered(
                step=attempt.loop.step,
                cause=cause,
                seconds=time.monotonic() - begun,
                restarted=(service,),
                lost_steps=0,
            )
        )


def replaceable_services(attempt: Attempt) -> frozenset[str]:
    """Services of an attempt that can be replaced while the others go on."""
    if not isinstance(attempt.loop, TrainingLoop):
        return frozenset()
    trained = {known.service for known in attempt.mesh.trained}
    # What is sampled ahead belongs to several steps, each with a graph of its own.
    is_sync = isinstance(attempt.parts.recipe.schedule.sampler, SyncSamplerSpec)
    roles = (*READ_ROLES, "rollout") if is_sync else READ_ROLES
    return frozenset(
        service
        for service in attempt.mesh.connections
        if role_of(service) in roles
        and service not in trained
        # A pool keeps track of which role is awake; a new process would not be known to it.
        and not attempt.parts.recipe.sleeps(service)
    )
