"""A user's `async def run(task, client)` as an environment, which lives in a process of its own."""

from __future__ import annotations

import inspect
import json
import sys
from contextvars import ContextVar
from typing import Any, TextIO

from rolemesh.engine.data.prompts import Prompt
from rolemesh.engine.environments.base import Environment, Observation
from rolemesh.engine.granted.user_code import UserCodeError, load_named
from rolemesh.engine.sessions.logs import AgentLog

LOG_QUESTION = json.dumps({"log": True})
"""A step that asks what the function has written, after it has ended or failed."""

_WRITING: ContextVar[AgentLog | None] = ContextVar("agent_log", default=None)
"""Log of the trajectory whose code runs: many share one process, and its loop."""


class RunEnvironment(Environment):
    """One trajectory: reset does nothing, and the one step is a call of the function."""

    def __init__(self, run: str, *, keeps_log: bool = False) -> None:
        """Loads the function.

        Args:
            run: Its name.
            keeps_log: Whether what it prints and logs is kept by trajectory, to be asked for. It
                takes the place of this process's sys.stdout and sys.stderr.

        Raises:
            UserCodeError: It cannot be loaded, or is no coroutine function of two arguments.
        """
        self._name = run
        self._log = AgentLog()
        if keeps_log:
            # Before the user's module is imported: a handler of logging keeps the stream that it
            # finds.
            _keep_by_trajectory()
        self._run: Any = load_named(run, "environment.run")
        if not inspect.iscoroutinefunction(self._run):
            raise UserCodeError(
                f"environment.run is {run!r}, which is no `async def`: declare it as "
                "`async def run(task, client)`"
            )
        # A client takes a second to import: once for the process, before its calls have a time.
        import openai  # noqa: F401

    async def reset(self, row: Prompt) -> str | None:
        """Nothing is to be said before the first turn."""
        return None

    async def step(self, completion_text: str, end: str = "end_token") -> Observation:
        """Calls the function with a client of the session, or answers LOG_QUESTION."""
        from openai import AsyncOpenAI

        asked = json.loads(completion_text)
        if "log" in asked:
            return Observation(text=self._log.text(), done=True)
        writes = _WRITING.set(self._log)
        try:
            async with AsyncOpenAI(
                base_url=asked["base_url"], api_key=asked["api_key"], max_retries=0, timeout=None
            ) as client:
                said = await self._run(asked["task"], client)
        finally:
            _WRITING.reset(writes)
        return Observation(text=json.dumps(said), done=True)


class _Kept:
    """A text stream that passes all on, and keeps what is written for the trajectory that writes.

    A task, and a thread of `asyncio.to_thread`, has the context of the code that began it, and so
    its log. What a child process or a library in C writes goes past it.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes a text."""
        log = _WRITING.get()
        if log is not None:
            log.take(text)
        return self._stream.write(text)

    def writelines(self, lines: Any) -> None:
        """Writes several."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _keep_by_trajectory() -> None:
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name)
        if not isinstance(stream, _Kept):
            setattr(sys, name, _Kept(stream))
