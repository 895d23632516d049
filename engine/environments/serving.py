"""The instances of a user's environment in their process, and the calls that are made of them.

Each call has a number, with which its answer comes. Many are worked on at once: in threads, or on
the event loop where a class declares `reset` or `step` as `async def`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import socket
import threading
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rolemesh.engine.data.prompts import Prompt
from rolemesh.engine.environments.base import (
    Environment,
    Observation,
    observation_of,
    observation_on_loop,
    opening_of,
    opening_on_loop,
    raised,
)
from rolemesh.engine.environments.factory import EnvironmentMaker, environment_maker
from rolemesh.engine.environments.loop import shared_loop
from rolemesh.engine.environments.threads import Threads, num_threads, spare_address_space
from rolemesh.engine.granted.user_code import UserCodeError
from rolemesh.engine.sandbox import frames
from rolemesh.engine.sandbox.inside import is_of_system
from rolemesh.engine.specs import PythonEnvironmentSpec


def serve(connection: socket.socket, order: Mapping[str, Any]) -> int:
    """Serves one sampler until the other end closes.

    Args:
        connection: To the sampler.
        order: The first message, which names the class.

    Returns:
        Exit code of the process.
    """
    spare_address_space()
    spec = PythonEnvironmentSpec.model_validate(order["spec"])
    try:
        make = environment_maker(spec)
    except UserCodeError as error:
        found = {"error": str(error), "of_system": is_of_system(error)}
        connection.sendall(_frame(order, found))
        return 1
    _Calls(connection, make, spec).serve(order)
    return 0


@dataclass(frozen=True, slots=True)
class _Instance:
    environment: Environment
    on_loop: frozenset[str]
    """Which of its calls are coroutines."""


class _Calls:
    """The instances, and the calls in flight. Calls of one instance come one after another."""

    def __init__(
        self, connection: socket.socket, make: EnvironmentMaker, spec: PythonEnvironmentSpec
    ) -> None:
        self._connection = connection
        self._make = make
        self._timeout_s = spec.timeout_s
        self._instances: dict[int, _Instance] = {}
        self._sending = threading.Lock()
        self._threads = Threads(num_threads(spec.memory_mib))

    def serve(self, order: Mapping[str, Any]) -> None:
        """Answers the first message and then all others, in whatever order calls end."""
        self._send(_frame(order, {}))
        while (call := frames.read(self._connection, frames.MAX_CALL_BYTES)) is not None:
            for number in call["dropped"]:
                self._instances.pop(number, None)
            self._begin(call)

    def _begin(self, call: Mapping[str, Any]) -> None:
        instance = self._instances.get(call["number"])
        if instance is not None and call["ask"] in instance.on_loop:
            asyncio.run_coroutine_threadsafe(self._run_on_loop(call), shared_loop())
        else:
            self._threads.run(lambda: self._run(call))

    def _run(self, call: Mapping[str, Any]) -> None:
        with _ending_if_it_fails():
            try:
                frame = _frame(call, self._said(call))
            except BaseException as error:  # of the user's code, SystemExit too
                frame = _frame(call, _failed(error))
            # Nothing here holds the instance any more: its trajectory may end with this answer.
            self._send(frame)

    async def _run_on_loop(self, call: Mapping[str, Any]) -> None:
        with _ending_if_it_fails():
            limit = asyncio.timeout(self._timeout_s)
            try:
                async with limit:
                    said = await self._said_on_loop(call)
                # It may have caught its cancellation and gone on.
                frame = _frame(call, {"is_late": True} if limit.expired() else said)
            except BaseException as error:  # of the user's code, SystemExit too
                answer = {"is_late": True} if limit.expired() else _failed(error)
                frame = _frame(call, answer)
            self._send(frame)

    def _said(self, call: Mapping[str, Any]) -> dict[str, Any]:
        number = call["number"]
        if call["ask"] == "make":
            environment = self._make()
            asks = {"reset": environment.reset, "step": environment.step}
            on_loop = [ask for ask, it in asks.items() if inspect.iscoroutinefunction(it)]
            self._instances[number] = _Instance(environment, frozenset(on_loop))
            return {"stop": environment.stop, "on_loop": on_loop}
        environment = self._instances[number].environment
        if call["ask"] == "reset":
            return {"text": opening_of(environment, Prompt(**call["row"]))}
        return _facts(observation_of(environment, call["text"], call["end"]))

    async def _said_on_loop(self, call: Mapping[str, Any]) -> dict[str, Any]:
        environment = self._instances[call["number"]].environment
        if call["ask"] == "reset":
            return {"text": await opening_on_loop(environment, Prompt(**call["row"]))}
        return _facts(await observation_on_loop(environment, call["text"], call["end"]))

    def _send(self, frame: bytes) -> None:
        with self._sending:
            self._connection.sendall(frame)


def _facts(said: Observation) -> dict[str, Any]:
    return {
        "text": said.text,
        "messages": [dict(message) for message in said.messages],
        # As the service reads them: numbers of libraries are no JSON.
        "reward": float(said.reward),
        "done": bool(said.done),
    }


def _failed(error: BaseException) -> dict[str, Any]:
    return {
        "error": raised(error),
        "of_system": is_of_system(error),
        "is_spent": isinstance(error, MemoryError),
    }


def _frame(call: Mapping[str, Any], answer: Mapping[str, Any]) -> bytes:
    return frames.encode({**answer, "call": call["call"]}, frames.MAX_ANSWER_BYTES)


@contextlib.contextmanager
def _ending_if_it_fails() -> Iterator[None]:
    """A call without an answer must not be waited for: the process ends, and says why last."""
    try:
        yield
    except BaseException:
        traceback.print_exc()
        os._exit(1)
