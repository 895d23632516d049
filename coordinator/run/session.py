"""One `rolemesh train`: store, services, run, in this order, and back again whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from rolemesh.coordinator.api.credentials import CLIENT_FILE
from rolemesh.coordinator.api.doors.doors import Doors, open_doors
from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.coordinator.dataflow.errors import RunAbortedError
from rolemesh.coordinator.dataflow.loop.collector import collect_seldom
from rolemesh.coordinator.dataflow.observer import RunObserver
from rolemesh.coordinator.recipe.algorithm.algorithms import ExternalSpec
from rolemesh.coordinator.recipe.roles.placement import REGISTERED
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.run.checks.footprint import footprint_of, free_bytes, gib
from rolemesh.coordinator.run.checks.planning import plan_step
from rolemesh.coordinator.run.checks.start_checks import check_start, services_in
from rolemesh.coordinator.run.conclusion import tell_of_kept_cuts
from rolemesh.coordinator.run.folders.earlier_run import put_back_where_refused
from rolemesh.coordinator.run.folders.ownership import COORDINATOR_FILE, held
from rolemesh.coordinator.run.folders.summary import RunSummary
from rolemesh.coordinator.run.reporting.events import EventLog
from rolemesh.coordinator.run.reporting.records import (
    SUMMARY_FILE,
    check_directory_is_free,
    clear_failed_start,
    end_abandoned,
    enter_again,
    enter_run,
    make_run_id,
)
from rolemesh.coordinator.run.saving.progress import RunProgress
from rolemesh.coordinator.run.saving.resume import RUN_FILE, check_changes, open_run, reached
from rolemesh.coordinator.run.services.commands import service_commands
from rolemesh.coordinator.run.services.identities import identities_of
from rolemesh.coordinator.run.services.launch import QUICK_STOP_GRACE_S, Launcher
from rolemesh.coordinator.run.services.lost_services import telling_of_another_start
from rolemesh.coordinator.run.services.registered import RegisteredServices
from rolemesh.coordinator.run.training_run import TrainingRun
from rolemesh.coordinator.state.errors import (
    RunExistsError,
    StaleEpochError,
    StateStoreError,
    StoreUnavailableError,
)
from rolemesh.coordinator.state.files import make_folder, write_atomically
from rolemesh.coordinator.state.opening import open_store
from rolemesh.coordinator.state.store import StateStore
from rolemesh.rpc import tracing
from rolemesh.rpc.together import together

_WATCH_GRACE_S = 1.0
"""How long the watches of the run may take to get its last event."""

_LOOK_S = 1.0
"""Pause between two looks for a wish to stop, while services start."""

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class InputError(ValueError):
    """An input of the user cannot be used. It is found before any process is started."""


class InterruptedEarlyError(Exception):
    """The user ended the session before the run had begun."""


class Session:
    """Runs a recipe from nothing to a model folder.

    Owner: one asyncio loop, on the process's main thread.
    """

    def __init__(
        self,
        recipe: Recipe,
        directory: Path,
        observer: RunObserver,
        *,
        run_id: str | None = None,
        resumes: bool = False,
        begins_anew: bool = False,
    ) -> None:
        """Checks everything that can be checked before the first process is started.

        Args:
            recipe: What to train, and how.
            directory: Folder of the run's files.
            observer: Observer that is told of the run's progress.
            run_id: Id of the run; None makes one.
            resumes: Whether the folder holds the run, which goes on from where it is.
            begins_anew: Whether the folder may hold another run, which `move_aside` moves before
                this one is executed.

        Raises:
            InputError: The folder holds a run (or, to resume, none that fits), a file that the
                recipe names or a package that a role needs is missing, or the coordinator would be
                open to others without a token.
        """
        self.recipe = recipe
        self.directory = directory.absolute()
        self.run_id = run_id or make_run_id(recipe.run.name)
        self._resumes = resumes
        self.is_interrupted = False
        """Whether a signal asked for an end."""
        self.tell_doors: Callable[[Doors], None] = self._tell_doors
        """Told where the run answers, once it does."""
        self._observer = observer
        self._run: TrainingRun | None = None
        self._task: asyncio.Task[RunSummary] | None = None
        self._is_ending = False
        try:
            services = services_in(recipe)
            self._own = [name for name, address in services.items() if address is None]
            self._addresses = {name: address for name, address in services.items() if address}
            self._registering = [n for n, address in services.items() if address == REGISTERED]
            if resumes:
                self._check_resumable()
            elif not begins_anew:
                check_directory_is_free(self.directory)
            check_start(recipe, self._own)
            outside = (*self._addresses, *self._registering)
            self._identities = identities_of(recipe, self._own, outside)
        except ValueError as error:
            raise InputError(str(error)) from error

    def _check_resumable(self) -> None:
        """Takes the id of the run in the folder; raises ValueError where it cannot go on."""
        found = open_run(self.directory)
        self.run_id = found.run_id
        for change in check_changes(found.recipe, self.recipe):
            self._observer.on_event(f"changed since the run began: {change}")

    async def execute(self) -> RunSummary:
        """Makes the run; afterwards no process of it is left.

        The first SIGINT, SIGTERM or SIGHUP ends it after the step in progress with everything
        saved, the second one at once. A signal that the process ignores stays ignored.

        Raises:
            InputError: The algorithm asks for something that the recipe does not have, the store
                cannot be used, or another run is being made in the folder.
            LaunchError: A service did not start.
            RunError: The run failed or was aborted, or has nothing whole to go on with.
            InterruptedEarlyError: A signal came before the run had begun.
        """
        collect_seldom()
        loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._execute())
        # The parent process may want a signal ignored, e.g. nohup or a shell's background job.
        heeded = [n for n in _STOP_SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]
        for number in heeded:
            loop.add_signal_handler(number, self._interrupt)
        try:
            return await self._task
        except asyncio.CancelledError:
            if self.is_interrupted:
                raise InterruptedEarlyError("ended before the run had begun") from None
            raise
        finally:
            for number in heeded:
                loop.remove_signal_handler(number)
            tell_of_kept_cuts(self._observer, self.run_id, self.directory)

    def _interrupt(self) -> None:
        if self._is_ending:
            # A second Ctrl-C must not interrupt the end: it would leave services behind.
            return
        self.is_interrupted = True
        if self._run is not None:
            self._run.request_stop()
        elif self._task is not None:
            self._is_ending = True
            self._task.cancel()

    async def _execute(self) -> RunSummary:
        try:
            await plan_step(self.recipe)
        except ValueError as error:
            raise InputError(str(error)) from error
        make_folder(self.directory)
        self._tell_of_disk()
        async with AsyncExitStack() as stack:
            try:
                stack.enter_context(held(self.directory))
            except ValueError as error:
                raise InputError(str(error)) from error
            stack.enter_context(self._traced())
            try:
                if self._resumes:
                    stack.enter_context(
                        put_back_where_refused(self.directory, lambda: self._has_begun)
                    )
                    # Until it ends again, the run has not ended.
                    (self.directory / SUMMARY_FILE).unlink(missing_ok=True)
                else:
                    # Another run may have used the folder since the first look.
                    check_directory_is_free(self.directory)
                    clear_failed_start(self.directory)
                    known = json.dumps({"run_id": self.run_id})
                    write_atomically(self.directory / RUN_FILE, known + "\n")
                store = await stack.enter_async_context(
                    open_store(
                        self.recipe.store, self.directory, on_restart=self._observer.on_event
                    )
                )
            except StoreUnavailableError as error:
                raise InputError(f"store.url: {error}") from error
            except ValueError as error:
                raise InputError(str(error)) from error
            try:
                await stack.enter_async_context(self._entered(store))
                await stack.enter_async_context(self._answering(store))
                # Here as well, before the doors close: watches then get the last event.
                await stack.enter_async_context(self._ended(store))
            except RunExistsError as error:
                raise InputError(f"run id: {error}") from error
            except ValueError as error:
                raise InputError(str(error)) from error
            resumed = await self._reached(store) if self._resumes else None
            commands = service_commands(self.recipe, self.directory, self._identities.services)
            launcher = await stack.enter_async_context(
                Launcher(
                    self._own,
                    commands,
                    self.directory / "logs",
                    telling_of_another_start(self.recipe, self._observer),
                )
            )
            stack.enter_context(self._handing_out())
            for name in (*self._own, *self._registering):
                self._observer.on_phase(name, "start", 0, 0)
            registered = self._registered(store)
            started = await _unless_stopped(self._started(launcher, registered), store, self.run_id)
            run = TrainingRun(
                self.recipe,
                directory=self.directory,
                addresses={**self._addresses, **started},
                store=store,
                observer=self._observer,
                run_id=self.run_id,
                restart=functools.partial(self._again, launcher, registered),
                resumed=resumed,
                identity=self._identities.coordinator,
                registered=registered,
            )
            self._run = run
            launcher.on_exit = lambda gone: run.service_lost(gone.role, gone.reason)
            try:
                return await run.execute()
            except RunAbortedError:
                launcher.close_grace_s = QUICK_STOP_GRACE_S
                raise
            finally:
                self._is_ending = True

    @property
    def _has_begun(self) -> bool:
        return self._run is not None and self._run.has_begun

    def _registered(self, store: StateStore) -> RegisteredServices | None:
        """Finds the services that register themselves; None where the recipe has none."""
        identity = self._identities.coordinator
        # The recipe's certificates, without which it has no such services.
        if not self._registering or identity is None:
            return None
        return RegisteredServices(store, identity.mesh, self.recipe)

    async def _started(
        self, launcher: Launcher, registered: RegisteredServices | None
    ) -> dict[str, str]:
        """Starts services and waits for those that register; gives the address of each."""
        waits = [launcher.start()]
        if registered is not None:
            names, wait_s = self._registering, self.recipe.run.recovery.wait_s
            self._observer.on_event(f"waiting for {', '.join(names)} to register")
            waits.append(registered.addresses(names, wait_s))
        started: dict[str, str] = {}
        for addresses in await together(waits):
            started |= addresses
        return started

    async def _again(
        self, launcher: Launcher, registered: RegisteredServices | None, service: str
    ) -> str:
        """Starts a service again, or waits for the one that takes its place."""
        if registered is None or service not in self._registering:
            return await launcher.restart(service)
        wait_s = self.recipe.run.recovery.wait_s
        return (await registered.addresses([service], wait_s))[service]

    @contextlib.contextmanager
    def _handing_out(self) -> Iterator[None]:
        """Keeps the identity of the run's client where AttachRun finds it."""
        client = self._identities.client
        if client is None or not isinstance(self.recipe.algorithm, ExternalSpec):
            yield
            return
        place = self.directory / CLIENT_FILE
        write_atomically(place, client.pem().decode(), is_private=True)
        try:
            yield
        finally:
            place.unlink(missing_ok=True)

    def _tell_of_disk(self) -> None:
        """Says what the run will take on disk, as far as its models can be read here."""
        if isinstance(self.recipe.algorithm, ExternalSpec):
            # Its client saves what it wants to.
            return
        found = footprint_of(self.recipe, services_in(self.recipe))
        if found.disk:
            free = free_bytes(self.directory)
            told = f"disk: {found.disk_in(self.directory)}; {gib(free)} are free"
            self._observer.on_event(told + (", which is too little" if free < found.disk else ""))

    @asynccontextmanager
    async def _entered(self, store: StateStore) -> AsyncIterator[None]:
        """Keeps the run in the store, also while its services start."""
        if self._resumes:
            await enter_again(store, self.recipe, self.run_id, self.directory)
        else:
            await enter_run(store, self.recipe, self.run_id, self.directory)
        async with self._ended(store):
            yield

    @asynccontextmanager
    async def _ended(self, store: StateStore) -> AsyncIterator[None]:
        """Makes sure that the record says how the run ended if the block fails."""
        try:
            yield
        except StaleEpochError:
            # Another coordinator has taken the run by now.
            raise
        except BaseException as error:
            # The store cannot be written. The error to report is the one that ended the run.
            with contextlib.suppress(StateStoreError):
                epoch = None if self._run is None else self._run.progress.epoch
                await end_abandoned(store, self.run_id, error, epoch=epoch)
            raise

    async def _reached(self, store: StateStore) -> RunProgress:
        """What the run of the folder has reached."""
        is_external = isinstance(self.recipe.algorithm, ExternalSpec)
        progress, where = await reached(store, self.run_id, self.directory, is_external=is_external)
        events = EventLog(store, self.run_id)
        events.resumed(progress.step, where)
        await events.flush()
        self._observer.on_event(f"resuming {self.run_id} from {where}")
        return progress

    def _traced(self) -> contextlib.AbstractContextManager[None]:
        """Sends traces until the block ends, if the recipe or the environment asks for them."""
        spec = self.recipe.tracing
        if spec is None and not tracing.is_configured(os.environ):
            return contextlib.nullcontext()
        loop = asyncio.get_running_loop()

        def tell(text: str) -> None:
            loop.call_soon_threadsafe(self._observer.on_event, text)

        return tracing.tracing_to(
            "rolemesh-coordinator",
            endpoint=None if spec is None else spec.endpoint,
            sample_ratio=None if spec is None else spec.sample_ratio,
            on_problem=tell,
        )

    @asynccontextmanager
    async def _answering(self, store: StateStore) -> AsyncIterator[None]:
        """Serves gRPC, REST and the dashboard, and writes their addresses into the run's folder."""
        operations, recipe = StoreOperations(store), self.recipe
        place = self.directory / COORDINATOR_FILE
        async with open_doors(
            operations, recipe.api, folder=self.directory, certificates=recipe.certificates
        ) as doors:
            write_atomically(place, json.dumps({**doors.facts(), "run_id": self.run_id}) + "\n")
            self.tell_doors(doors)
            try:
                yield
            finally:
                await operations.watches_end(_WATCH_GRACE_S)
                place.unlink(missing_ok=True)

    def _tell_doors(self, doors: Doors) -> None:
        # What observers are told goes into logs.
        self._observer.on_event(doors.told(to_person=False))


async def _unless_stopped(
    starting: Coroutine[Any, Any, dict[str, str]], store: StateStore, run_id: str
) -> dict[str, str]:
    """Returns the addresses of services that start, unless a wish to stop comes first.

    Raises:
        RunAbortedError: A wish to stop came first.
    """
    task = asyncio.create_task(starting)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=_LOOK_S)
            if not task.done() and (await store.get_run(run_id)).stop_requested:
                raise RunAbortedError("stopped before its services had started")
        return task.result()
    finally:
        task.cancel()
        await asyncio.wait({task})
