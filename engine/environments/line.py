"""The line to a process of environments: many calls in flight on one socket."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import select
import signal
import socket
import threading
import time
from concurrent.futures import Future
from functools import partial
from typing import IO, Any

from rolemesh.engine.environments.base import EnvironmentFailedError
from rolemesh.engine.sandbox import frames
from rolemesh.engine.sandbox.bounds import Output
from rolemesh.engine.sandbox.host import MAY_BE_SANDBOX
from rolemesh.engine.sandbox.keeping import KeptProcess, Start
from rolemesh.engine.sandbox.view import View

CANCEL_S = 5.0
"""How long a coroutine whose time is over may take to end, before its process is ended."""

_MOST_READ_BYTES = 1 << 16
_LAST_WORDS_S = 0.2


class Line:
    """One process, from its start to its end, and the calls that wait for its answers.

    Any thread may call any method. A thread listens for answers, and another one keeps the process
    (`sandbox/keeping.py`).

    Invariant: once `end` has been called, no call is in flight, and no further one begins.
    """

    def __init__(self, name: str, start: Start, view: View, *, max_output_bytes: int) -> None:
        """Starts the process.

        Args:
            name: Of the code that it runs, for errors and the log.
            start: Starts it.
            view: What it sees; closed with the line, once that is made.
            max_output_bytes: What one call may print.

        Raises:
            OSError: The system has no process for it.
            RuntimeError: The system has no thread for it.
        """
        self._name, self._view = name, view
        self._max_output_bytes = max_output_bytes
        self._printed = Output(name.rpartition(":")[2], max_output_bytes)
        self._numbers = itertools.count()
        # Entered again by a thread that holds it, if memory of a user of this line is freed then.
        self._lock = threading.RLock()
        """Of the two that follow."""
        self._in_flight: dict[int, Future[dict[str, Any]]] = {}
        self._why_ended: str | None = None
        self._sending = threading.Lock()
        self._kept = KeptProcess(start, partial(_log, self._printed))
        self._process, self._connection = self._kept.process, self._kept.connection
        try:
            threading.Thread(target=self._listen, daemon=True).start()
        except RuntimeError:
            self.end("no thread")
            self._connection.close()
            raise

    @property
    def is_open(self) -> bool:
        """Whether calls may begin. A process that ended by itself is noticed at once."""
        return self._why_ended is None

    def ask(
        self,
        message: dict[str, Any],
        timeout_s: float,
        *,
        purpose: str,
        remedy: str,
        ends_itself: bool = False,
    ) -> dict[str, Any]:
        """The answer to a message.

        Args:
            message: For the process; its call number is added.
            timeout_s: Seconds until the answer must be there. Then the process is ended, and all
                calls in flight fail.
            purpose: What the process does with it, for errors.
            remedy: What to do if that takes too long.
            ends_itself: Whether the process ends this call alone at its time. Then it has
                `CANCEL_S` more to answer.

        Raises:
            EnvironmentFailedError: There is none; or it tells of an error; or the process has
                ended or had to be ended, for this call or another one.
        """
        deadline = time.monotonic() + timeout_s + (CANCEL_S if ends_itself else 0.0)
        number = next(self._numbers)
        try:
            frame = frames.encode({**message, "call": number}, frames.MAX_CALL_BYTES)
        except ValueError as error:
            raise EnvironmentFailedError(f"{self._name!r} cannot be asked: {error}") from error
        answered = self._register(number)
        try:
            # A process that takes too little of it is late as well.
            self._send(frame, deadline)
            answer = answered.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError as error:
            late = f"gave no answer within {timeout_s:g} s for {purpose}"
            self.end(
                f"the process of {self._name!r} was ended because another call {late}: {remedy}"
            )
            raise EnvironmentFailedError(
                f"{self._name!r} {late}, and its process was ended: {remedy}"
            ) from error
        if answer.get("is_late"):
            raise EnvironmentFailedError(
                f"{self._name!r} gave no answer within {timeout_s:g} s for {purpose}, which was "
                f"cancelled: {remedy}"
            )
        if answer.get("is_spent"):
            spent = (
                "wanted more memory than environment.memory_mib allows, and its process was "
                "ended: use less, or raise it"
            )
            self.end(f"another call of {self._name!r} {spent}")
            raise EnvironmentFailedError(f"{answer.get('error')}: {self._name!r} {spent}")
        if "error" in answer:
            hint = f" ({MAY_BE_SANDBOX})" if answer.get("of_system") else ""
            raise EnvironmentFailedError(f"{answer['error']}{hint}")
        return answer

    def _register(self, number: int) -> Future[dict[str, Any]]:
        answered: Future[dict[str, Any]] = Future()
        with self._lock:
            if self._why_ended is not None:
                raise EnvironmentFailedError(self._why_ended)
            self._in_flight[number] = answered
            self._printed.begin_call(len(self._in_flight))
        return answered

    def _send(self, frame: bytes, deadline: float) -> None:
        """Sends all of it; TimeoutError if it does not go in time."""
        left = memoryview(frame)
        if not self._sending.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise TimeoutError("another message does not go")
        try:
            while left:
                # A time-out of the socket would be one of the thread that listens, too.
                with contextlib.suppress(BlockingIOError):
                    left = left[self._connection.send(left, socket.MSG_DONTWAIT) :]
                    continue
                if time.monotonic() >= deadline:
                    raise TimeoutError("a message does not go")
                ready = select.poll()
                ready.register(self._connection, select.POLLOUT)
                ready.poll(math.ceil(1000 * max(0.0, deadline - time.monotonic())))
        except TimeoutError:
            raise
        except (OSError, ValueError):
            # The connection is closed. Why, whoever listens tells all calls in flight.
            return
        finally:
            self._sending.release()

    def _listen(self) -> None:
        """Hands out answers until the connection closes, and then ends the process."""
        found: Exception = ConnectionError("its process has ended")
        try:
            while (answer := frames.read(self._connection, frames.MAX_ANSWER_BYTES)) is not None:
                self._hand_out(answer)
        except (OSError, ValueError) as error:
            found = error
        if self.is_open:
            # Its last output may not be read yet. A process that left the group may hold the pipe.
            self._kept.is_read.wait(_LAST_WORDS_S)
            self.end(self._broken(found))
        self._connection.close()

    def _hand_out(self, answer: dict[str, Any]) -> None:
        number = answer.get("call")
        with self._lock:
            answered = self._in_flight.pop(number, None) if isinstance(number, int) else None
        if answered is None:
            raise ValueError("a message answers no call")
        answered.set_result(answer)

    def _broken(self, error: Exception) -> str:
        if self._printed.is_too_much:
            return (
                f"{self._name!r} printed more than {self._max_output_bytes} bytes in one call, "
                "and its process was ended: print less, or raise environment.max_output_bytes"
            )
        printed = self._printed.last_words
        return (
            f"the process of {self._name!r} has ended ({error}): it may have crashed, or used more "
            "memory than environment.memory_mib allows"
            + (f". It printed last:\n{printed}" if printed else "")
        )

    def end(self, why: str) -> None:
        """Kills the process and those that it started, and fails the calls in flight with a text.

        Another end after the first does nothing.
        """
        with self._lock:
            if self._why_ended is not None:
                return
            self._why_ended = why
            failed, self._in_flight = list(self._in_flight.values()), {}
        # Wakes the thread that listens, which closes it.
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        # It has not been waited for, so its number cannot belong to another group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._kept.has_ended.set()
        self._view.close()
        for answered in failed:
            answered.set_exception(EnvironmentFailedError(why))


def _log(printed: Output, pipe: IO[bytes], connection: socket.socket) -> None:
    """Logs what a process prints; where that is too much, its owner waits for no answer."""
    while part := os.read(pipe.fileno(), _MOST_READ_BYTES):
        printed.take(part)
        if printed.is_too_much:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            return
    printed.end()
