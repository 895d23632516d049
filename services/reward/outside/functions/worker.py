"""A process that holds one reward function and calls it.

Used as `python -m rolemesh.services.reward.outside.functions.worker SOCKET PARENT_PID`. The first
message names the function and its sandbox, each further one is a batch. The process is isolated so
that a function that hangs, crashes or eats memory harms nothing else, and reaches nothing else.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import resource
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

from rolemesh.engine.granted.user_code import UserCodeError, load_named
from rolemesh.engine.sandbox import frames
from rolemesh.engine.sandbox.inside import begin, is_of_system, set_limit
from rolemesh.services.reward.outside.functions import answers, forms
from rolemesh.services.reward.outside.functions.answers import FunctionFaultError

MAX_TRACEBACK_CHARACTERS = 1500
"""Most characters of a traceback, from its end: the text of an error is cut at 2000 when sent."""


def main(arguments: list[str]) -> int:
    """Serves one service over the socket that it inherits, until the other end closes."""
    connection, order = begin(arguments)
    if order is None:
        return 0
    try:
        form = load(str(order["function"]), str(order["form"]))
    except (UserCodeError, FunctionFaultError) as error:
        _send(connection, {"error": _fault(error)})
        return 1
    _send(connection, {"form": form.name, "takes_images": form.takes_images})
    # One loop for all calls, since objects that an async function keeps open belong to a loop.
    with asyncio.Runner() as runner:
        while (call := frames.read(connection, frames.MAX_CALL_BYTES)) is not None:
            _limit_processor(call["cpu_s"])
            _send(connection, {**_answer(form, call, runner), "call": call["call"]})
    return 0


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
    return {"rewards": rewards, "parts": batch.parts, "metrics": metrics}


async def _awaited(given: Any) -> Any:
    return await given


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    try:
        frame = frames.encode(message, frames.MAX_ANSWER_BYTES)
    except ValueError as error:
        fault = FunctionFaultError(f"an answer that cannot be sent ({error})", "log less")
        told = {"error": _fault(fault), "call": message.get("call")}
        frame = frames.encode(told, frames.MAX_ANSWER_BYTES)
    connection.sendall(frame)


def _fault(error: FunctionFaultError | UserCodeError) -> dict[str, Any]:
    if isinstance(error, FunctionFaultError):
        return {"found": error.found, "remedy": error.remedy, "traceback": ""}
    return {
        "found": "a function that cannot be imported",
        "remedy": str(error),
        "traceback": "" if error.__cause__ is None else _traceback(error.__cause__),
        "of_system": is_of_system(error),
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
        "of_system": is_of_system(error),
    }


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


def _limit_processor(cpu_s: float) -> None:
    """Limits the processor time of the next call; then SIGXCPU ends this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    set_limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + cpu_s))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
