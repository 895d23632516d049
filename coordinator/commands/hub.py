"""The long-lived coordinator: takes recipes, makes each a run in a process of its own, and ends.

All its state is in the store and in the folders of its runs. A later hub on the same data
therefore continues where this one ended, in whatever way it ended. If the store outlives the hub,
the runs do, too.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from rolemesh.coordinator.dataflow.errors import RunError
from rolemesh.coordinator.dataflow.observer import QuietObserver
from rolemesh.coordinator.recipe.algorithms import CustomSpec
from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.loading import (
    ENVIRONMENT_PREFIX,
    SERVICE_PREFIX,
    dump_recipe,
    read_recipe,
)
from rolemesh.coordinator.recipe.schema import ApiSpec, Recipe, RedisStoreSpec
from rolemesh.coordinator.run.launch import last_lines
from rolemesh.coordinator.run.records import end_abandoned, enter_run
from rolemesh.coordinator.run.session import InputError, Session
from rolemesh.coordinator.state import bound_process
from rolemesh.coordinator.state.files import write_atomically
from rolemesh.coordinator.state.store import (
    RunNotFoundError,
    StateStore,
    StateStoreError,
    StoreUnavailableError,
)
from rolemesh.rpc.errors import (
    CapacityError,
    InvalidRequestError,
    PreconditionError,
    UnavailableError,
)

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


@dataclass(frozen=True, kw_only=True, slots=True)
class _RunProcess:
    """The process of a run. The time of creation distinguishes it from a later one with its pid."""

    pid: int
    created_at: float

    @classmethod
    def of(cls, pid: int) -> _RunProcess | None:
        """The process with that pid; None when there is none, or only its exit code is left."""
        try:
            found = psutil.Process(pid)
            if found.status() == psutil.STATUS_ZOMBIE:
                return None
            return cls(pid=pid, created_at=found.create_time())
        except psutil.NoSuchProcess:
            return None

    @property
    def is_alive(self) -> bool:
        """Whether it runs still."""
        return _RunProcess.of(self.pid) == self


class Hub:
    """Makes runs on one store. Owner: one asyncio loop on the main thread of its process.

    Example::

        async with open_store(RedisStoreSpec(url=url), data) as store:
            hub = Hub(store, data, outlives=True, max_runs=4, token_file=None)
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
        token_file: Path | None,
    ) -> None:
        """Prepares; `adopt` finds the runs of an earlier hub.

        Args:
            store: A Redis or Valkey that other processes reach as well.
            directory: Folder of the coordinator, absolute; runs lie in its subfolder runs.
            outlives: Whether the store, and with it the runs, may outlive this process.
            max_runs: Most runs that go on at a time.
            token_file: File with the token of this coordinator, which is that of its runs, too.
        """
        self._store = store
        self._directory = directory
        self._outlives = outlives
        self._max_runs = max_runs
        self._token_file = token_file
        self._processes: dict[str, _RunProcess] = {}
        self._watches: set[asyncio.Task[None]] = set()
        self._creations: set[asyncio.Task[None]] = set()
        self._is_closing = False
        self._creating = asyncio.Lock()

    async def create_run(self, run_id: str, recipe: str, overrides: Sequence[str]) -> None:
        """Starts a run; see RunCreator."""
        creation = asyncio.create_task(self._create_run(run_id, recipe, overrides))
        self._creations.add(creation)
        creation.add_done_callback(self._creations.discard)
        # When the caller hangs up, no run may be left in the store without a process.
        await asyncio.shield(creation)

    async def _create_run(self, run_id: str, recipe: str, overrides: Sequence[str]) -> None:
        request = {"recipe": recipe, "overrides": list(overrides)}
        async with self._creating:
            if self._is_closing:
                raise UnavailableError("this coordinator is about to end")
            if await self._has_begun(run_id, request):
                return
            # In a thread, since a long recipe takes seconds to read.
            resolved = await asyncio.to_thread(self._resolved, run_id, recipe, overrides)
            if len(self._processes) >= self._max_runs:
                raise CapacityError(
                    f"{len(self._processes)} runs go on, and this coordinator may have "
                    f"{self._max_runs}: wait for one to end, stop one, or start the coordinator "
                    "with a greater --max-runs",
                    reason="TOO_MANY_RUNS",
                    metadata={"max_runs": str(self._max_runs)},
                )
            folder = self.folder(run_id)
            (folder / "logs").mkdir(parents=True, exist_ok=True)
            # The URL of a store may hold its password.
            write_atomically(folder / _REQUEST_FILE, json.dumps(request), is_private=True)
            write_atomically(folder / _RECIPE_FILE, dump_recipe(resolved), is_private=True)
            await enter_run(self._store, resolved, run_id, folder)
            try:
                self._spawn(run_id)
            except OSError as error:
                await end_abandoned(self._store, run_id, RunError(f"no process: {error}"))
                raise

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

    def _resolved(self, run_id: str, text: str, overrides: Sequence[str]) -> Recipe:
        """The recipe that the run's process gets, checked as far as it can be checked here."""
        try:
            recipe = read_recipe(text, "recipe", overrides=overrides, environment=os.environ)
            # The run's own interface and store: clients ask the hub, and need neither address.
            api = ApiSpec(http_port=None, token_file=self._token_file)
            store = RedisStoreSpec(url=self._store.url)
            recipe = recipe.model_copy(update={"api": api, "store": store})
            if not isinstance(recipe.algorithm, CustomSpec):
                # Only the run's own process may run the code of a custom algorithm.
                Session(recipe, self.folder(run_id), QuietObserver(), run_id=run_id)
        except (RecipeError, InputError) as error:
            raise InvalidRequestError(str(error), reason="RECIPE_INVALID") from error
        return recipe

    def _spawn(self, run_id: str) -> None:
        folder = self.folder(run_id)
        program = [sys.executable, "-m", "rolemesh.coordinator.commands.cli"]
        flags = {"--out": str(folder), "--run-id": run_id}
        words = [word for flag, value in flags.items() for word in (flag, value)]
        command = [*program, "train", str(folder / _RECIPE_FILE), *words]
        if not self._outlives:
            # The run cannot go on without its store: the kernel signals it when this process ends.
            wrapper = [sys.executable, "-I", "-S", str(Path(bound_process.__file__))]
            command = [*wrapper, str(os.getpid()), *command]
        with self._log(run_id).open("ab") as stream:
            # Not a subprocess of asyncio, which kills its children when this process ends normally.
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env=_environment(os.environ),
                # Ctrl-C in a terminal signals the whole group, but only this process may decide.
                start_new_session=True,
            )
        process = _RunProcess.of(child.pid)
        if process is not None:
            facts = {"pid": process.pid, "created_at": process.created_at}
            write_atomically(folder / _PROCESS_FILE, json.dumps(facts))
            self._processes[run_id] = process
        logger.info("run %s is made by process %d", run_id, child.pid)
        self._watch(run_id, child)

    def _log(self, run_id: str) -> Path:
        return self.folder(run_id) / "logs" / f"{CONSOLE_LOG}.log"

    def _watch(self, run_id: str, child: subprocess.Popen[bytes] | None) -> None:
        task = asyncio.create_task(self._until_gone(run_id, child), name=f"watch {run_id}")
        self._watches.add(task)
        task.add_done_callback(self._watches.discard)

    async def _until_gone(self, run_id: str, child: subprocess.Popen[bytes] | None) -> None:
        """Waits for a run's process, and writes the run's end if the process could not."""
        how = "has ended"
        while self._goes_on(run_id, child):  # noqa: ASYNC110 - not every one is a child of ours
            await asyncio.sleep(_POLL_S)
        if child is not None:
            code = child.returncode
            name = signal.Signals(-code).name if code < 0 else ""
            how = f"was killed by {name}" if name else f"ended with exit code {code}"
        process = self._processes.pop(run_id, None)
        pid = "" if process is None else f" (pid {process.pid})"
        logger.info("run %s: its process%s %s", run_id, pid, how)
        while True:
            try:
                await self._abandoned(run_id, f"its process{pid} {how}")
                return
            except StateStoreError as error:
                logger.exception("that run %s has ended could not be written down", run_id)
                # A store that outlives this process comes back. Its loss probably ended the run.
                if not (self._outlives and isinstance(error, StoreUnavailableError)):
                    return
            await asyncio.sleep(_STORE_PAUSE_S)

    def _goes_on(self, run_id: str, child: subprocess.Popen[bytes] | None) -> bool:
        if child is not None:
            return child.poll() is None
        # The process is a child of an earlier coordinator, not of this one.
        return self._processes[run_id].is_alive

    async def _abandoned(self, run_id: str, cause: str) -> None:
        """Ends a run whose process is gone, unless the run has written its end itself."""
        log = self._log(run_id)
        lines = [f"  | {line}" for line in await asyncio.to_thread(last_lines, log)]
        said = "\n".join((f"the end of its log, {log}:", *lines)) if lines else "without a word"
        await end_abandoned(self._store, run_id, RunError(f"{cause}; {said}"))

    async def adopt(self) -> None:
        """Finds the runs of an earlier hub: watches those that go on, and ends the others.

        Raises:
            StateStoreError: The store failed.
        """
        for record in await self._store.list_runs(_MAX_RUNS_LISTED):
            is_ours = Path(record.directory) == self.folder(record.run_id)
            if record.state.is_final or not is_ours:
                continue
            place = self.folder(record.run_id) / _PROCESS_FILE
            process = _RunProcess(**json.loads(place.read_text())) if place.is_file() else None
            if process is not None and process.is_alive:
                self._processes[record.run_id] = process
                logger.info("run %s goes on in process %d", record.run_id, process.pid)
                self._watch(record.run_id, None)
            else:
                await self._abandoned(record.run_id, "its process is gone")

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


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment of a run's process, without variables that set fields of a recipe.

    Those have had their effect on the recipe already.
    """
    fields = [
        name
        for name in environment
        if name.startswith(ENVIRONMENT_PREFIX)
        and "__" in name
        and not name.startswith(SERVICE_PREFIX)
    ]
    kept = {name: value for name, value in environment.items() if name not in fields}
    # The current directory must not shadow a package.
    return {**kept, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
