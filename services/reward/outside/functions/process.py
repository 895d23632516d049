"""One worker process of a reward function, seen from the service."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from rolemesh.engine.sandbox import frames
from rolemesh.engine.sandbox.bounds import LOAD_TIMEOUT_S, Output
from rolemesh.engine.sandbox.bubblewrap import SIGNALLED
from rolemesh.engine.sandbox.host import MAY_BE_SANDBOX, Sandbox
from rolemesh.engine.sandbox.view import View
from rolemesh.engine.specs import PythonRewardSpec
from rolemesh.services.reward.outside import parts
from rolemesh.services.reward.outside.base import (
    Judgement,
    OutsideRewardError,
    RewardTimeoutError,
)

_EXIT_GRACE_S = 1.0
"""Wait for a process that closed its connection: its exit code says more about the cause."""

_EXIT_POLL_S = 0.02
_LAST_WORDS_S = 0.2
_MODULE = "rolemesh.services.reward.outside.functions.worker"


_MESSED = "the function must leave the file descriptors of its process alone"


class FunctionFailedError(OutsideRewardError):
    """The function gave no rewards. The text says why, with a traceback if there is one."""

    def __init__(self, function: str, *, found: str, remedy: str, traceback: str = "") -> None:
        """Takes the base's arguments; `traceback` is text of the user's own frames."""
        super().__init__(
            f"python:{function}", expected="one number a completion", found=found, remedy=remedy
        )
        if traceback:
            self.args = (f"{self}\n{traceback}",)


@dataclass(frozen=True, slots=True)
class Loaded:
    """How a function that was imported is called."""

    form: str
    """"trl", "openrlhf" or "verl"."""
    takes_images: bool
    """Whether it has a parameter `images`."""


class FunctionProcess:
    """A process with the function loaded, which makes one call at a time.

    Owner: the loop that started it. The thread of that loop must outlive the process, since the
    kernel kills the process when the thread ends. If a failed call leaves the state of the process
    in doubt, the process is ended, and the caller needs a new one.
    """

    def __init__(self, spec: PythonRewardSpec, sandbox: Sandbox) -> None:
        """Takes the function's name, form, rights and limits, and what confines it."""
        self._spec = spec
        self._function = spec.function
        self._cpu_s = spec.timeout_s if spec.cpu_s is None else spec.cpu_s
        """Most seconds of processor time of one call, all threads together."""
        self._sandbox = sandbox
        self._view: View | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._output: asyncio.Task[None] | None = None
        self._printed = Output(spec.function, spec.max_output_bytes)
        self._calls = 0

    @property
    def is_open(self) -> bool:
        """Whether it has been started and `end` has not been called."""
        return self._process is not None

    @property
    def is_alive(self) -> bool:
        """Whether it takes calls: it is open, and has not ended by itself."""
        return self._process is not None and not _has_ended(self._process.pid)

    @property
    def pid(self) -> int:
        """Process id; the process must be alive."""
        assert self._process is not None
        return self._process.pid

    async def start(self) -> Loaded:
        """Starts the process and imports the function.

        Raises:
            FunctionFailedError: It cannot be imported or called.
        """
        spec = self._spec
        try:
            self._view = await asyncio.to_thread(
                self._sandbox.show, self._function, spec.readable, network=spec.network
            )
        except ValueError as error:
            raise self._failed(str(error), "correct it") from error
        try:
            ours, printed = self._spawn()
        except BaseException:
            await self._close_view()
            raise
        self._output = asyncio.create_task(self._read_output(printed))
        try:
            self._reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        except BaseException:
            ours.close()
            await self.end()
            raise
        order = {
            "function": self._function,
            "form": spec.form,
            "memory_bytes": None if spec.memory_mib is None else spec.memory_mib << 20,
            "sandbox": None if self._view is None else self._sandbox.order(self._view),
        }
        answer = await self._exchange(order, LOAD_TIMEOUT_S, "for its import")
        if "error" in answer:
            await self.end()
            raise self._error_of(answer)
        return Loaded(str(answer.get("form")), answer.get("takes_images") is True)

    async def call(self, rows: Sequence[Mapping[str, Any]], step: int | None) -> Judgement:
        """Judges rows, each with prompt, completion, completion_ids, answer and metadata.

        They have `images` besides, a list of data URLs, where the function takes them and the data
        has some.

        Returns:
            A reward for each row, None where it does not apply, with its parts; and metrics.

        Raises:
            FunctionFailedError: The function gave no rewards.
        """
        self._calls += 1
        message = {"rows": rows, "step": step, "cpu_s": self._cpu_s, "call": self._calls}
        self._printed.begin_call()
        answer = await self._exchange(message, self._spec.timeout_s, "for a call")
        if answer.get("call") != self._calls:
            # A message too many, and each later call would get the rewards of the one before it.
            await self.end()
            raise self._failed("the answer to another call from its process", _MESSED)
        if "error" in answer:
            if answer.get("is_spent"):
                await self.end()
            raise self._error_of(answer)
        try:
            return _checked(answer, len(rows))
        except ValueError as error:
            await self.end()
            raise self._failed(f"{error} in what its process sent", _MESSED) from error

    async def end(self) -> None:
        """Kills the process and those that it started, and frees what belongs to them."""
        process, self._process = self._process, None
        if process is None:
            return
        # The process has not been waited for, so its number cannot belong to another group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if self._writer is not None:
            self._writer.close()
        await asyncio.to_thread(process.wait)
        if self._output is not None:
            # Its last output is not read yet. A process that left the group may hold the pipe.
            await asyncio.wait({self._output}, timeout=_LAST_WORDS_S)
            self._output.cancel()
            await asyncio.gather(self._output, return_exceptions=True)
        await self._close_view()

    async def _close_view(self) -> None:
        view, self._view = self._view, None
        if view is not None:
            await asyncio.to_thread(view.close)

    async def _exchange(
        self, message: dict[str, Any], timeout_s: float, purpose: str
    ) -> dict[str, Any]:
        """Sends a message and waits for the answer. Any failure ends the process."""
        try:
            frame = frames.encode(message, frames.MAX_CALL_BYTES)
        except ValueError as error:
            raise self._failed(str(error), "lower batch_size") from error
        assert self._writer is not None
        is_answered = False
        try:
            async with asyncio.timeout(timeout_s):
                self._writer.write(frame)
                await self._writer.drain()
                header = await self._reader.readexactly(frames.HEADER.size)
                length = frames.body_length(header, frames.MAX_ANSWER_BYTES)
                answer = frames.decode(await self._reader.readexactly(length))
            is_answered = True
            return answer
        except TimeoutError:
            raise RewardTimeoutError(
                f"python:{self._function}",
                expected=f"an answer within {timeout_s:g} s {purpose}",
                found="none, and ended its process",
                remedy="make the function faster, or raise timeout_s",
            ) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise await self._end_error() from None
        except ValueError as error:
            raise self._failed(f"{error} from its process", _MESSED) from error
        finally:
            if not is_answered:
                await self.end()

    async def _end_error(self) -> FunctionFailedError:
        """The error that says why the process closed its connection."""
        if self._printed.is_too_much:
            return self._failed(
                f"more than {self._spec.max_output_bytes} bytes printed in one call",
                "print less, or raise max_output_bytes",
            )
        process = self._process
        if process is None:  # `end` was called while the service stops
            return self._failed(
                "the end of its process, for its service ends", "start the run anew"
            )
        has_ended = await _ends_soon(process.pid)
        await self.end()
        code = process.returncode if has_ended else None
        if code is not None and code > SIGNALLED and self._sandbox.kind == "bubblewrap":
            code = SIGNALLED - code
        if code is None:
            found, remedy = "a closed connection", _MESSED
        elif code >= 0:
            found, remedy = f"an exit with code {code}", "a function must return or raise"
        elif code == -signal.SIGXCPU:
            found = f"more than {self._cpu_s:g} s of processor time used in one call"
            remedy = "make the function cheaper, or raise cpu_s"
        else:
            found = f"its process killed by signal {-code} ({signal.Signals(-code).name})"
            remedy = "it may have crashed, or used more memory than memory_mib allows"
        printed = self._printed.last_words
        return self._failed(found, remedy, f"It printed last:\n{printed}" if printed else "")

    def _failed(self, found: str, remedy: str, traceback: str = "") -> FunctionFailedError:
        return FunctionFailedError(self._function, found=found, remedy=remedy, traceback=traceback)

    def _error_of(self, answer: Mapping[str, Any]) -> FunctionFailedError:
        error = answer["error"]
        if not isinstance(error, dict):
            return self._failed("an error without a text from its process", _MESSED)
        found, remedy, traceback = (str(error.get(key)) for key in ("found", "remedy", "traceback"))
        if error.get("of_system") and self._sandbox.is_there:
            remedy = f"{remedy}; {MAY_BE_SANDBOX}"
        return self._failed(found, remedy, traceback)

    async def _read_output(self, pipe: IO[bytes]) -> None:
        """Logs what the process prints, and ends it when that is too much."""
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        try:
            while part := await reader.read(1 << 16):
                self._printed.take(part)
                if self._printed.is_too_much and self._process is not None:
                    os.killpg(self._process.pid, signal.SIGKILL)
                    return
            self._printed.end()
        finally:
            transport.close()

    def _spawn(self) -> tuple[socket.socket, IO[bytes]]:
        """Starts the process: our ends of its connection, and of the pipe into which it prints."""
        try:
            process, ours = self._sandbox.start(_MODULE, self._view, self._spec.environment)
        except OSError as error:
            raise self._failed(f"no process ({error})", "free processes or memory") from error
        assert process.stdout is not None
        self._process = process
        return ours, process.stdout


async def _ends_soon(pid: int) -> bool:
    """Whether a child ends within a moment."""
    for _ in range(round(_EXIT_GRACE_S / _EXIT_POLL_S)):
        if _has_ended(pid):
            return True
        await asyncio.sleep(_EXIT_POLL_S)
    return False


def _has_ended(pid: int) -> bool:
    """Whether a child has ended. Its exit code is kept, so its number stays in use."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def _checked(answer: Mapping[str, Any], num_rows: int) -> Judgement:
    """What a worker answered; ValueError when it has another shape."""
    rewards, metrics = answer.get("rewards"), answer.get("metrics")
    if not isinstance(rewards, list) or len(rewards) != num_rows:
        raise ValueError(f"no {num_rows} rewards")
    if not isinstance(metrics, dict):
        raise ValueError("no metrics")
    numbers = [value for value in rewards if value is not None] + list(metrics.values())
    if not all(type(value) is float or type(value) is int for value in numbers):
        raise ValueError("what is no number")
    try:
        return Judgement(
            rewards=[None if value is None else float(value) for value in rewards],
            metrics={name: float(value) for name, value in metrics.items()},
            parts=parts.checked(answer.get("parts"), num_rows),
        )
    except OverflowError as error:
        raise ValueError("a number beyond those of float64") from error
