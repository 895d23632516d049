"""Record of the code that a process makes, runs or reads from bytes, by Python's audit hooks.

`recording()` is for a block of a test. `record_into(FOLDER)` is for the rest of a process: each
kind of event is a line of FOLDER/<pid>.jsonl. A process that the warm one forks does so where the
variable ROLEMESH_TEST_AUDIT names a folder. A hook cannot be taken away again, hence the switch.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

VARIABLE = "ROLEMESH_TEST_AUDIT"

CODE = frozenset(
    {"compile", "exec", "pickle.find_class", "code.__new__", "marshal.load", "marshal.loads"}
    | {"os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen"}
)
"""Events that stand for code: made, read, run here, or run as a program."""

UNPICKLING = "torch.load"
"""No event of Python, since with weights_only torch reads pickles by itself."""


class Event(NamedTuple):
    """One thing that happened."""

    name: str
    """Of the table in Python's documentation, e.g. "pickle.find_class"."""
    caller: str
    """Module of the frame in which it happened."""
    detail: str
    """File of the code, name of the class, command or path."""


_tell: Callable[[Event], None] | None = None
_names: frozenset[str] = frozenset()
_is_installed = False


@contextlib.contextmanager
def recording(*names: str) -> Iterator[list[Event]]:
    """Events of this process within the block; without names those of code."""
    events: list[Event] = []
    _begin(events.append, frozenset(names) or CODE)
    try:
        yield events
    finally:
        _end()


def record_into(folder: str) -> None:
    """Writes each kind of event once, from now on to the end of the process."""
    path = Path(folder) / f"{os.getpid()}.jsonl"
    descriptor = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
    known: set[Event] = set()

    def write(event: Event) -> None:
        if event not in known:
            known.add(event)
            os.write(descriptor, json.dumps(event).encode() + b"\n")

    _begin(write, CODE)


def recorded(folder: Path) -> dict[str, list[Event]]:
    """What the processes wrote that `record_into` was called in, by the name of the file."""
    return {
        path.name: [Event(*json.loads(line)) for line in path.read_text().splitlines()]
        for path in folder.glob("*.jsonl")
    }


def _begin(tell: Callable[[Event], None], names: frozenset[str]) -> None:
    global _tell, _names, _is_installed
    _names = names
    if not _is_installed:
        sys.addaudithook(_hook)
        if "torch" in sys.modules:
            _watch_torch()
        _is_installed = True
    _tell = tell


def _end() -> None:
    global _tell
    _tell = None


def _hook(name: str, arguments: tuple[Any, ...]) -> None:
    if _tell is None or name not in _names:
        return
    frame = sys._getframe(1)
    _tell(Event(name, str(frame.f_globals.get("__name__")), _detail(name, arguments)))


def _detail(name: str, arguments: tuple[Any, ...]) -> str:
    if name == "exec":
        return str(getattr(arguments[0], "co_filename", arguments[0]))
    if name == "compile":
        return str(arguments[1])
    if name == "pickle.find_class":
        return f"{arguments[0]}.{arguments[1]}"
    if name == "subprocess.Popen":
        words = arguments[1]
        return words if isinstance(words, str) else " ".join(map(str, words))
    if name.startswith(("marshal", "code")):
        return ""
    return str(arguments[0])


def _watch_torch() -> None:
    import torch

    for place in (torch, torch.serialization, torch.jit):
        before = place.load

        def load(*arguments: Any, before: Any = before, **keywords: Any) -> Any:
            if _tell is not None:
                caller = str(sys._getframe(1).f_globals.get("__name__"))
                _tell(Event(UNPICKLING, caller, str(arguments[:1])))
            return before(*arguments, **keywords)

        place.load = load
