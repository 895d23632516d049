"""The life of a rank's process: it runs functions that are named to it until its pipe ends."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import inspect
import io
import os
import pickle  # noqa: TID251 - between the processes of one test
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.reduction import ForkingPickler
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """How a rank's function ended."""

    value: Any = None
    """What it returned."""
    failure: str | None = None
    """Traceback of what it raised, or how the process ended; None when it returned."""


@dataclass(frozen=True, slots=True)
class Location:
    """A function by name, and the file to load it from."""

    module: str
    path: str
    name: str


def located(function: Callable[..., Any]) -> Location:
    path = inspect.getsourcefile(function)
    if path is None or "." in function.__qualname__:
        raise ValueError(
            f"function is {function.__qualname__}: define it at the top level of a module, where "
            "the ranks' processes can import it"
        )
    return Location(function.__module__, os.path.abspath(path), function.__name__)


def main() -> None:
    """Runs functions until the pipe, which is standard input, ends."""
    pipe = connection.Connection(os.dup(sys.stdin.fileno()))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    gc.freeze()  # What was imported is never garbage; leaving it out makes each collection short.
    while True:
        try:
            where = pipe.recv()
            given = None if where is None else pipe.recv_bytes()
        except (EOFError, ConnectionResetError):
            return
        if given is None:
            pipe.send(None)  # Ready.
            continue
        try:
            # The module first: arguments may be of its classes.
            function = getattr(_module(where), where.name)
            context, args = ForkingPickler.loads(given)
            message = by_value(RankOutcome(value=function(context, *args)))
        except Exception:
            message = by_value(RankOutcome(failure="\n" + traceback.format_exc()))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        pipe.send_bytes(message)
        # Models and their groups refer to each other. Each group that is left has threads that wake
        # a hundred times a second.
        context = args = function = None
        gc.collect()
        # What is left are modules that the function imported: the next collection is short again.
        gc.freeze()


def by_value(message: object) -> bytes:
    """A message for `send_bytes`; `send` would lend torch's shared memory to the reader."""
    written = io.BytesIO()
    _ByValue(written).dump(message)
    return written.getvalue()


class _ByValue(pickle.Pickler):
    """Writes plain tensors as their bytes: a small one takes far less time than in torch's form."""

    def reducer_override(self, value: object) -> Any:
        """How to make the value again, or NotImplemented."""
        if type(value) is not torch.Tensor or value.requires_grad or value.device.type != "cpu":
            return NotImplemented
        if value.layout is not torch.strided:
            return NotImplemented
        content = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return _tensor, (content, value.dtype, tuple(value.shape))


def _tensor(content: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape)


def _module(where: Location) -> ModuleType:
    """The function's module; a test file is no member of a package and is loaded by its path."""
    if where.module == "__main__":
        return _script(where.path)
    if where.module in sys.modules:
        return sys.modules[where.module]
    if where.module.split(".")[0] in ("rolemesh", "support"):
        return importlib.import_module(where.module)
    # Pickle looks classes up by the dotted name, and wants every part of it to be a module.
    parents = where.module.split(".")[:-1]
    for end in range(1, len(parents) + 1):
        sys.modules.setdefault(".".join(parents[:end]), ModuleType(".".join(parents[:end])))
    return _loaded(where.module, where.path)


def _script(path: str) -> ModuleType:
    """The program that started the ranks, e.g. a benchmark, whose main part is not run again."""
    found = sys.modules["__main__"]
    if getattr(found, "__file__", None) != path:
        # Pickle knows its classes as those of the main module.
        found = sys.modules["__main__"] = _loaded("__mp_main__", path)
    return found


def _loaded(name: str, path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded as {name}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


if __name__ == "__main__":
    # Outcomes are to be of the class that pickle finds by name, which is not the one of this file.
    importlib.import_module("support.rank_child").main()
