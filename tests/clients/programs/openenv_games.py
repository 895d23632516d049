"""Two environments of OpenEnv: one hears what the policy says, one offers it a tool by MCP."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field

START_S = 30.0

TURNS = 3


class Said(Action):
    text: str


class Heard(Observation):
    question: str


class Letters(Environment):
    """Gives a tenth of a point for each letter e, in three turns."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Heard:
        self._state = State(episode_id=episode_id)
        return Heard(question="Tell me about bees.")

    def step(self, action: Said, timeout_s: float | None = None, **_: Any) -> Heard:
        self._state.step_count += 1
        return Heard(
            question=f"More, please. You have said {self._state.step_count}.",
            reward=action.text.count("e") / 10,
            done=self._state.step_count == TURNS,
        )

    @property
    def state(self) -> State:
        return self._state


class Purse(MCPEnvironment):
    """Its tool puts coins into a purse; the reward is what is in it."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self._coins = 0
        server = FastMCP("purse")

        @server.tool
        def put(coins: Annotated[int, Field(ge=1, le=9)]) -> str:
            """Puts coins into the purse."""
            self._coins += 1
            self._last = coins
            return f"The purse was opened {self._coins} times, last for {coins} coins."

        super().__init__(server)
        self._state = State()

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, **_: Any
    ) -> Observation:
        self._coins = 0
        return Observation(metadata={"question": "Put 3 coins into the purse."})

    def _step_impl(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
        return Observation(reward=float(self._coins))

    @property
    def state(self) -> State:
        return State(step_count=self._coins)


def app_of(environment: type[Environment]) -> FastAPI:
    actions, observations = (
        (Said, Heard) if environment is Letters else (CallToolAction, CallToolObservation)
    )
    return create_fastapi_app(environment, actions, observations, max_concurrent_envs=4)


@contextlib.contextmanager
def serving(app: Any) -> Iterator[str]:
    """The address of an app, until the end of the block."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        until = time.monotonic() + START_S
        while not server.started and time.monotonic() < until:
            time.sleep(0.02)
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(START_S)
