"""A run from outside: it is started, stopped, told of lost services, recovered, and concluded.

Every failure that ends it ends in one error with one message. In every case the run's record and
summary.json say how the run ended.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path

import yaml

from rolemesh.coordinator.algorithms.registry import algorithm_of, roles_in, unused_roles
from rolemesh.coordinator.dataflow.calls.connection import OpenChannel, open_watched
from rolemesh.coordinator.dataflow.errors import (
    NodeFailedError,
    RunAbortedError,
    ServiceLostError,
)
from rolemesh.coordinator.dataflow.observer import QuietObserver, RunObserver
from rolemesh.coordinator.recipe.algorithm.algorithms import ExternalSpec
from rolemesh.coordinator.recipe.algorithm.rates import schedule_length
from rolemesh.coordinator.recipe.hub.hf_names import named_values
from rolemesh.coordinator.recipe.role_names import role_of
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.run.attempts.attempt import Attempt
from rolemesh.coordinator.run.attempts.last_checkpoint import save_last
from rolemesh.coordinator.run.attempts.recoveries import Recoveries
from rolemesh.coordinator.run.attempts.recovery import RecoveryBudget, cause_of, told_epoch, told_of
from rolemesh.coordinator.run.attempts.replacing import Replacements
from rolemesh.coordinator.run.conclusion import Conclusion
from rolemesh.coordinator.run.folders.summary import RunSummary, git_commit
from rolemesh.coordinator.run.parts import RunParts
from rolemesh.coordinator.run.reporting.early_end import EarlyEnd
from rolemesh.coordinator.run.reporting.events import EventLog, NotingObserver, Recovered
from rolemesh.coordinator.run.reporting.records import (
    check_directory_is_free,
    enter_run,
    make_run_id,
)
from rolemesh.coordinator.run.reporting.wishes import Wishes
from rolemesh.coordinator.run.results.metrics import MetricsWriter
from rolemesh.coordinator.run.saving.checkpoints import NoWholeCheckpointError
from rolemesh.coordinator.run.saving.progress import RunProgress
from rolemesh.coordinator.run.saving.resume import reached
from rolemesh.coordinator.run.services.launch import START_DEADLINE_S
from rolemesh.coordinator.run.services.lost_services import LostServices, Restart
from rolemesh.coordinator.run.services.registered import RegisteredServices
from rolemesh.coordinator.run.services.watcher import WatchSettings
from rolemesh.coordinator.run.steps.health import StepUndoneError
from rolemesh.coordinator.run.steps.training import TrainingLoop
from rolemesh.coordinator.run.tuning.tuning import RetunedError, RunTuning
from rolemesh.coordinator.state.errors import StaleEpochError, StateStoreError
from rolemesh.coordinator.state.files import make_folder, write_atomically
from rolemesh.coordinator.state.store import StateStore
from rolemesh.coordinator.trackers.outside import outside_trackers
from rolemesh.coordinator.trackers.tracker import RunFacts
from rolemesh.engine.specs.urls import without_passwords
from rolemesh.rpc import tracing
from rolemesh.rpc.channel import ChannelTraffic
from rolemesh.rpc.errors import DeadlineError
from rolemesh.rpc.members.identity import Identity

LOSS_GRACE_S = 6.0
"""When a service does not answer a call, the launcher has this long to report the cause.

The agent of a service of several ranks ends the others first, which takes a few seconds.
"""


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
        restart: Restart | None = None,
        resumed: RunProgress | None = None,
        identity: Identity | None = None,
        open_channel: OpenChannel = open_watched,
        registered: RegisteredServices | None = None,
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
            restart: Starts a service again that was started for the run; None: others do that.
            resumed: What the run in the folder has reached, to go on from there; None: it begins.
            identity: Of the coordinator; None where the services speak in clear.
            open_channel: Opens a channel to a service.
            registered: Finds the services of roles that may join and leave; None where no role has
                such services.

        Raises:
            ValueError: A role has no address, or the folder holds a run already.
        """
        self.recipe = recipe
        self.run_id = run_id or make_run_id(recipe.run.name)
        self.directory = directory.absolute()
        is_external = isinstance(recipe.algorithm, ExternalSpec)
        self._algorithm = None if is_external else algorithm_of(recipe)
        self._services = [name for role in roles_in(recipe) for name in recipe.services_of(role)]
        for name in self._services:
            if name not in addresses and not recipe.changes(role_of(name)):
                raise ValueError(
                    f"services.{name}.address: no address for the role; give one, or let the "
                    "launcher start it"
                )
        if resumed is None:
            check_directory_is_free(self.directory)
        self._store = store
        self._identity = identity
        self._open_channel = open_channel
        self._registered = registered
        self._changing = [name for name in self._services if recipe.changes(role_of(name))]
        """Services that may join and leave."""
        self._events = EventLog(store, self.run_id)
        self._observer = NotingObserver(observer or QuietObserver(), self._events)
        self.wishes = Wishes(store, self.run_id, self._events, self._observer)
        """Wishes of users while the run goes on."""
        self._watch_settings = watch or WatchSettings()
        self._loss_grace_s = loss_grace_s
        self._lost = LostServices(recipe, addresses, restart, self._observer, start_deadline_s)
        self._is_resumed = resumed is not None
        self.progress = resumed or RunProgress()
        """What the run has reached."""
        self._budget = RecoveryBudget(recipe.run.recovery)
        self._attempt: Attempt | None = None
        self._replacements: Replacements | None = None
        """Of the attempt in progress, once it has begun."""
        self._begun_by: Attempt | None = None
        """The last attempt that had all services where the run was."""
        self._told_epoch = 0
        """The highest epoch by which a service has refused this run, which the store never gave."""
        self._aborted = EarlyEnd()
        self._is_ending = False
        """Whether this process was told to end, by a signal."""
        self._recoveries = Recoveries(store, self.run_id, self._observer, self._events)

    @property
    def has_begun(self) -> bool:
        """Whether all services were where the run is, so that this process could add to it."""
        return self._begun_by is not None

    # --- wishes and news from outside ---

    def request_stop(self) -> None:
        """Ends the run after the step in progress, with everything saved; a repeat aborts it.

        If a service is lost meanwhile, or the run recovers from a loss, it ends at once: it can be
        resumed.
        """
        self._is_ending = True
        is_recovering = self._recoveries.is_under_way or (
            self._replacements is not None and self._replacements.are_under_way
        )
        if self.wishes.is_stop_wanted or is_recovering:
            self.abort()
        else:
            self.wishes.stop("; ask again to abort at once")

    def abort(self) -> None:
        """Ends the run at once; what was saved before stays."""
        activity = self._attempt.activity if self._attempt else "start"
        self._aborted.set(
            RunAbortedError(f"aborted during {activity}; steps made before: {self.progress.step}")
        )

    def service_lost(self, service: str, reason: str) -> None:
        """Replaces a service that is gone, or ends the attempt in progress.

        Args:
            service: Its name.
            reason: For people, with rank, process and cause, e.g. "actor rank 0 (pid 123) was
                killed by signal 9; its log ends with: ...".
        """
        if self._attempt is not None and self._others_go_on(self._attempt, service, reason):
            return
        self._lost.note(service, reason)
        # A run that is to end waits for no new process.
        replacements = None if self._is_ending else self._replacements
        if replacements is not None and replacements.take(service, reason):
            return
        if self._attempt is not None:
            self._attempt.lost(service, reason)

    def _others_go_on(self, attempt: Attempt, service: str, reason: str) -> bool:
        """Lets a service go that has died, where the run can do without it."""
        if attempt.changing is None:
            return False
        if attempt.changing.has_left(service):
            return True
        error = ServiceLostError(service, reason, "")
        if not attempt.changing.can_spare(service):
            return False
        if self._budget.pause_s(error, self.progress.step, replaced=service) is None:
            return False
        attempt.changing.leave(service, told_of(error))
        self._recoveries.went_on(Recovered(step=self.progress.step, cause=told_of(error)))
        return True

    # --- the whole life ---

    async def execute(self) -> RunSummary:
        """Makes the run and returns its result.

        Raises:
            RunError: It could not go on, or was aborted; the record and summary.json say so too.
            StateStoreError: The store failed.
        """
        commit = await git_commit()
        make_folder(self.directory)
        values = named_values(self.recipe)
        write_atomically(
            self.directory / "config.yaml",
            yaml.safe_dump(values, sort_keys=False),
            is_private=values != without_passwords(values),
        )
        if self._is_resumed:
            await self._take_over()
        else:
            await enter_run(self._store, self.recipe, self.run_id, self.directory)
        if self.recipe.plan is not None:
            self._observer.on_event(f"planned: {self.recipe.plan.told}")
        for role in unused_roles(self.recipe):
            self._observer.on_event(
                f"the recipe has a section {role}, which algorithm {self.recipe.algorithm.type!r} "
                "does not use"
            )
        for role in roles_in(self.recipe):
            length = schedule_length(self.recipe.sent_section(role))
            if length is not None:
                self._observer.on_event(
                    f"the learning rate of the {role} falls until its optimizer step {length}"
                )
        parts = RunParts(
            recipe=self.recipe,
            run_id=self.run_id,
            directory=self.directory,
            store=self._store,
            observer=self._observer,
            events=self._events,
            wishes=self.wishes,
            writer=await self._open_writer(),
            services=self._services,
            algorithm=self._algorithm,
            progress=self.progress,
            traffic=ChannelTraffic(),
            identity=self._identity,
            watch=self._watch_settings,
            loss_grace_s=self._loss_grace_s,
            open_channel=self._open_channel,
            registered=self._registered if self._changing else None,
            tuning=self._tuning(),
        )
        conclusion = Conclusion(parts, commit)
        attempt = await self._new_attempt(parts)
        failure: BaseException | None = None
        try:
            with tracing.span(f"run {self.recipe.run.name}", run_id=self.run_id):
                await self._aborted.cuts_short(self._until_made(parts, attempt))
        except BaseException as error:
            failure = error
            raise
        finally:
            attempt = self._attempt or attempt
            await self._end_replacements()
            await self._end(parts, attempt, failure)
            summary = await conclusion.write(failure, attempt, self._recoveries.made)
        return summary

    def _tuning(self) -> RunTuning | None:
        """What tunes the run, where its recipe asks for that."""
        if self.recipe.run.tuning is None:
            return None
        return RunTuning(self.recipe, self.progress, self.directory, self._observer)

    async def _take_over(self) -> None:
        """Fences off the coordinator before, and reads what that one has added until now."""
        # A store that has lost the run would begin anew, below the epoch that services know.
        epoch = await self._store.next_epoch(self.run_id, at_least=self.progress.epoch + 1)
        self.progress, _ = await reached(
            self._store, self.run_id, self.directory, is_external=self._algorithm is None
        )
        self.progress.epoch = epoch

    async def _open_writer(self) -> MetricsWriter:
        """Opens the run's files, and starts the trackers of the recipe."""
        facts = RunFacts(
            run_id=self.run_id, name=self.recipe.run.name, directory=str(self.directory)
        )
        trackers = outside_trackers(
            self.recipe.trackers, self.directory / "logs", self._observer.on_event
        )
        config = without_passwords(named_values(self.recipe))
        for tracker in trackers:
            await tracker.start(facts, config)
        writer = MetricsWriter(facts, self._store, trackers)
        if self._is_resumed:
            writer.epoch = self.progress.epoch
            before = self.progress.before
            await writer.resume(
                self.progress.step,
                self.progress.records,
                None if before is None else before.scalars(),
            )
        return writer

    async def _check_leads(self, attempt: Attempt) -> None:
        """Raises StaleEpochError where another coordinator has taken the run over."""
        await self._store.update_run(self.run_id, epoch=attempt.epoch)

    async def _new_attempt(self, parts: RunParts) -> Attempt:
        # Without `led`, it would fence off a coordinator that came while this one recovered.
        epoch = await self._store.next_epoch(
            self.run_id, at_least=self._told_epoch + 1, led=self.progress.epoch or None
        )
        self.progress.epoch = epoch
        if parts.tuning is not None:
            parts = replace(parts, recipe=parts.tuning.recipe)
        there = [name for name in self._services if name in self._lost.addresses]
        parts = replace(parts, services=there)
        self._attempt = Attempt(parts, epoch, self._lost.addresses)
        # What was lost since the services were started.
        for service, reason in self._lost.names.items():
            self._attempt.lost(service, reason)
        return self._attempt

    async def _until_made(self, parts: RunParts, attempt: Attempt) -> None:
        """Makes attempts until the run is made, or a failure is final."""
        is_first = True
        while True:
            try:
                if not is_first:
                    await self._lost.start()
                    await self._find_changing()
                    attempt = await self._new_attempt(parts)
                deadlines_s = self._lost.deadlines_s(
                    self._services, is_first=is_first and not self._is_resumed
                )
                is_first = False
                await attempt.make(deadlines_s, self.service_lost, self._begun)
                return
            except (StepUndoneError, RetunedError):
                lost = {**self._lost.names, **await self._end_replacements()}
                if lost:
                    await self._recover(ServiceLostError(*lost.popitem()), attempt)
                else:
                    await attempt.mesh.close()
            except Exception as error:
                await self._end_replacements()
                if not isinstance(error, StateStoreError):
                    # Whatever it looks like, the reason may be that another one leads by now.
                    await self._check_leads(attempt)
                if self._is_ending:
                    # A whole mesh is being ended: its services need not come back.
                    raise RunAbortedError(
                        f"stopped after {self.progress.step} steps, in the middle of the next one: "
                        f"{told_of(error)}; `rolemesh train --resume {self.directory}` goes on"
                    ) from error
                pause_s = None
                if isinstance(attempt.loop, TrainingLoop):
                    is_return = self._begun_by not in (None, attempt)
                    pause_s = self._budget.pause_s(error, self.progress.step, is_return=is_return)
                    if await self._gave_up_trial(parts, attempt, error):
                        # However it looks, the settings that were tried may be the reason.
                        pause_s = pause_s or 0.0
                if pause_s is None:
                    raise
                await self._failed(error, attempt)
                await asyncio.sleep(pause_s)

    async def _find_changing(self) -> None:
        """Finds which services are there of those that may join and leave.

        Raises:
            LaunchError: Too few have come.
        """
        if self._registered is not None and self._changing:
            wait_s = self.recipe.run.recovery.wait_s
            self._lost.found(await self._registered.addresses(self._changing, wait_s))

    async def _gave_up_trial(self, parts: RunParts, attempt: Attempt, error: Exception) -> bool:
        """Goes back to the best settings where others were tried; returns whether they were."""
        if parts.tuning is None or isinstance(error, StateStoreError):
            return False
        return await parts.tuning.gave_up(attempt.journal, told_of(error))

    async def _failed(self, error: Exception, attempt: Attempt) -> None:
        """Says that the run recovers, and notes which service has to be started again."""
        self._told_epoch = max(self._told_epoch, told_epoch(error))
        if isinstance(error, ServiceLostError):
            for service, cause in {error.role: error.cause, **error.others}.items():
                self._lost.note(service, cause)
        elif isinstance(error, NodeFailedError) and isinstance(cause_of(error), DeadlineError):
            # Its compute thread hangs, or is too slow to be of use.
            self._lost.note(error.node.rpartition(".")[0], told_of(error))
        await self._recover(error, attempt)

    async def _recover(self, error: Exception, attempt: Attempt) -> None:
        """Lets the attempt go, and says that the run recovers."""
        await attempt.mesh.close()
        await self._recoveries.begin(error, self.progress.step, self._lost.told(), attempt.epoch)

    async def _end_replacements(self) -> dict[str, str]:
        """Gives up the replacements in progress; returns their causes by service."""
        replacements, self._replacements = self._replacements, None
        return {} if replacements is None else await replacements.close()

    def _begun(self, attempt: Attempt) -> None:
        """Told that all services are where the run is, so that a recovery has come to its end."""
        self._begun_by = attempt
        self._lost.new.clear()
        self._replacements = Replacements(
            attempt, self._budget, self._lost, self._recoveries.replaced
        )
        self._recoveries.end(self.progress.step, attempt.mesh.fresh)

    async def _end(self, parts: RunParts, attempt: Attempt, failure: BaseException | None) -> None:
        """Saves what can be saved after a failure, and lets the services go.

        What of this fails is told, and the rest is done.
        """
        loop = attempt.loop

        async def save() -> None:
            # A signal ends it, like all before it.
            await self._aborted.cuts_short(save_last(attempt.parts, attempt, self._lost))

        todo: list[Callable[[], Awaitable[None]]] = [attempt.give_back]
        if failure is not None and isinstance(loop, TrainingLoop):
            saves_nothing = (
                asyncio.CancelledError | RunAbortedError | StaleEpochError | NoWholeCheckpointError
            )
            if not isinstance(failure, saves_nothing):
                todo.insert(0, save)
            todo.insert(0, functools.partial(loop.told.tell, is_whole=False))
        for part in todo:
            try:
                await part()
            except (RunAbortedError, StateStoreError, OSError) as error:
                self._observer.on_event(f"the end of the run is not whole: {error}")
                if failure is None:
                    raise
