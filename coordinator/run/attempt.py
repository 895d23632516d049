"""One attempt of a run: from meeting its services to the end of the run, or to the next failure."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolemesh.coordinator.algorithms.registry import Algorithm
from rolemesh.coordinator.dataflow.errors import NodeFailedError, RunError, ServiceLostError
from rolemesh.coordinator.dataflow.journal import Journal
from rolemesh.coordinator.dataflow.mesh import RunMesh
from rolemesh.coordinator.dataflow.observer import RunObserver
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.run.early_end import EarlyEnd, failed, placed
from rolemesh.coordinator.run.events import EventLog
from rolemesh.coordinator.run.external import ExternalLoop
from rolemesh.coordinator.run.metrics import MetricsWriter
from rolemesh.coordinator.run.progress import RunProgress
from rolemesh.coordinator.run.pulse import Pulse
from rolemesh.coordinator.run.recovery import go_back
from rolemesh.coordinator.run.run_loop import RunLoop
from rolemesh.coordinator.run.samples import SampleTaker
from rolemesh.coordinator.run.training import TrainingLoop
from rolemesh.coordinator.run.watcher import Watcher, WatchSettings
from rolemesh.coordinator.run.wishes import Wishes
from rolemesh.coordinator.state.store import StateStore
from rolemesh.rpc.channel import ChannelTraffic
from rolemesh.rpc.errors import RolemeshError, UnavailableError

GIVE_BACK_DEADLINE_S = 5.0
"""Longest wait at the end of a run until a service that outlives it has released the run."""


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """What all attempts of a run share."""

    recipe: Recipe
    run_id: str
    directory: Path
    store: StateStore
    observer: RunObserver
    events: EventLog
    wishes: Wishes
    writer: MetricsWriter
    services: Sequence[str]
    algorithm: Algorithm | None
    """None where a client makes the steps."""
    progress: RunProgress
    traffic: ChannelTraffic
    watch: WatchSettings
    loss_grace_s: float
    """When a service does not answer a call, the launcher has this long to report the cause."""


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
        self.journal = Journal(parts.store, parts.run_id, epoch)
        self.mesh = RunMesh(
            addresses, parts.services, self.journal, parts.observer, parts.traffic
        )
        is_external = parts.algorithm is None
        # A client that drives the services raises the epoch, so writes about the run carry none.
        self.epoch = parts.events.epoch = None if is_external else epoch
        self.samples = SampleTaker(
            parts.store, parts.run_id, self.epoch, parts.observer, parts.recipe.run.samples
        )
        self.loop: RunLoop = self._make_loop(parts)
        self.has_met = False
        """Whether all services have answered."""
        self.seconds_to_begin: float | None = None
        """From the first call until all services were where the run is; None before."""
        self.went_back_to = parts.progress.step
        """Step whose state the trained roles were brought back to."""
        self._lasting: list[str] = []

    def _make_loop(self, parts: RunParts) -> RunLoop:
        if parts.algorithm is None:
            return ExternalLoop(parts.store, parts.run_id, parts.wishes, parts.events)
        return TrainingLoop(
            parts.recipe,
            parts.algorithm,
            self.mesh,
            self.journal,
            parts.store,
            parts.writer,
            parts.observer,
            parts.directory,
            wishes=parts.wishes,
            events=parts.events,
            samples=self.samples,
            progress=parts.progress,
        )

    @property
    def activity(self) -> str:
        """What it does, for messages to people."""
        return self.loop.activity if self.has_met else "start"

    async def make(
        self, deadlines_s: Mapping[str, float], on_lost: Callable[[str, str], None]
    ) -> None:
        """Meets the services and makes the steps, unless an early end comes first.

        Args:
            deadlines_s: Longest wait for the first answer of each service, in seconds.
            on_lost: Told of a service that is gone, and why.

        Raises:
            RunError: It could not go on, with the cause where that is known.
            StateStoreError: The store failed.
        """
        try:
            await self._unless_ended(self._live(deadlines_s, on_lost))
        finally:
            await self.samples.close()

    async def _live(
        self, deadlines_s: Mapping[str, float], on_lost: Callable[[str, str], None]
    ) -> None:
        """Meets, watches and initialises the services, then trains."""
        parts, loop, mesh = self.parts, self.loop, self.mesh
        pulse = Pulse(
            parts.store,
            parts.run_id,
            self.epoch,
            parts.wishes,
            parts.events,
            activity=lambda: loop.activity,
            flow=lambda: loop.step_in_progress,
        )
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
        started = time.monotonic()
        try:
            await mesh.meet(deadlines_s)
            self.has_met = True
            watching = asyncio.create_task(watcher.run())
            watching.add_done_callback(self._watcher_ended)
            await mesh.initialize(parts.recipe)
            if isinstance(loop, TrainingLoop):
                await self._go_back(loop)
            services = {name: known.facts() for name, known in mesh.connections.items()}
            await parts.store.update_run(parts.run_id, epoch=self.epoch, services=services)
            self.seconds_to_begin = time.monotonic() - started
            parts.progress.seconds["initialize"] += self.seconds_to_begin
            await loop.run()
        finally:
            if watching is not None:
                watching.cancel()
                await asyncio.wait({watching})

    async def _go_back(self, loop: TrainingLoop) -> None:
        """Brings services and records of the run to the newest state that is left."""
        parts = self.parts
        step = await go_back(
            parts.recipe, self.mesh, parts.progress, loop.cuts, loop.checkpoints, parts.observer
        )
        self.went_back_to = step
        if step != parts.progress.step:
            parts.progress.rewind(step)
            await parts.store.rewind(parts.run_id, step, epoch=self.journal.epoch)
            parts.writer.rewind(step, parts.progress.records)
            loop.rewound()
            await loop.cuts.save(step)
        parts.events.step = step

    async def give_back(self) -> None:
        """Lets services that outlive the run take part in another one, and closes the channels."""
        lasting = [
            name
            for name in self.parts.services
            # A service that refused this run may hold another one.
            if self.parts.recipe.address(name) is not None and name in self.mesh.facts
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

    async def _unless_ended(self, work: Coroutine[Any, Any, None]) -> None:
        """Does the work, unless an early end comes first, e.g. by a lost service."""
        task = asyncio.create_task(work)
        ending = asyncio.create_task(self.early_end.wait())
        try:
            await asyncio.wait({task, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ending.result()
            error = task.exception()
            if error is not None:
                raise await self._explained(error, ending) from error
        finally:
            ending.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    async def _explained(
        self, error: BaseException, ending: asyncio.Task[RunError]
    ) -> BaseException:
        """The cause of an error: a call without an answer is a symptom of a lost service."""
        cause = error.cause if isinstance(error, NodeFailedError) else error
        if isinstance(cause, UnavailableError):
            done, _ = await asyncio.wait({ending}, timeout=self.parts.loss_grace_s)
            if done:
                return placed(ending.result(), error)
        if isinstance(error, RolemeshError):
            # Outside of a node: initialisation, checkpoint, export.
            return failed(error, self.activity)
        return error

    def lost(self, service: str, reason: str) -> None:
        """Ends the attempt because a service is gone."""
        nodes = self.loop.running(service) if self.has_met else []
        during = f"step {nodes[0].step}, {nodes[0].name}" if nodes else self.activity
        self.early_end.set(ServiceLostError(service, reason, during))
