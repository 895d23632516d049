"""Replacement of a service that is only read from, while the other services go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rolemesh.coordinator.dataflow.errors import ServiceLostError
from rolemesh.coordinator.dataflow.loop.clock import now
from rolemesh.coordinator.recipe.role_names import role_of
from rolemesh.coordinator.run.attempts.attempt import Attempt
from rolemesh.coordinator.run.attempts.recovery import RecoveryBudget, told_of
from rolemesh.coordinator.run.reporting.events import Recovered
from rolemesh.coordinator.run.services.lost_services import LostServices
from rolemesh.coordinator.run.steps.training import TrainingLoop


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
        lost: LostServices,
        on_recovered: Callable[[Recovered], None],
    ) -> None:
        """Prepares.

        Args:
            attempt: One whose services all hold the run.
            budget: Counts the failures of the run.
            lost: Starts a lost service again.
            on_recovered: Told of each replacement that has succeeded.
        """
        self._attempt = attempt
        self._budget = budget
        self._lost = lost
        self._on_recovered = on_recovered
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """Replacements in progress, by service."""
        self._causes: dict[str, str] = {}
        """Theirs."""
        self._starting: set[str] = set()
        """Services whose new process is not there yet."""

    @property
    def are_under_way(self) -> bool:
        """Whether a service is being replaced."""
        return bool(self._tasks)

    def take(self, service: str, reason: str) -> bool:
        """Begins to replace a service that is lost, if it is still needed.

        Returns:
            False where the loss ends the attempt.
        """
        if service in self._starting:
            return True  # more news of the same loss
        if service not in self._attempt.mesh.replaceable or service in self._tasks:
            return False
        if self._attempt.parts.recipe.changes(role_of(service)):
            return False  # the next attempt begins with those that are there
        loop, error = self._attempt.loop, ServiceLostError(service, reason, "")
        assert isinstance(loop, TrainingLoop)
        if loop.is_exporting:
            self._starting.add(service)
            self._attempt.parts.observer.on_event(f"{told_of(error)}; the export does without it")
            return True
        pause_s = self._budget.pause_s(error, loop.step, replaced=service)
        if pause_s is None:
            return False
        self._attempt.mesh.connections[service].lost()
        loop.lost(service)
        self._starting.add(service)
        self._causes[service] = cause = told_of(error)
        self._tasks[service] = asyncio.create_task(self._replace(service, cause, pause_s))
        self._tasks[service].add_done_callback(lambda _: self._ended(service))
        return True

    def _ended(self, service: str) -> None:
        del self._tasks[service], self._causes[service]

    async def close(self) -> dict[str, str]:
        """Gives up the replacements in progress; returns their causes by service."""
        tasks, causes = list(self._tasks.values()), dict(self._causes)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        return causes

    async def _replace(self, service: str, cause: str, pause_s: float) -> None:
        attempt, begun = self._attempt, now()
        parts, mesh = attempt.parts, attempt.mesh
        parts.observer.on_event(f"{cause}; {service} is replaced while the step goes on")
        try:
            await asyncio.sleep(pause_s)
            address, deadline_s = await self._lost.start_one(service)
            self._starting.discard(service)
            assert isinstance(attempt.loop, TrainingLoop)
            await mesh.replace(
                service,
                address,
                parts.recipe,
                deadline_s,
                attempt.loop.step,
                attempt.loop.room(service),
                attempt.loop.prepare,
            )
            self._lost.new.discard(service)
            # At once: what is reported from here on is another loss.
            self._on_recovered(
                Recovered(
                    step=attempt.loop.step,
                    cause=cause,
                    seconds=now() - begun,
                    restarted=(service,),
                )
            )
            services = {name: known.facts() for name, known in mesh.connections.items()}
            recoveries = (await parts.store.get_run(parts.run_id)).recoveries + 1
            await parts.store.update_run(
                parts.run_id, epoch=attempt.epoch, services=services, recoveries=recoveries
            )
        except Exception as error:
            # Whatever it is: calls wait for this service, and would wait for ever.
            self._lost.note(service, cause)
            attempt.lost(service, f"{service} could not be replaced: {error}")
        finally:
            self._starting.discard(service)
