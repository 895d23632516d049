"""An outside tracker as the run sees it: a queue that never waits, and a process behind it.

The packages of trackers print, install exit handlers, wait for servers and hold Python's lock: in a
process of their own they can do all that without the run noticing.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rolemesh.coordinator.recipe.sections.trackers import TrackerSpec
from rolemesh.coordinator.state.child_environment import without_own_secrets
from rolemesh.coordinator.state.server.bound_process import bound
from rolemesh.coordinator.trackers.tracker import RunFacts
from rolemesh.engine.specs.urls import masked_text

QUEUE_STEPS = 1_000
"""Steps that wait for a slow tracker; later ones are dropped while it is full."""

_TERMINATE_GRACE_S = 1.0
"""Between SIGTERM and SIGKILL to a tracker that does not end."""


class OutsideTracker:
    """One tracker of the recipe. Owner: the coordinator's loop.

    Nothing here raises because of the tracker. What it could not keep is told as events: the first
    problem once, and the number of lost steps at the end.

    Example::

        tracker = OutsideTracker(spec, "wandb", log, observer.on_event)
        await tracker.start(facts, config)
        tracker.log(1, {"reward/mean": 0.25})
        await tracker.finish("succeeded", deadline_s=15.0)
    """

    def __init__(
        self, spec: TrackerSpec, name: str, log: Path, on_event: Callable[[str], None]
    ) -> None:
        """Prepares; `start` starts the process.

        Args:
            spec: The recipe's section.
            name: For people, e.g. "wandb".
            log: File that gets what the tracker's package prints.
            on_event: Is told of problems.
        """
        self._spec = spec
        self._name = name
        self._log = log
        self._on_event = on_event
        self._lines: asyncio.Queue[bytes | None] = asyncio.Queue(QUEUE_STEPS)
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._has_problem = False
        self._num_given = 0
        self._num_kept = 0

    async def start(self, run: RunFacts, config: Mapping[str, Any]) -> None:
        """Starts the process; does not wait for the tracker."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *bound(sys.executable, "-m", "rolemesh.coordinator.trackers.child"),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log,
                    # Neither the current directory nor a script's may shadow a package: wandb and
                    # mlflow leave folders of their own names behind.
                    env={
                        **without_own_secrets(os.environ),
                        "PYTHONSAFEPATH": "1",
                        "PYTHONUNBUFFERED": "1",
                    },
                    # Ctrl-C reaches a whole process group; the run decides when the tracker ends.
                    start_new_session=True,
                )
            except OSError as error:
                self._problem(f"its process cannot be started ({error})")
                return
        first = {"spec": self._spec.model_dump(mode="json"), "run": asdict(run), "config": config}
        self._put(first)
        self._tasks = [asyncio.create_task(self._write()), asyncio.create_task(self._read())]

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Hands a step on, or drops it where the tracker is too far behind. Never waits."""
        self._num_given += 1
        if self._process is not None and not self._lines.full():
            self._put({"step": step, "scalars": dict(scalars)})

    async def finish(self, state: str, deadline_s: float) -> None:
        """Lets the tracker finish, and ends its process in any case.

        Args:
            state: How the run ended.
            deadline_s: Longest wait for the tracker, in seconds.
        """
        process = self._process
        if process is None:
            return
        try:
            async with asyncio.timeout(deadline_s):
                await self._lines.put(_line({"state": state}))
                await self._lines.put(None)
                await asyncio.wait(self._tasks)
                await process.wait()
        except TimeoutError:
            self._problem(f"it had not finished {deadline_s:g} s after the run's end")
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await _end(process)
        lost = self._num_given - self._num_kept
        if lost:
            self._on_event(f"tracker {self._name} lost {lost} of {self._num_given} steps")

    def _put(self, message: Mapping[str, Any]) -> None:
        self._lines.put_nowait(_line(message))

    async def _write(self) -> None:
        """Passes lines on as fast as the tracker takes them, until the last one."""
        assert self._process is not None
        assert self._process.stdin is not None
        pipe = self._process.stdin
        try:
            while (line := await self._lines.get()) is not None:
                pipe.write(line)
                await pipe.drain()
            pipe.close()
        except ConnectionError:
            # The process has ended; the reader says why. A full queue would hold up the run's end.
            while await self._lines.get() is not None:
                continue

    async def _read(self) -> None:
        """Counts what was kept, until the process ends."""
        assert self._process is not None
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            answer = json.loads(line)
            if "error" in answer:
                self._problem(answer["error"])
            elif answer["of"] == "log":
                self._num_kept += 1
        code = await self._process.wait()
        if code != 0:
            self._problem(f"its process ended with exit code {code}")

    def _problem(self, text: str) -> None:
        if not self._has_problem:
            self._has_problem = True
            self._on_event(
                f"tracker {self._name} failed, and the run goes on: "
                f"{masked_text(text)}; its log is {self._log}"
            )


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ends a process that has not ended by itself, with those that it has started."""
    if process.returncode is not None:
        return
    # It leads a group of its own, which has that number for as long as one of them lives.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), _TERMINATE_GRACE_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def outside_trackers(
    specs: Sequence[TrackerSpec], logs: Path, on_event: Callable[[str], None]
) -> tuple[OutsideTracker, ...]:
    """The trackers of a recipe, not started yet; each has a log tracker-<name>.log of its own."""
    types = [spec.type for spec in specs]
    made = []
    for number, spec in enumerate(specs):
        name: str = spec.type
        if types.count(spec.type) > 1:
            name = f"{name}-{types[:number].count(spec.type)}"
        made.append(OutsideTracker(spec, name, logs / f"tracker-{name}.log", on_event))
    return tuple(made)
