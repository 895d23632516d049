"""One attempt of a run: from meeting its services to the end of the run, or to the next failure."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

from rolemesh.coordinator.dataflow.calls.connection import RoleConnection
from rolemesh.coordinator.dataflow.errors import NodeFailedError, RunError, ServiceLostError
from rolemesh.coordinator.dataflow.journal import Journal
from rolemesh.coordinator.dataflow.loop.clock import now
from rolemesh.coordinator.dataflow.mesh import RunMesh
from rolemesh.coordinator.recipe.role_names import kind_of
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.recipe.sections.schedule import SyncSamplerSpec
from rolemesh.coordinator.run.attempts.changing import ChangingServices
from rolemesh.coordinator.run.attempts.pulse import Pulse
from rolemesh.coordinator.run.attempts.recovery import go_back
from rolemesh.coordinator.run.parts import RunParts
from rolemesh.coordinator.run.reporting.early_end import EarlyEnd, failed, placed
from rolemesh.coordinator.run.results.samples import SampleTaker
from rolemesh.coordinator.run.services.registered import RegisteredServices
from rolemesh.coordinator.run.services.watcher import Watcher
from rolemesh.coordinator.run.steps.external import ExternalLoop
from rolemesh.coordinator.run.steps.run_loop import RunLoop
from rolemesh.coordinator.run.steps.training import TrainingLoop
from rolemesh.rpc.errors import RolemeshError, UnavailableError

GIVE_BACK_DEADLINE_S = 5.0
"""Longest wait at the end of a run until a service that outlives it has released the run."""

_READ_ROLES = ("reference", "teacher", "reward", "cost")
"""Roles that keep nothing from call to call, unless they are trained. So do rollout services that
sample the step which is made: what they have beside their models, the actor gives again."""


class Attempt:
    """Meets the services as it finds them, and makes the steps that are left.

    A service that holds the run is attached, another one initialised. All trained roles then go
    back to one step, and the loop goes on from there. Starting a run, going on after a failure and
    taking over from a coordinator that is gone are therefore the same.

    Owner: the coordinator's loop.
    """

    def __init__(self, parts: RunParts, epoch: int, addresses: Mapping[str, str]) -> None:
        """Prepares; nothing is sent yet.

        Args:
            parts: What all attempts of the run share.
            epoch: Of this attempt alone: it fences the ones before off.
            addresses: "host:port" by name of the service.
        """
        self.parts = parts
        self.early_end = EarlyEnd()
        """What ends the attempt from outside."""
        self.journal = Journal(parts.store, parts.run_id, epoch, parts.progress.lineage_of)
        reward = parts.recipe.reward
        self.mesh = RunMesh(
            addresses,
            parts.services,
            self.journal,
            parts.observer,
            parts.traffic,
            identity=parts.identity,
            open_channel=parts.open_channel,
            is_reward_trained=reward is not None and reward.optimizer is not None,
        )
        is_external = parts.algorithm is None
        # A client that drives the services raises the epoch, so writes about the run carry none.
        self.epoch = parts.events.epoch = parts.writer.epoch = None if is_external else epoch
        self.samples = SampleTaker(
            parts.store,
            parts.run_id,
            self.epoch,
            parts.observer,
            parts.recipe.run.samples,
            parts.writer.samples,
            parts.identity,
        )
        self.loop: RunLoop = (
            ExternalLoop(parts)
            if is_external
            else TrainingLoop(parts, self.mesh, self.journal, self.samples)
        )
        self.changing: ChangingServices | None = None
        """Lets services join and leave, once the attempt has begun."""
        self.has_met = False
        """Whether all services have answered."""

    @property
    def activity(self) -> str:
        """What it does, for messages to people."""
        return self.loop.activity if self.has_met else "start"

    async def make(
        self,
        deadlines_s: Mapping[str, float],
        on_lost: Callable[[str, str], None],
        on_begun: Callable[[Attempt], None],
    ) -> None:
        """Meets the services and makes the steps, unless an early end comes first.

        Args:
            deadlines_s: Longest wait for the first answer of each service, in seconds.
            on_lost: Told of a service that is gone, and why.
            on_begun: Told of this attempt when all services are where the run is.

        Raises:
            RunError: It could not go on, with the cause where that is known.
            StateStoreError: The store failed.
        """
        try:
            await self.early_end.cuts_short(self._live(deadlines_s, on_lost, on_begun))
        except Exception as error:
            explained = await self._explained(error)
            if explained is error:
                raise
            raise explained from error
        finally:
            await self.samples.close()

    async def _live(
        self,
        deadlines_s: Mapping[str, float],
        on_lost: Callable[[str, str], None],
        on_begun: Callable[[Attempt], None],
    ) -> None:
        """Meets, watches and initialises the services, then trains."""
        parts, loop, mesh = self.parts, self.loop, self.mesh
        pulse = Pulse(parts, self.epoch, loop)
        watcher = Watcher(
            list(mesh.connections.values()),
            parts.store,
            parts.run_id,
            parts.watch,
            on_lost=on_lost,
            on_devices=pulse.on_devices,
            beat=pulse.beat,
        )
        watching: asyncio.Task[None] | None = None
        changing: asyncio.Task[None] | None = None
        started = now()
        try:
            await mesh.meet(deadlines_s)
            self.has_met = True
            watching = asyncio.create_task(watcher.run())
            watching.add_done_callback(self._watcher_ended)
            await mesh.initialize(parts.recipe)
            # From now on a service that does not know the run is another process.
            watcher.ready.update(mesh.connections)
            if isinstance(loop, TrainingLoop):
                # First: to go back may begin the graph of the next step.
                mesh.replaceable = _replaceable(parts.recipe, mesh)
                await self._go_back(loop)
            await self._tell_services()
            parts.progress.seconds["initialize"] += now() - started
            if parts.registered is not None and isinstance(loop, TrainingLoop):
                self.changing = self._may_change(parts.registered, loop, watcher, on_lost)
                changing = asyncio.create_task(self.changing.run())
                changing.add_done_callback(self._watcher_ended)
            on_begun(self)
            await loop.run()
        finally:
            beside = {task for task in (watching, changing) if task is not None}
            for task in beside:
                task.cancel()
            if beside:
                await asyncio.wait(beside)

    async def _tell_services(self) -> None:
        """Writes into the run's record which services take part."""
        services = {name: known.facts() for name, known in self.mesh.connections.items()}
        await self.parts.store.update_run(self.parts.run_id, epoch=self.epoch, services=services)

    def _may_change(
        self,
        registered: RegisteredServices,
        loop: TrainingLoop,
        watcher: Watcher,
        on_lost: Callable[[str, str], None],
    ) -> ChangingServices:
        def watch(connection: RoleConnection) -> None:
            watcher.ready.add(connection.service)
            watcher.add(connection)

        changing = ChangingServices(
            registered,
            self.parts,
            self.mesh,
            loop,
            self.journal,
            watch=watch,
            tell=self._tell_services,
            on_lost=on_lost,
        )
        loop.turn = changing.turn
        return changing

    async def _go_back(self, loop: TrainingLoop) -> None:
        """Brings services and records of the run to the newest state that is left."""
        parts = self.parts
        step = await go_back(
            parts.recipe, self.mesh, parts.progress, loop.cuts, loop.checkpoints, parts.observer
        )
        if step != parts.progress.step:
            parts.progress.rewind(step)
            await parts.store.rewind(parts.run_id, step, epoch=self.journal.epoch)
            parts.writer.rewind(step, parts.progress.records)
            loop.rewound()
            if loop.cuts.newest != step:
                await loop.cuts.save(step)
        await loop.begin_ahead()
        parts.events.step = step

    async def give_back(self) -> None:
        """Lets services that outlive the run take part in another one, and closes the channels."""
        lasting = [
            name
            for name in self.mesh.connections
            # A service that refused this run may hold another one.
            if self.parts.recipe.address(name) is not None
            and name in self.mesh.facts
            and not self.mesh.connections[name].has_left
        ]
        if self.parts.algorithm is None and lasting:
            # It is newer than the epoch of every driver, so all of them are fenced off.
            self.journal.epoch = await self.parts.store.next_epoch(self.parts.run_id)
        await self.mesh.give_back(lasting, GIVE_BACK_DEADLINE_S)
        await self.mesh.close()

    def _watcher_ended(self, watching: asyncio.Task[None]) -> None:
        if watching.cancelled() or watching.exception() is None:
            return
        error: BaseException | None = watching.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        self.early_end.set(RunError(f"watching the services failed: {error}"))

    async def _explained(self, error: Exception) -> Exception:
        """The cause of an error: a call without an answer is a symptom of a lost service."""
        cause = error.cause if isinstance(error, NodeFailedError) else error
        if isinstance(cause, UnavailableError):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.parts.loss_grace_s):
                    return placed(await self.early_end.wait(), error)
        if isinstance(error, RolemeshError):
            # Outside of a node: initialisation, checkpoint, export.
            return failed(error, self.activity)
        return error

    async def save_last(self, deadlines_s: Mapping[str, float]) -> tuple[int, Path]:
        """Saves the newest step of a run that has failed of which its trained roles have a cut.

        Args:
            deadlines_s: As for `make`.

        Returns:
            The step, and the folder of its checkpoint.

        Raises:
            RunError: A service is gone, or a trained role has no cut of the run.
            RolemeshError: A trained role failed.
        """
        loop, progress = self.loop, self.parts.progress
        assert isinstance(loop, TrainingLoop)
        await self.mesh.meet(deadlines_s)
        if not await self.mesh.attach(self.parts.recipe):
            raise RunError("a service does not hold the run any more")
        # Then at most one role of a pool is awake at a time, as its lease expects.
        for service in self.parts.services:
            if self.parts.recipe.sleeps(service):
                await self.mesh.sleep(service, progress.step)
        newest = max((cut for cut in await loop.cuts.known() if cut <= progress.step), default=None)
        if newest is None:
            raise RunError(f"a trained role has no cut of step {progress.step}")
        if newest in loop.checkpoints.committed():
            raise RunError(f"the checkpoint of step {newest} is the newest state that is left")
        await loop.cuts.restore(newest)
        folder = await loop.checkpoints.save(newest, progress.to_dict(newest))
        await loop.cuts.drop_all()
        return newest, folder

    def lost(self, service: str, reason: str) -> None:
        """Ends the attempt because a service is gone."""
        nodes = self.loop.running(service) if self.has_met else []
        during = f"step {nodes[0].step}, {nodes[0].name}" if nodes else self.activity
        self.early_end.set(ServiceLostError(service, reason, during))


def _replaceable(recipe: Recipe, mesh: RunMesh) -> frozenset[str]:
    """Services of a mesh that holds the run, which are only read from: others go on meanwhile."""
    trained = {known.service for known in mesh.trained}
    # What is sampled ahead belongs to several steps, each with a graph of its own.
    is_sync = isinstance(recipe.schedule.sampler, SyncSamplerSpec)
    roles = (*_READ_ROLES, "rollout") if is_sync else _READ_ROLES
    return frozenset(
        service
        for service in mesh.connections
        if kind_of(service) in roles and service not in trained
    )
