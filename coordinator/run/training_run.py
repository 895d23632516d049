"""A run from outside: it is started, stopped, told of lost services, and concluded.

Every failure ends in one error with one message. In every case the run's record and summary.json
say how the run ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

import yaml

from rolemesh.coordinator.algorithms.registry import algorithm_of, roles_in, unused_roles
from rolemesh.coordinator.dataflow.errors import (
    NodeFailedError,
    RunAbortedError,
    RunError,
    ServiceLostError,
)
from rolemesh.coordinator.dataflow.journal import Journal
from rolemesh.coordinator.dataflow.mesh import RunMesh
from rolemesh.coordinator.dataflow.observer import QuietObserver, RunObserver
from rolemesh.coordinator.recipe.algorithms import ExternalSpec
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.run.early_end import EarlyEnd, failed, placed
from rolemesh.coordinator.run.events import EventLog, NotingObserver
from rolemesh.coordinator.run.external import ExternalLoop
from rolemesh.coordinator.run.metrics import MetricsWriter
from rolemesh.coordinator.run.pulse import Pulse
from rolemesh.coordinator.run.records import (
    check_directory_is_free,
    end_run,
    enter_run,
    make_run_id,
    planned_steps,
)
from rolemesh.coordinator.run.run_loop import RunLoop
from rolemesh.coordinator.run.samples import SampleTaker
from rolemesh.coordinator.run.summary import (
    RunSummary,
    coordinator_versions,
    git_commit,
    mean_rewards,
    traffic_totals,
)
from rolemesh.coordinator.run.training import TrainingLoop
from rolemesh.coordinator.run.watcher import Watcher, WatchSettings
from rolemesh.coordinator.run.wishes import Wishes
from rolemesh.coordinator.state.files import write_atomically
from rolemesh.coordinator.state.store import RunState, StateStore, StateStoreError
from rolemesh.coordinator.trackers.outside import outside_trackers, without_passwords
from rolemesh.coordinator.trackers.tracker import RunFacts
from rolemesh.rpc import tracing
from rolemesh.rpc.errors import RolemeshError, UnavailableError

START_DEADLINE_S = 300.0
"""Longest wait for a service to answer its first health check. It imports torch first."""

LOSS_GRACE_S = 6.0
"""When a service does not answer a call, the launcher has this long to report the cause.

The agent of a service of several ranks ends the others first, which takes a few seconds.
"""

GIVE_BACK_DEADLINE_S = 5.0
"""Longest wait at the end of a run until a service that outlives it has released the run."""

TRACKER_DEADLINE_S = 15.0
"""Longest wait at the end of a run for its trackers to send what they have."""

QUICK_END_S = 2.0
"""The same when the run has failed or was aborted."""


class TrainingRun:
    """One run of a recipe over services that are started or about to start.

    Owner: one asyncio loop. `request_stop`, `abort` and `service_lost` may be called at any time
    on that loop, also from a signal handler of the loop.

    Example::

        run = TrainingRun(recipe, directory=out, addresses={"actor": "127.0.0.1:4001", ...},
                          store=store, observer=observer)
        loop.add_signal_handler(signal.SIGINT, run.request_stop)
        summary = await run.execute()
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        directory: Path,
        addresses: Mapping[str, str],
        store: StateStore,
        observer: RunObserver | None = None,
        run_id: str | None = None,
        watch: WatchSettings | None = None,
        start_deadline_s: float = START_DEADLINE_S,
        loss_grace_s: float = LOSS_GRACE_S,
    ) -> None:
        """Prepares; nothing is contacted or written before `execute`.

        Args:
            recipe: What to train, and how.
            directory: Folder of the run's files; made if missing, must hold no other run.
            addresses: "host:port" by name of the service.
            store: Keeps the run's record, journal and metrics.
            observer: Observer that is told of the run's progress.
            run_id: Name of the run in the store and on the wire; None makes one.
            watch: How closely services are watched.
            start_deadline_s: Longest wait for a service's first answer, in seconds.
            loss_grace_s: Longest wait for the cause when a service does not answer, in seconds.

        Raises:
            ValueError: A role has no address, or the folder holds a run already.
        """
        self.recipe = recipe
        self.run_id = run_id or make_run_id(recipe.run.name)
        self.directory = directory.absolute()
        self._is_external = isinstance(recipe.algorithm, ExternalSpec)
        self._algorithm = None if self._is_external else algorithm_of(recipe)
        self._services = [name for role in roles_in(recipe) for name in recipe.services_of(role)]
        for name in self._services:
            if name not in addresses:
                raise ValueError(
                    f"services.{name}.address: no address for the role; give one, or let the "
                    "launcher start it"
                )
        check_directory_is_free(self.directory)
        self._addresses = dict(addresses)
        self._store = store
        self._events = EventLog(store, self.run_id)
        self._observer = NotingObserver(observer or QuietObserver(), self._events)
        self.wishes = Wishes(store, self.run_id, self._events, self._observer)
        """Wishes of users while the run goes on."""
        self._watch_settings = watch or WatchSettings()
        self._start_deadline_s = start_deadline_s
        self._loss_grace_s = loss_grace_s
        self._loop: RunLoop | None = None
        self._early_end = EarlyEnd()
        self._git_commit: str | None = None

    # --- wishes and news from outside ---

    def request_stop(self) -> None:
        """Ends the run after the step in progress, with everything saved; a repeat aborts it."""
        if self.wishes.is_stop_wanted:
            self.abort()
        else:
            self.wishes.stop()

    def abort(self) -> None:
        """Ends the run at once; what was saved before stays."""
        steps = self._loop.step if self._loop else 0
        self._early_end.set(
            RunAbortedError(f"aborted during {self._activity}; steps made before: {steps}")
        )

    def service_lost(self, role: str, reason: str) -> None:
        """Ends the run because a service's process ended.

        Args:
            role: Its role.
            reason: For people, with rank, process and cause, e.g. "actor rank 0 (pid 123) was
                killed by signal 9; its log ends with: ...".
        """
        nodes = self._loop.running(role) if self._loop else []
        during = f"step {nodes[0].step}, {nodes[0].name}" if nodes else self._activity
        self._early_end.set(ServiceLostError(role, reason, during))

    @property
    def _activity(self) -> str:
        return self._loop.activity if self._loop else "start"

    # --- the whole life ---

    async def execute(self) -> RunSummary:
        """Makes the run and returns its result.

        Raises:
            RunError: It could not go on, or was aborted; the record and summary.json say so too.
            StateStoreError: The store failed.
        """
        started = time.monotonic()
        self._git_commit = await git_commit()
        self.directory.mkdir(parents=True, exist_ok=True)
        values = self.recipe.model_dump(mode="json")
        write_atomically(
            self.directory / "config.yaml",
            yaml.safe_dump(values, sort_keys=False),
            is_private=values != without_passwords(values),
        )
        await enter_run(self._store, self.recipe, self.run_id, self.directory)
        journal = Journal(self._store, self.run_id, await self._store.next_epoch(self.run_id))
        # A client that drives the services raises the epoch, so writes about the run then carry
        # none.
        epoch = self._events.epoch = None if self._is_external else journal.epoch
        for role in unused_roles(self.recipe):
            self._observer.on_event(
                f"the recipe has a section {role}, which algorithm {self.recipe.algorithm.type!r} "
                "does not use"
            )
        writer = await self._open_writer()
        mesh = RunMesh(self._addresses, self._services, journal, self._observer)
        samples = SampleTaker(
            self._store, self.run_id, epoch, self._observer, self.recipe.run.samples
        )
        loop: RunLoop
        if self._algorithm is None:
            loop = ExternalLoop(self._store, self.run_id, self.wishes, self._events)
        else:
            loop = TrainingLoop(
                self.recipe,
                self._algorithm,
                mesh,
                journal,
                self._store,
                writer,
                self._observer,
                self.directory,
                wishes=self.wishes,
                events=self._events,
                samples=samples,
            )
        failure: BaseException | None = None
        try:
            with tracing.span(f"run {self.recipe.run.name}", run_id=self.run_id):
                await self._unless_ended(self._live(mesh, loop, journal, epoch))
        except BaseException as error:
            failure = error
            raise
        finally:
            await samples.close()
            summary = await self._conclude(failure, mesh, loop, epoch, writer, started)
        return summary

    async def _open_writer(self) -> MetricsWriter:
        """Opens the run's files, and starts the trackers of the recipe."""
        facts = RunFacts(
            run_id=self.run_id, name=self.recipe.run.name, directory=str(self.directory)
        )
        trackers = outside_trackers(
            self.recipe.trackers, self.directory / "logs", self._observer.on_event
        )
        config = without_passwords(self.recipe.model_dump(mode="json"))
        for tracker in trackers:
            await tracker.start(facts, config)
        return MetricsWriter(facts, self._store, trackers)

    async def _live(
        self, mesh: RunMesh, loop: RunLoop, journal: Journal, epoch: int | None
    ) -> None:
        """Meets, watches and initialises the services, then trains."""
        pulse = Pulse(
            self._store,
            self.run_id,
            epoch,
            self.wishes,
            self._events,
            activity=lambda: loop.activity,
            flow=lambda: loop.step_in_progress,
        )
        watcher = Watcher(
            list(mesh.connections.values()),
            self._store,
            self.run_id,
            self._watch_settings,
            on_lost=self.service_lost,
            on_devices=pulse.on_devices,
            beat=pulse.beat,
        )
        watching: asyncio.Task[None] | None = None
        started = time.monotonic()
        try:
            await mesh.meet(self._start_deadline_s)
            watching = asyncio.create_task(watcher.run())
            watching.add_done_callback(self._watcher_ended)
            self._loop = loop
            await mesh.initialize(self.recipe)
            services = {name: known.facts() for name, known in mesh.connections.items()}
            await self._store.update_run(self.run_id, epoch=epoch, services=services)
            loop.seconds["initialize"] = time.monotonic() - started
            await loop.run()
        finally:
            if watching is not None:
                watching.cancel()
                await asyncio.wait({watching})
                # Services that were not started for this run are kept for the next one.
                lasting = [
                    name
                    for name in self._services
                    # A service that refused this run may hold another one.
                    if self.recipe.address(name) is not None and name in mesh.facts
                ]
                if self._is_external and lasting:
                    # It is newer than the epoch of every driver, so all of them are fenced off.
                    journal.epoch = await self._store.next_epoch(self.run_id)
                await mesh.give_back(lasting, GIVE_BACK_DEADLINE_S)
            await mesh.close()

    def _watcher_ended(self, watching: asyncio.Task[None]) -> None:
        if watching.cancelled() or watching.exception() is None:
            return
        error: BaseException | None = watching.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        self._early_end.set(RunError(f"watching the services failed: {error}"))

    async def _unless_ended(self, work: Coroutine[Any, Any, None]) -> None:
        """Does the work, unless an early end comes first, e.g. by a lost service."""
        task = asyncio.create_task(work)
        ending = asyncio.create_task(self._early_end.wait())
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
            done, _ = await asyncio.wait({ending}, timeout=self._loss_grace_s)
            if done:
                return placed(ending.result(), error)
        if isinstance(error, RolemeshError):
            # Outside of a node: initialisation, checkpoint, export.
            return failed(error, self._activity)
        return error

    async def _conclude(
        self,
        failure: BaseException | None,
        mesh: RunMesh,
        loop: RunLoop,
        epoch: int | None,
        writer: MetricsWriter,
        started: float,
    ) -> RunSummary:
        """Writes how the run ended, as far as that still works.

        A failure in here is raised only if there was none before. Otherwise the first failure is
        reported: it may have been the same full disk or lost store.
        """
        if failure is None:
            is_done = loop.step == self.recipe.run.steps
            state = RunState.SUCCEEDED if is_done else RunState.STOPPED
        elif isinstance(failure, RunAbortedError | asyncio.CancelledError):
            state = RunState.STOPPED
        else:
            state = RunState.FAILED
        reason = "" if failure is None else str(failure) or type(failure).__name__
        first, last = mean_rewards(loop.records)
        roles = {role: known.capabilities.versions for role, known in mesh.connections.items()}
        is_after = loop.after is not None and loop.after.step == loop.step
        summary = RunSummary(
            run_id=self.run_id,
            name=self.recipe.run.name,
            state=state,
            failure=reason,
            seed=self.recipe.run.seed,
            steps=loop.step,
            num_steps=planned_steps(self.recipe),
            held_out_before=loop.before,
            held_out_after=loop.after if is_after else None,
            mean_reward_first_steps=first,
            mean_reward_last_steps=last,
            tokens=int(sum(record["tokens"] for record in loop.records)),
            seconds=time.monotonic() - started,
            seconds_by_phase=dict(loop.seconds),
            versions={"coordinator": coordinator_versions(), **roles},
            git_commit=self._git_commit,
            coordinator_traffic=traffic_totals(mesh.traffic),
            directory=self.directory,
            model_directory=loop.model_directory,
        )

        async def write_record() -> None:
            await end_run(self._store, self.run_id, state, reason, self._events, epoch)
            for connection in mesh.connections.values():
                await self._store.remove_service(connection.role, connection.address)

        async def write_files() -> None:
            try:
                writer.close(state)
            finally:
                summary.write()

        # Losses are reported before the run counts as ended.
        await writer.finish_trackers(state, TRACKER_DEADLINE_S if failure is None else QUICK_END_S)
        unwritten: StateStoreError | OSError | None = None
        # The record first: the store may be on another disk than the folder.
        for write in (write_record, write_files):
            try:
                await write()
            except (StateStoreError, OSError) as error:
                self._observer.on_event(f"the end of the run could not be recorded: {error}")
                unwritten = unwritten or error
        if failure is None and unwritten is not None:
            raise unwritten
        return summary
