"""A process that holds one reward function and calls it.

Used as `python -m rolemesh.services.reward.outside.functions.worker SOCKET PARENT_PID`. The first
message names the function and its sandbox, each further one is a batch. The process is isolated so
that a function that hangs, crashes or eats memory harms nothing else, and reaches nothing else.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import math
import os
import resource
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

from rolemesh.engine.sandbox.host import enter
from rolemesh.engine.user_code import UserCodeError, load_named
from rolemesh.services.reward.outside.functions import answers, forms, frames
from rolemesh.services.reward.outside.functions.answers import FunctionFaultError

MAX_TRACEBACK_CHARACTERS = 1500
"""Most characters of a traceback, from its end: the text of an error is cut at 2000 when sent."""

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """Serves one service over the socket that it inherits, until the other end closes."""
    descriptor, parent_pid = int(arguments[0]), int(arguments[1])
    end_with_parent(parent_pid)
    connection = socket.socket(fileno=descriptor)
    # Processes that the function starts must not hold the connection open.
    connection.set_inheritable(False)
    order = frames.read(connection, frames.MAX_CALL_BYTES)
    if order is None:
        return 0
    _limit_memory(order["memory_bytes"])
    if order["sandbox"] is not None:
        enter(order["sandbox"])
    try:
        form = load(str(order["function"]), str(order["form"]))
    except (UserCodeError, FunctionFaultError) as error:
        _send(connection, {"error": _fault(error)})
        return 1
    _send(connection, {"form": form.name})
    # One loop for all calls, since objects that an async function keeps open belong to a loop.
    with asyncio.Runner() as runner:
        while (call := frames.read(connection, frames.MAX_CALL_BYTES)) is not None:
            _limit_processor(call["cpu_s"])
            _send(connection, _answer(form, call, runner))
    return 0


def end_with_parent(parent_pid: int) -> None:
    """Asks the kernel to kill this process when the thread that started it ends.

    This is the thread of the service's event loop, which lives as long as its workers. The kernel
    also ends a function that never releases the interpreter, which no thread in here could do.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"prctl: {os.strerror(number)}")
    # The parent may have ended before the request to the kernel.
    if os.getppid() != parent_pid:
        raise SystemExit(f"parent {parent_pid} is gone")


def load(name: str, form: str) -> forms.Form:
    """Loads the function of a name.

    A file's folder is searched for modules last, so a file can import its neighbours but shadows no
    package.

    Raises:
        UserCodeError: It cannot be imported.
        FunctionFaultError: It cannot be called.
    """
    place, _, _ = name.rpartition(":")
    if place.endswith(".py"):
        sys.path.append(str(Path(place).resolve().parent))
    return forms.form_of(load_named(name, "function"), form)


def _answer(form: forms.Form, call: dict[str, Any], runner: asyncio.Runner) -> dict[str, Any]:
    try:
        batch = forms.Batch(call["rows"], call["step"])
        given = form.call(batch)
        if inspect.isawaitable(given):
            given = runner.run(_awaited(given))
        rewards = form.read(given, batch)
        metrics = {name: answers.mean([*values]) for name, values in batch.metrics.items()}
    except FunctionFaultError as error:
        return {"error": _fault(error)}
    except MemoryError as error:
        return {"error": _raised(error), "is_spent": True}
    except BaseException as error:  # of the user's code, SystemExit too
        return {"error": _raised(error)}
    return {"rewards": rewards, "metrics": metrics}


async def _awaited(given: Any) -> Any:
    return await given


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    try:
        frame = frames.encode(message, frames.MAX_ANSWER_BYTES)
    except ValueError as error:
        fault = FunctionFaultError(f"an answer that cannot be sent ({error})", "log less")
        frame = frames.encode({"error": _fault(fault)}, frames.MAX_ANSWER_BYTES)
    connection.sendall(frame)


def _fault(error: FunctionFaultError | UserCodeError) -> dict[str, Any]:
    if isinstance(error, FunctionFaultError):
        return {"found": error.found, "remedy": error.remedy, "traceback": ""}
    return {
        "found": "a function that cannot be imported",
        "remedy": str(error),
        "traceback": "" if error.__cause__ is None else _traceback(error.__cause__),
        "of_system": _is_of_system(error),
    }


def _raised(error: BaseException) -> dict[str, Any]:
    remedy = "the function raised this"
    if isinstance(error, MemoryError):
        remedy = "the function wanted more than memory_mib allows"
    found = "".join(traceback.format_exception_only(error)).strip()
    return {
        "found": found,
        "remedy": remedy,
        "traceback": _traceback(error),
        "of_system": _is_of_system(error),
    }


def _is_of_system(error: BaseException | None) -> bool:
    """Whether the system refused something, which a sandbox may be the reason for."""
    while error is not None:
        if isinstance(error, OSError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _traceback(error: BaseException) -> str:
    """The traceback from the first frame in the user's file on."""
    found = error.__traceback__
    own = {__file__, forms.__file__}
    while found is not None and found.tb_next is not None:
        if found.tb_frame.f_code.co_filename not in own:
            break
        found = found.tb_next
    text = "".join(traceback.format_exception(type(error), error, found))
    return text[-MAX_TRACEBACK_CHARACTERS:]


def _limit_memory(memory_bytes: int | None) -> None:
    # A crash must not write memory to disk.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_bytes is not None:
        _set_limit(resource.RLIMIT_AS, memory_bytes)


def _limit_processor(cpu_s: float) -> None:
    """Limits the processor time of the next call; then SIGXCPU ends this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _set_limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + cpu_s))


def _set_limit(kind: int, value: int) -> None:
    """Sets a limit, or keeps that of the service if it is lower."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
