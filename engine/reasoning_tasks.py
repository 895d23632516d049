"""reasoning-gym, imported so that a missing pycosat costs its one task and not all of them.

pycosat has no wheel: installing it takes a C compiler, which a user's machine need not have. The
library imports it with everything else, but only the generator of the task below calls it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

TASKS_OF_PYCOSAT = ("zebra_puzzles",)
"""Tasks whose prompts cannot be drawn without pycosat. Their scorers need none."""

_REMEDY = (
    "it has no wheel, so install a C compiler and Python's headers (Debian: apt-get install gcc "
    "python3-dev), then `pip install pycosat==0.6.6` into the environment of the services"
)


class _MissingPycosat(ModuleType):
    """Stands in for pycosat while reasoning-gym is imported."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        tasks = ", ".join(TASKS_OF_PYCOSAT)
        raise ValueError(f"pycosat is not installed, which {tasks} needs: {_REMEDY}")


def reasoning_gym() -> ModuleType:
    """The library.

    Raises:
        ValueError: It is not installed; the text says how to get it.
    """
    try:
        return _imported()
    except ModuleNotFoundError as error:
        if error.name != "reasoning_gym":
            raise
        raise ValueError(
            "reasoning-gym is not installed: install rolemesh's extra 'tasks' "
            '(`pip install "rolemesh[tasks]"`)'
        ) from error


def check_task(task: str) -> None:
    """Refuses a task that cannot make prompts here.

    Raises:
        ValueError: The task needs pycosat, which is not installed.
    """
    if task in TASKS_OF_PYCOSAT and not _has_pycosat():
        raise ValueError(f"data.task is {task!r}, which needs pycosat: {_REMEDY}")


def _imported() -> ModuleType:
    if _has_pycosat() or "reasoning_gym" in sys.modules:
        return importlib.import_module("reasoning_gym")
    sys.modules["pycosat"] = _MissingPycosat("pycosat")
    try:
        return importlib.import_module("reasoning_gym")
    finally:
        # reasoning-gym keeps the stand-in; other importers learn that there is no pycosat.
        del sys.modules["pycosat"]


def _has_pycosat() -> bool:
    return importlib.util.find_spec("pycosat") is not None
