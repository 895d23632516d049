"""Agents of three kinds: programs, functions of Python, and servers that are asked over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
from abc import ABC, abstractmethod
from urllib.parse import urlsplit

import httpx

from rolemesh.engine.environments.base import (
    Environment,
    EnvironmentFailedError,
    Observation,
    observation_of,
    raised,
)
from rolemesh.engine.environments.confined import EnvironmentProcess
from rolemesh.engine.environments.loop import shared_loop
from rolemesh.engine.granted.outgoing_http import outgoing_client
from rolemesh.engine.granted.user_code import UserCodeError
from rolemesh.engine.sandbox.host import Sandbox
from rolemesh.engine.sessions.logs import AgentLog
from rolemesh.engine.sessions.programs import run_program
from rolemesh.engine.sessions.python_agent import LOG_QUESTION, RunEnvironment
from rolemesh.engine.sessions.results import AgentFailedError, AgentResult, AgentWork, result_of
from rolemesh.engine.specs import (
    AgentSpec,
    HttpAgentSpec,
    ProgramAgentSpec,
    PythonAgentSpec,
    PythonEnvironmentSpec,
)

MAX_ANSWER_BYTES = 1 << 20
"""Longest answer of a server of agents."""


class Agent(ABC):
    """Plays trajectories. Any thread may call `run`, many at once."""

    @abstractmethod
    def run(self, work: AgentWork, stopped: threading.Event) -> AgentResult:
        """Plays one trajectory to its end.

        Args:
            work: What it is told.
            stopped: When it is set nobody waits any more: the call ends soon, whatever it gives.

        Raises:
            AgentFailedError: It came to nothing.
        """

    def close(self) -> None:  # noqa: B027 - most have nothing to end
        """Ends what it keeps between trajectories."""


def make_agent(spec: AgentSpec, sandbox: Sandbox | None, url: str) -> Agent:
    """The agent of a recipe; a user's function is loaded here, not later.

    Args:
        spec: Which agent.
        sandbox: Where a user's code runs.
        url: Of the endpoint, which is all that the code may connect to.

    Raises:
        UserCodeError: The code cannot be loaded.
        ValueError: A field cannot be served here.
    """
    port = urlsplit(url).port
    assert port is not None
    if isinstance(spec, ProgramAgentSpec):
        return ProgramAgent(spec, sandbox, port)
    if isinstance(spec, PythonAgentSpec):
        return PythonAgent(spec, sandbox, port)
    return HttpAgent(spec)


class ProgramAgent(Agent):
    """A process for each trajectory."""

    def __init__(self, spec: ProgramAgentSpec, sandbox: Sandbox | None, port: int) -> None:
        """Takes the program; nothing starts yet."""
        self._spec = spec
        self._sandbox = sandbox or Sandbox(kind="none")
        self._port = port

    def run(self, work: AgentWork, stopped: threading.Event) -> AgentResult:
        """See `Agent.run`."""
        spec = self._spec
        who = "the program"
        last_line = run_program(spec, self._sandbox, self._port, work, stopped)
        said = None
        if last_line.startswith("{"):
            try:
                said = json.loads(last_line)
            except ValueError as error:
                raise AgentFailedError(
                    f"{who} printed {last_line[:200]!r} last, which is no JSON ({error}): print a "
                    "JSON object with reward, or another line"
                ) from error
        return result_of(said, who, work.log)


class PythonAgent(Agent):
    """A function, many calls of it in one process."""

    def __init__(self, spec: PythonAgentSpec, sandbox: Sandbox | None, port: int) -> None:
        """Starts the process and loads the function."""
        self._spec = spec
        self._process: EnvironmentProcess | None = None
        if sandbox is None or not sandbox.is_there:
            # In this process; its errors are told as from the other one.
            RunEnvironment(spec.run)
            return
        environment = PythonEnvironmentSpec(
            environment="rolemesh.engine.sessions.python_agent:RunEnvironment",
            config={"run": spec.run, "keeps_log": True},
            timeout_s=spec.timeout_s,
            memory_mib=spec.memory_mib,
            max_output_bytes=spec.max_output_bytes,
            variables=spec.variables,
            readable=spec.readable,
            network=spec.network,
        )
        self._process = EnvironmentProcess(environment, sandbox, code=spec.run, ports=(port,))

    def run(self, work: AgentWork, stopped: threading.Event) -> AgentResult:
        """See `Agent.run`."""
        spec = self._spec
        asked = json.dumps(
            {"task": work.task(), "base_url": work.base_url, "api_key": work.api_key}
        )
        try:
            if self._process is None:
                step = RunEnvironment(spec.run).step(asked)
                limited = asyncio.wait_for(step, spec.timeout_s)
                said = asyncio.run_coroutine_threadsafe(limited, shared_loop()).result()
            else:
                said = self._asked(self._process.make(), asked, work.log)
        except TimeoutError as error:
            raise AgentFailedError(
                f"{spec.run!r} took more than {spec.timeout_s:g} s: make it faster, or raise "
                "environment.timeout_s"
            ) from error
        except EnvironmentFailedError as error:
            raise AgentFailedError(str(error)) from error
        except Exception as error:  # a user's code raises what it likes
            raise AgentFailedError(f"{spec.run!r} raised {raised(error)}") from error
        return result_of(json.loads(said.text), f"{spec.run!r}", work.log)

    @staticmethod
    def _asked(one: Environment, asked: str, log: AgentLog) -> Observation:
        """What the function gives; the log gets what it wrote, also where it fails."""
        try:
            return observation_of(one, asked, "end_token")
        finally:
            # A process that has ended tells nothing more. What it wrote is in the service's log.
            with contextlib.suppress(EnvironmentFailedError):
                log.take(observation_of(one, LOG_QUESTION, "end_token").text)

    def close(self) -> None:
        """Ends the process."""
        self._process = None


class HttpAgent(Agent):
    """A server that is told of each trajectory, and answers when it is over."""

    def __init__(self, spec: HttpAgentSpec) -> None:
        """Prepares; opens no connection."""
        self._spec = spec
        self._token = None
        if spec.token_variable is not None:
            self._token = os.environ.get(spec.token_variable)
            if not self._token:
                raise UserCodeError(
                    f"environment.token_variable is {spec.token_variable!r}, which is not set in "
                    "the service's environment: set it, or leave token_variable out"
                )
        self._client = outgoing_client(
            spec.url, self._token, httpx.Limits(max_connections=spec.at_once)
        )

    def run(self, work: AgentWork, stopped: threading.Event) -> AgentResult:
        """See `Agent.run`."""
        future = asyncio.run_coroutine_threadsafe(self._ask(work), shared_loop())
        while True:
            try:
                return future.result(1.0)
            except TimeoutError:
                if future.done():
                    raise
                if stopped.is_set():
                    future.cancel()
                    raise AgentFailedError("the generation has ended") from None

    async def _ask(self, work: AgentWork) -> AgentResult:
        spec = self._spec
        message = {
            "task": work.task(),
            "base_url": work.base_url,
            "api_key": work.api_key,
            "model": work.model,
            "session": work.session_url,
        }
        try:
            async with (
                asyncio.timeout(spec.timeout_s),
                self._client.stream("POST", spec.url, json=message, timeout=None) as response,
            ):
                body = b""
                async for part in response.aiter_bytes():
                    body += part
                    if len(body) > MAX_ANSWER_BYTES:
                        raise AgentFailedError(
                            f"{spec.url} answered more than {MAX_ANSWER_BYTES} bytes"
                        )
        except TimeoutError as error:
            raise AgentFailedError(
                f"{spec.url} gave no answer within {spec.timeout_s:g} s: make the agent faster, or "
                "raise environment.timeout_s"
            ) from error
        except httpx.HTTPError as error:
            raise AgentFailedError(f"{spec.url} cannot be asked ({error!r}): start it") from error
        if response.status_code != httpx.codes.OK:
            work.log.take(body)
            raise AgentFailedError(
                f"{spec.url} answered with status {response.status_code}: {body[:300]!r}"
            )
        try:
            said = json.loads(body)
        except ValueError as error:
            raise AgentFailedError(
                f"{spec.url} answered {body[:200]!r}, which is no JSON"
            ) from error
        return result_of(said, spec.url, work.log)

    def close(self) -> None:
        """Closes its connections."""
        asyncio.run_coroutine_threadsafe(self._client.aclose(), shared_loop()).result(10.0)
