"""A user's `async def run(task, client)` as an environment, which lives in a process of its own."""

from __future__ import annotations

import inspect
import json
from typing import Any

from rolemesh.engine.data.prompts import Prompt
from rolemesh.engine.environments.base import Environment, Observation
from rolemesh.engine.user_code import UserCodeError, load_named


class RunEnvironment(Environment):
    """One trajectory: reset does nothing, and the one step is a call of the function."""

    def __init__(self, run: str) -> None:
        """Loads the function.

        Raises:
            UserCodeError: It cannot be loaded, or is no coroutine function of two arguments.
        """
        self._name = run
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
        """Calls the function with a client of the session."""
        from openai import AsyncOpenAI

        asked = json.loads(completion_text)
        async with AsyncOpenAI(
            base_url=asked["base_url"], api_key=asked["api_key"], max_retries=0, timeout=None
        ) as client:
            said = await self._run(asked["task"], client)
        return Observation(text=json.dumps(said), done=True)
