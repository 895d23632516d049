"""The long-lived coordinator: takes recipes, makes each a run in a process of its own, and ends.

All its state is in the store and in the folders of its runs. A later hub on the same data
therefore continues where this one ended, in whatever way it ended. If the store outlives the hub,
the runs do, too. A run whose process is gone without a word is started again from where it was.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from rolemesh.coordinator.commands.hub.client_recipes import ClientRecipes
from rolemesh.coordinator.commands.hub.run_process import RunProcess, start_train
from rolemesh.coordinator.commands.terminal.ending import EXIT_BAD_INPUT, EXIT_INTERRUPTED
from rolemesh.coordinator.dataflow.errors import RunError
from rolemesh.coordinator.recipe.loading import dump_recipe
from rolemesh.coordinator.recipe.sections.api_section import ApiSpec
from rolemesh.coordinator.recipe.sections.stores import RedisStoreSpec
from rolemesh.coordinator.run.reporting.events import EventLog
from rolemesh.coordinator.run.reporting.records import end_abandoned, enter_again, enter_run
from rolemesh.coordinator.run.saving.resume import holds_run
from rolemesh.coordinator.run.services.launch import LOG_LINE, last_lines
from rolemesh.coordinator.state.errors import (
    RunNotFoundError,
    StateStoreError,
    StoreUnavailableError,
)
from rolemesh.coordinator.state.files import write_atomically
from rolemesh.coordinator.state.store import RunRecord, RunState, StateStore
from rolemesh.engine.granted.grants import Grant
from rolemesh.rpc.errors import (
    CapacityError,
    ForbiddenError,
    InvalidRequestError,
    PreconditionError,
    UnavailableError,
)
from rolemesh.v1 import coordinator_pb2

logger = logging.getLogger(__name__)

CONSOLE_LOG = "console"
"""Log of a run: what its process printed."""

_REQUEST_FILE = "request.json"
_RECIPE_FILE = "recipe.yaml"
_PROCESS_FILE = "process.json"
_POLL_S = 0.5
_STORE_PAUSE_S = 5.0
"""Pause before a store that did not answer is asked again."""
_MAX_RUNS_LISTED = 100_000

MAX_RESTARTS = 3
"""How often a run is started again without a step made in between. One that dies each time would
otherwise do so without end."""

_ENDED_ON_PURPOSE = (0, EXIT_BAD_INPUT, EXIT_INTERRUPTED)
"""Exit codes of a run that would end in the same way again, or that a user ended."""

_GONE = "its process is gone"

_LAST_WORDS_S = 20.0
"""Longest wait for the process of a run that has ended, before the run is started again."""


def _kept_in(tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """A task that a set holds until it has ended, since the loop alone might lose it."""
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


class Hub:
    """Makes runs on one store. Owner: one asyncio loop on the main thread of its process.

    Example::

        async with open_store(RedisStoreSpec(url=url), data) as store:
            grant = Grant(folders=(data, Path(".models")))
            hub = Hub(store, data, outlives=True, max_runs=4, api=ApiSpec(), grant=grant)
            await hub.adopt()
            operations = StoreOperations(store, creator=hub)
    """

    def __init__(
        self,
        store: StateStore,
        directory: Path,
        *,
        outlives: bool,
        max_runs: int,
        api: ApiSpec,
        grant: Grant,
        password_file: Path | None = None,
    ) -> None:
        """Prepares; `adopt` finds the runs of an earlier hub.

        Args:
            store: A Redis or Valkey that other processes reach as well.
            directory: Folder of the coordinator, absolute; runs lie in its subfolder runs.
            outlives: Whether the store, and with it the runs, may outlive this process.
            max_runs: Most runs that go on at a time.
            api: Where the processes of its runs answer by themselves, and to whom.
            grant: What the recipes of clients may name.
            password_file: File with the store's password, absolute; None: it has none.
        """
        self._store = store
        self._directory = directory
        self._outlives = outlives
        self._max_runs = max_runs
        # Clients ask the hub, and need neither address.
        own = RedisStoreSpec(url=store.url, password_file=password_file)
        self._recipes = ClientRecipes(api=api, store=own, grant=grant)
        self._processes: dict[str, RunProcess] = {}
        """By run: those that go on, and those that are gone but whose runs may go on."""
        self._watches: set[asyncio.Task[None]] = set()
        self._creations: set[asyncio.Task[None]] = set()
        self._is_closing = False
        self._creating = asyncio.Lock()

    async def create_run(self, run_id: str, recipe: str, overrides: Sequence[str]) -> None:
        """Starts a run; see RunCreator."""
        # When the caller hangs up, no run may be left in the store without a process.
        creation = self._create_run(run_id, recipe, overrides)
        await asyncio.shield(_kept_in(self._creations, creation))

    async def _create_run(self, run_id: str, recipe: str, overrides: Sequence[str]) -> None:
        request = {"recipe": recipe, "overrides": list(overrides)}
        async with self._creating:
            if self._is_closing:
                raise UnavailableError("this coordinator is about to end")
            if await self._has_begun(run_id, request):
                return
            # In a thread, since a long recipe takes seconds to read.
            folder = self.folder(run_id)
            resolved = await asyncio.to_thread(
                self._recipes.read, recipe, overrides, os.environ, run_id, folder, resumes=False
            )
            self._check_capacity()
            (folder / "logs").mkdir(parents=True, exist_ok=True)
            # A recipe may hold a URL with a password, e.g. of a tracker.
            write_atomically(folder / _REQUEST_FILE, json.dumps(request), is_private=True)
            write_atomically(folder / _RECIPE_FILE, dump_recipe(resolved), is_private=True)
            await enter_run(self._store, resolved, run_id, folder)
            await self._spawn(run_id)

    def _check_capacity(self) -> None:
        if len(self._processes) >= self._max_runs:
            raise CapacityError(
                f"{len(self._processes)} runs go on, and this coordinator may have "
                f"{self._max_runs}: wait for one to end, stop one, or start the coordinator "
                "with a greater --max-runs",
                reason="TOO_MANY_RUNS",
                metadata={"max_runs": str(self._max_runs)},
            )

    async def resume_run(self, run_id: str, overrides: Sequence[str]) -> None:
        """Starts a run that has failed or was stopped again; see RunCreator."""
        # As with a new run.
        await asyncio.shield(_kept_in(self._creations, self._resume_run(run_id, overrides)))

    async def _resume_run(self, run_id: str, overrides: Sequence[str]) -> None:
        await self._until_ended(run_id)
        async with self._creating:
            if self._is_closing:
                raise UnavailableError("this coordinator is about to end")
            record = await self._store.get_run(run_id)
            self._check_is_ours(record)
            if not record.state.is_final:
                started = RunProcess.read(self._place(run_id))
                if started is None or started.overrides != tuple(overrides):
                    raise PreconditionError(
                        f"run {run_id!r} goes on: its recipe can be changed once it has ended",
                        reason="RUN_NOT_ENDED",
                        metadata={"run_id": run_id},
                    )
                return
            self._check_capacity()
            await self._start_again(record, overrides)

    async def _until_ended(self, run_id: str) -> None:
        """Returns when no process makes a run that has ended: it lets go of its services last."""
        waited_s = 0.0
        while run_id in self._processes and (await self._store.get_run(run_id)).state.is_final:
            if waited_s >= _LAST_WORDS_S:
                raise UnavailableError(
                    f"run {run_id!r} has ended, but its process has not yet: try again later",
                    reason="RUN_IS_ENDING",
                )
            await asyncio.sleep(_POLL_S)
            waited_s += _POLL_S

    def _check_is_ours(self, record: RunRecord) -> None:
        if not self._is_ours(record) or not (self.folder(record.run_id) / _RECIPE_FILE).is_file():
            raise PreconditionError(
                f"run {record.run_id!r} has its files in {record.directory}, and was not started "
                f"by this coordinator: use `rolemesh train --resume {record.directory}`",
                reason="RESUME_UNAVAILABLE",
                metadata={"run_id": record.run_id},
            )

    def _is_ours(self, record: RunRecord) -> bool:
        return Path(record.directory) == self.folder(record.run_id)

    async def _start_again(
        self, record: RunRecord, overrides: Sequence[str] = (), *, restarts: int = 0
    ) -> None:
        """Starts the process of a run that has none any more.

        Args:
            record: Of the run.
            overrides: Fields of its recipe to set besides.
            restarts: How often it was started again since its last step, this time included; 0
                when a user wants it.
        """
        run_id, folder = record.run_id, self.folder(record.run_id)
        resumes = holds_run(folder)
        text = await asyncio.to_thread((folder / _RECIPE_FILE).read_text)
        # Variables of the environment have had their effect on the recipe already.
        resolved = await asyncio.to_thread(
            self._recipes.read, text, overrides, {}, run_id, folder, resumes=resumes
        )
        write_atomically(folder / _RECIPE_FILE, dump_recipe(resolved), is_private=True)
        if not restarts or not resumes:
            await enter_again(self._store, resolved, run_id, folder)
        await self._spawn(
            run_id,
            resumes=resumes,
            step=record.step,
            restarts=restarts,
            overrides=tuple(overrides),
        )

    def folder(self, run_id: str) -> Path:
        """Folder of a run."""
        return self._directory / "runs" / run_id

    async def _has_begun(self, run_id: str, request: Mapping[str, object]) -> bool:
        """Whether this very run was created before, and got as far as a process."""
        try:
            record = await self._store.get_run(run_id)
        except RunNotFoundError:
            return False
        folder = self.folder(run_id)
        place = folder / _REQUEST_FILE
        if place.is_file() and json.loads(place.read_text()) == request:
            # When the store failed in between, a repeat has to begin the run.
            return record.state.is_final or (folder / _PROCESS_FILE).is_file()
        raise PreconditionError(
            f"run {run_id!r} exists already, with another recipe: choose another run id",
            reason="RUN_EXISTS",
            metadata={"run_id": run_id},
        )

    def _place(self, run_id: str) -> Path:
        return self.folder(run_id) / _PROCESS_FILE

    async def _spawn(self, run_id: str, *, resumes: bool = False, **facts: Any) -> None:
        """Starts the process of a run; the run ends if it cannot be started.

        Args:
            run_id: The run.
            resumes: Whether its folder holds it.
            facts: Further fields of its RunProcess.
        """
        try:
            child = start_train(
                run_id,
                self.folder(run_id),
                recipe=self.folder(run_id) / _RECIPE_FILE,
                log=self._log(run_id),
                resumes=resumes,
                outlives=self._outlives,
            )
        except OSError as error:
            await end_abandoned(self._store, run_id, RunError(f"no process: {error}"))
            raise
        process = RunProcess.of(child.pid, **facts)
        process.write(self._place(run_id))
        self._processes[run_id] = process
        logger.info("run %s is made by process %d", run_id, child.pid)
        self._watch(run_id, process, child)

    def _log(self, run_id: str) -> Path:
        return self.folder(run_id) / "logs" / f"{CONSOLE_LOG}.log"

    def _watch(
        self, run_id: str, process: RunProcess, child: subprocess.Popen[bytes] | None = None
    ) -> None:
        """Watches over a process of this or, without a child, of an earlier hub."""
        watch = _kept_in(self._watches, self._until_gone(run_id, process, child))
        watch.set_name(f"watch {run_id}")

    async def _until_gone(
        self, run_id: str, process: RunProcess, child: subprocess.Popen[bytes] | None
    ) -> None:
        """Waits for a run's process, and sees to the run if the process could not."""
        how, may_go_on = "has ended", True
        while process.is_alive if child is None else child.poll() is None:  # noqa: ASYNC110 - not every one is a child of ours
            await asyncio.sleep(_POLL_S)
        if child is not None:
            code = child.returncode
            name = signal.Signals(-code).name if code < 0 else ""
            how = f"was killed by {name}" if name else f"ended with exit code {code}"
            may_go_on = code not in _ENDED_ON_PURPOSE
        cause = f"its process (pid {process.pid}) {how}"
        logger.info("run %s: %s", run_id, cause)
        try:
            await self._see_to(run_id, cause, may_go_on=may_go_on)
        finally:
            if self._processes.get(run_id) is process:
                del self._processes[run_id]

    async def _see_to(self, run_id: str, cause: str, *, may_go_on: bool) -> None:
        """Starts a run whose process is gone again or ends it, once the store answers."""
        while True:
            try:
                async with self._creating:
                    await self._started_again_or_ended(run_id, cause, may_go_on=may_go_on)
                return
            except StateStoreError as error:
                logger.exception("what becomes of run %s could not be written down", run_id)
                # A store that outlives this process comes back. Its loss probably ended the run.
                if not (self._outlives and isinstance(error, StoreUnavailableError)):
                    return
            await asyncio.sleep(_STORE_PAUSE_S)

    async def _started_again_or_ended(self, run_id: str, cause: str, *, may_go_on: bool) -> None:
        record = await self._store.get_run(run_id)
        if record.state.is_final:
            # It has written its end itself.
            return
        before = RunProcess.read(self._place(run_id))
        is_further = before is None or before.step != record.step
        restarts = 0 if before is None or is_further else before.restarts
        if not may_go_on or self._is_closing or record.stop_requested:
            reason = cause
        elif restarts >= MAX_RESTARTS:
            reason = f"{cause}; it was started again {restarts} times without making a step"
        else:
            try:
                await self._tell_recovering(record, cause, "it is started again")
                await self._start_again(record, restarts=restarts + 1)
            except (InvalidRequestError, ForbiddenError, OSError) as error:
                reason = f"{cause}; it could not be started again: {error}"
            else:
                return
        await self._abandoned(run_id, reason)

    async def _tell_recovering(self, record: RunRecord, cause: str, next_: str) -> None:
        logger.info("run %s: %s: %s", record.run_id, cause, next_)
        told, events = f"{cause}; {next_}", EventLog(self._store, record.run_id)
        events.step = record.step
        if holds_run(self.folder(record.run_id)):
            is_new = record.state is not RunState.RECOVERING
            await self._store.update_run(
                record.run_id,
                state=RunState.RECOVERING,
                activity=f"recovering: {told}",
                recoveries=record.recoveries + is_new,
            )
            events.state(coordinator_pb2.RUN_STATE_RECOVERING, told)
        else:
            # It has not got as far as services, and starts anew.
            events.note(told)
        await events.flush()

    async def _abandoned(self, run_id: str, cause: str) -> None:
        """Ends a run whose process is gone, unless the run has written its end itself."""
        log = self._log(run_id)
        lines = [f"{LOG_LINE}{line}" for line in await asyncio.to_thread(last_lines, log)]
        said = "".join((f"the end of its log, {log}:", *lines)) if lines else "without a word"
        await end_abandoned(self._store, run_id, RunError(f"{cause}; {said}"))

    async def adopt(self) -> None:
        """Finds the runs of an earlier hub: watches those that go on, starts the others again.

        A run for which there is no room waits until another one has ended.

        Raises:
            StateStoreError: The store failed.
        """
        gone = []
        for record in await self._store.list_runs(_MAX_RUNS_LISTED):
            if record.state.is_final or not self._is_ours(record):
                continue
            process = RunProcess.read(self._place(record.run_id))
            if process is not None and process.is_alive:
                self._processes[record.run_id] = process
                logger.info("run %s goes on in process %d", record.run_id, process.pid)
                self._watch(record.run_id, process)
            else:
                gone.append(record)
        # The oldest first.
        for record in reversed(gone):
            if len(self._processes) < self._max_runs:
                async with self._creating:
                    await self._started_again_or_ended(record.run_id, _GONE, may_go_on=True)
                continue
            await self._tell_recovering(record, _GONE, "it waits until another run has ended")
            _kept_in(self._watches, self._when_there_is_room(record.run_id))

    async def _when_there_is_room(self, run_id: str) -> None:
        while len(self._processes) >= self._max_runs:
            await asyncio.sleep(_POLL_S)
            if self._is_closing:
                # The next hub finds the run.
                return
        await self._see_to(run_id, _GONE, may_go_on=True)

    def hurry(self) -> None:
        """Makes runs that are ending end at once."""
        if not self._outlives:
            self._terminate()

    def _terminate(self) -> None:
        """The first SIGTERM ends a run after its step, the second one at once."""
        for process in self._processes.values():
            if process.is_alive:
                os.kill(process.pid, signal.SIGTERM)

    async def close(self) -> None:
        """Ends the runs if the store ends with this process; otherwise leaves them running."""
        async with self._creating:
            self._is_closing = True
        if self._outlives:
            for watch in self._watches:
                watch.cancel()
        else:
            self._terminate()
        await asyncio.gather(*self._watches, return_exceptions=True)
