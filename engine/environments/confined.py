"""A user's environment in a process of its own, within a sandbox, seen from the sampler."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

from rolemesh.engine.data.prompts import Prompt
from rolemesh.engine.environments.base import (
    Environment,
    EnvironmentFailedError,
    Observation,
    TurnEnd,
)
from rolemesh.engine.environments.line import Line
from rolemesh.engine.environments.threads import num_threads
from rolemesh.engine.granted.user_code import UserCodeError
from rolemesh.engine.sandbox.bounds import LOAD_TIMEOUT_S
from rolemesh.engine.sandbox.host import Sandbox
from rolemesh.engine.specs import PythonEnvironmentSpec

_MODULE = "rolemesh.engine.environments.worker"
_ASKS = ("reset", "step")


class EnvironmentProcess:
    """The process in which all instances of one class live. It ends when this object goes.

    It may be used from several threads at once, and so may its instances. Calls of different
    instances overlap: those of `async def` all of them, others in as many threads as the process
    has (`num_threads`), and further ones wait. A call's time begins when its turn has come.

    Example::

        environment = EnvironmentProcess(spec, sandbox).make()
        environment.reset(row)
        environment.step("7", "end_token")  # Observation(reward=1.0, done=True)
    """

    def __init__(
        self,
        spec: PythonEnvironmentSpec,
        sandbox: Sandbox,
        *,
        code: str | None = None,
        ports: Sequence[int] = (),
    ) -> None:
        """Starts it, and loads and tries the class.

        Args:
            spec: Which class, and its bounds.
            sandbox: Where it runs.
            code: Of the user, which the process sees; None: the class.
            ports: TCP ports that it may connect to, also without a network.

        Raises:
            UserCodeError: The class cannot be loaded, is no Environment, or does not take its
                config; or a path of `readable` is not there.
            EnvironmentFailedError: The system has no process or thread for it.
        """
        self._code, self._ports = code or spec.environment, ports
        self._class = self._code.rpartition(":")[2]
        self._numbers = itertools.count()
        self._dropped: deque[int] = deque()
        self._spec, self._sandbox = spec, sandbox
        self._making = threading.Lock()
        self._free_threads = threading.BoundedSemaphore(num_threads(spec.memory_mib))
        """Of the process: a call waits here rather than there, where its time would run."""
        self._owned: weakref.finalize[..., Any] | None = None
        """Ends the process that lives, when this object goes."""
        self._line = self._start()

    def _start(self) -> Line:
        """Starts the process, and has it load the class."""
        spec, sandbox = self._spec, self._sandbox
        try:
            view = sandbox.show(self._code, spec.readable, network=spec.network, ports=self._ports)
        except ValueError as error:
            raise UserCodeError(f"environment has {error}: correct it") from error
        assert view is not None
        try:
            line = Line(
                self._code,
                lambda: sandbox.start(_MODULE, view, spec.variables),
                view,
                max_output_bytes=spec.max_output_bytes,
            )
        except (OSError, RuntimeError) as error:
            view.close()
            raise EnvironmentFailedError(
                f"no process ({error}): free processes or memory"
            ) from error
        if self._owned is not None:
            self._owned.detach()
        self._owned = weakref.finalize(
            self, line.end, f"the process of {self._code!r} is not used any more"
        )
        order = {
            "spec": spec.model_dump(mode="json"),
            "memory_bytes": None if spec.memory_mib is None else spec.memory_mib << 20,
            "sandbox": sandbox.order(view),
        }
        try:
            line.ask(order, LOAD_TIMEOUT_S, purpose="its import", remedy="make that faster")
        except EnvironmentFailedError as error:
            line.end(str(error))
            raise UserCodeError(str(error)) from error
        return line

    def make(self) -> Environment:
        """A new instance, for one trajectory. One at a time; further ones wait.

        Raises:
            EnvironmentFailedError: It raised or went beyond a bound, or its process ended.
        """
        with self._making:
            if not self._line.is_open:
                # It ended in an earlier generation, which has failed.
                self._line = self._start()
            line, number = self._line, next(self._numbers)
            said = self.ask(line, {"number": number, "ask": "make"})
        told: Any = said.get("on_loop")
        on_loop = [ask for ask in _ASKS if isinstance(told, list) and ask in told]
        # Errors name the user's class.
        own: Environment = type(self._class, (_Confined,), {})(self, line, number, on_loop)
        stop: Any = said.get("stop")
        own.stop = stop if isinstance(stop, str) else tuple(stop)
        weakref.finalize(own, self._dropped.append, number)
        return own

    def ask(
        self, line: Line, message: dict[str, Any], *, is_on_loop: bool = False
    ) -> dict[str, Any]:
        """The answer of an instance.

        Args:
            line: To the process in which it lives, which may have ended.
            message: What it is asked.
            is_on_loop: Whether the call is a coroutine there.

        Raises:
            EnvironmentFailedError: It raised or went beyond a bound, or its process ended.
        """
        if is_on_loop:
            return self._asked(line, message, is_on_loop=True)
        with self._free_threads:
            return self._asked(line, message, is_on_loop=False)

    def _asked(self, line: Line, message: dict[str, Any], *, is_on_loop: bool) -> dict[str, Any]:
        return line.ask(
            {**message, "dropped": self._gone()},
            self._spec.timeout_s,
            purpose=f"a call of {message['ask']}",
            remedy="make it faster, or raise environment.timeout_s",
            ends_itself=is_on_loop,
        )

    def _gone(self) -> list[int]:
        """Instances that are not used any more. Each is told once, by one of the threads."""
        gone = []
        while True:
            try:
                gone.append(self._dropped.popleft())
            except IndexError:
                return gone


class _Confined(Environment):
    """One instance, which lives in another process."""

    def __init__(
        self, process: EnvironmentProcess, line: Line, number: int, on_loop: list[str]
    ) -> None:
        self._process = process
        self._line, self._number = line, number
        self._on_loop = on_loop
        self._one_at_a_time = threading.Lock()

    def _ask(self, ask: str, **given: Any) -> dict[str, Any]:
        message = {"number": self._number, "ask": ask, **given}
        with self._one_at_a_time:
            return self._process.ask(self._line, message, is_on_loop=ask in self._on_loop)

    def reset(self, row: Prompt) -> str | None:
        # Its caller checks that this is text, as of any environment.
        text: str | None = self._ask("reset", row=dataclasses.asdict(row)).get("text")
        return text

    def step(self, completion_text: str, end: TurnEnd = "end_token") -> Observation:
        said = self._ask("step", text=completion_text, end=end)
        # Its process runs a user's code, so what it says is checked as if it had come from there.
        return Observation(
            text=said.get("text", ""),
            messages=tuple(said.get("messages", ())),
            reward=said.get("reward", 0.0),
            done=bool(said.get("done")),
        )
