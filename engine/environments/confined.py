"""A user's environment in a process of its own, within a sandbox, seen from the sampler."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import signal
import socket
import subprocess
import threading
import time
import weakref
from typing import IO, Any

from rolemesh.engine.data.prompts import Prompt
from rolemesh.engine.environments.base import (
    Environment,
    EnvironmentFailedError,
    Observation,
    TurnEnd,
)
from rolemesh.engine.sandbox import frames
from rolemesh.engine.sandbox.bounds import LOAD_TIMEOUT_S, Output
from rolemesh.engine.sandbox.host import MAY_BE_SANDBOX, Sandbox
from rolemesh.engine.sandbox.view import View
from rolemesh.engine.specs import PythonEnvironmentSpec
from rolemesh.engine.user_code import UserCodeError

_MODULE = "rolemesh.engine.environments.worker"
_MOST_READ_BYTES = 1 << 16
_LAST_WORDS_S = 0.2


class EnvironmentProcess:
    """The process in which all instances of one class live. Owner: the thread that made it.

    The kernel ends the process with that thread, and it ends when this object goes.

    Example::

        environment = EnvironmentProcess(spec, sandbox).make()
        environment.reset(row)
        environment.step("7", "end_token")  # Observation(reward=1.0, done=True)
    """

    def __init__(self, spec: PythonEnvironmentSpec, sandbox: Sandbox) -> None:
        """Starts it, and loads and tries the class.

        Raises:
            UserCodeError: The class cannot be loaded, is no Environment, or does not take its
                config; or a path of `readable` is not there.
        """
        self._class = spec.environment.rpartition(":")[2]
        self._numbers = itertools.count()
        self._dropped: list[int] = []
        self._spec, self._sandbox = spec, sandbox
        self._start()

    def _start(self) -> None:
        """Starts the process, and has it load the class."""
        spec = self._spec
        try:
            view = self._sandbox.show(spec.environment, spec.readable, network=spec.network)
        except ValueError as error:
            raise UserCodeError(f"environment has {error}: correct it") from error
        assert view is not None
        try:
            process, self._connection = self._sandbox.start(_MODULE, view, spec.variables)
        except OSError as error:
            view.close()
            raise EnvironmentFailedError(
                f"no process ({error}): free processes or memory"
            ) from error
        self._end = weakref.finalize(self, _end, process, self._connection, view)
        assert process.stdout is not None
        self._printed = Output(self._class, spec.max_output_bytes)
        self._log = threading.Thread(
            target=_log, args=(self._printed, process.stdout, self._connection), daemon=True
        )
        self._log.start()
        order = {
            "spec": spec.model_dump(mode="json"),
            "memory_bytes": None if spec.memory_mib is None else spec.memory_mib << 20,
            "sandbox": self._sandbox.order(view),
        }
        try:
            self._exchange(order, LOAD_TIMEOUT_S, "its import", "make that faster")
        except EnvironmentFailedError as error:
            self._end()
            raise UserCodeError(str(error)) from error

    def make(self) -> Environment:
        """A new instance, for one trajectory."""
        if not self._end.alive:
            # It ended in an earlier generation, which has failed.
            self._start()
        number = next(self._numbers)
        stop: Any = self.ask(number, "make").get("stop")
        # Errors name the user's class.
        own: Environment = type(self._class, (_Confined,), {})(self, number)
        own.stop = stop if isinstance(stop, str) else tuple(stop)
        weakref.finalize(own, self._dropped.append, number)
        return own

    def ask(self, number: int, ask: str, **given: Any) -> dict[str, Any]:
        """The answer of an instance.

        Raises:
            EnvironmentFailedError: It raised or went beyond a bound, or its process ended.
        """
        dropped = [self._dropped.pop() for _ in range(len(self._dropped))]
        message = {"number": number, "ask": ask, "dropped": dropped, **given}
        remedy = "make it faster, or raise environment.timeout_s"
        return self._exchange(message, self._spec.timeout_s, f"a call of {ask}", remedy)

    def _exchange(
        self, message: dict[str, Any], timeout_s: float, purpose: str, remedy: str
    ) -> dict[str, Any]:
        """Sends a message and waits for the answer. A process that gives none is ended."""
        name = self._spec.environment
        self._printed.begin_call()
        deadline = time.monotonic() + timeout_s
        try:
            self._connection.settimeout(timeout_s)
            # The time-out is one of the whole frame here.
            self._connection.sendall(frames.encode(message, frames.MAX_CALL_BYTES))
            answer = frames.read(self._connection, frames.MAX_ANSWER_BYTES, deadline=deadline)
            if answer is None:
                raise ConnectionError("its process has ended")
        except TimeoutError as error:
            self._end()
            raise EnvironmentFailedError(
                f"{name!r} gave no answer within {timeout_s:g} s for {purpose}, and its process "
                f"was ended: {remedy}"
            ) from error
        except (OSError, ValueError) as error:
            self._end()
            # Its last output may not be read yet. A process that left the group may hold the pipe.
            self._log.join(_LAST_WORDS_S)
            if self._printed.is_too_much:
                raise EnvironmentFailedError(
                    f"{name!r} printed more than {self._spec.max_output_bytes} bytes in one call, "
                    "and its process was ended: print less, or raise environment.max_output_bytes"
                ) from error
            printed = self._printed.last_words
            raise EnvironmentFailedError(
                f"the process of {name!r} has ended ({error}): it may have crashed, or used more "
                "memory than environment.memory_mib allows"
                + (f". It printed last:\n{printed}" if printed else "")
            ) from error
        if answer.get("is_spent"):
            self._end()
            raise EnvironmentFailedError(
                f"{answer.get('error')}: {name!r} wanted more memory than environment.memory_mib "
                "allows, and its process was ended: use less, or raise it"
            )
        if "error" in answer:
            hint = f" ({MAY_BE_SANDBOX})" if answer.get("of_system") else ""
            raise EnvironmentFailedError(f"{answer['error']}{hint}")
        return answer


class _Confined(Environment):
    """One instance, which lives in another process."""

    def __init__(self, process: EnvironmentProcess, number: int) -> None:
        self._process = process
        self._number = number

    def reset(self, row: Prompt) -> str | None:
        # Its caller checks that this is text, as of any environment.
        text: str | None = self._process.ask(
            self._number, "reset", row=dataclasses.asdict(row)
        ).get("text")
        return text

    def step(self, completion_text: str, end: TurnEnd = "end_token") -> Observation:
        said = self._process.ask(self._number, "step", text=completion_text, end=end)
        # Its process runs a user's code, so what it says is checked as if it had come from there.
        return Observation(
            text=said.get("text", ""),
            messages=tuple(said.get("messages", ())),
            reward=said.get("reward", 0.0),
            done=bool(said.get("done")),
        )


def _end(process: subprocess.Popen[bytes], connection: socket.socket, view: View) -> None:
    connection.close()
    # It has not been waited for, so its number cannot belong to another group.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    view.close()


def _log(printed: Output, pipe: IO[bytes], connection: socket.socket) -> None:
    """Logs what the process prints. When that is too much, its owner waits for no answer."""
    with pipe:
        while part := os.read(pipe.fileno(), _MOST_READ_BYTES):
            printed.take(part)
            if printed.is_too_much:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                return
        printed.end()
