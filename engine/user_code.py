"""Classes and functions of a user, named in a recipe as 'path/to/file.py:name' or 'module:name'.

Loading one runs its file with all rights of this process: a recipe is as trusted as a program.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

_NOT_THEIRS = ("rolemesh.", "importlib")
"""Beginnings of names of modules that stand between us and a user's code."""


class UserCodeError(ValueError):
    """What a recipe names cannot be loaded."""


def load_named(name: str, field: str) -> Any:
    """The object that a name leads to, e.g. "games/guess.py:Guess" or "mypackage.games:Guess".

    Args:
        name: Path from the process's working directory, or an importable module; a colon; a name.
        field: Of the recipe, for messages.

    Raises:
        UserCodeError: There is no such file, module or name, or importing it fails.
    """
    place, colon, attribute = name.rpartition(":")
    if not (colon and place and attribute):
        raise UserCodeError(
            f"{field} is {name!r}: give 'path/to/file.py:name' or 'module:name', as this "
            "process finds it"
        )
    try:
        module = (
            _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        )
    except Exception as error:
        # Importing runs the user's code: it may raise anything.
        raise UserCodeError(
            f"{field} is {name!r}, and {place} cannot be loaded ({type(error).__name__}: {error})"
            f"{raised_at(error)}: give 'path/to/file.py:name' or 'module:name', as this "
            "process finds it"
        ) from error
    if not hasattr(module, attribute):
        raise UserCodeError(f"{field} is {name!r}, but {place} has no {attribute!r}: name another")
    return getattr(module, attribute)


def raised_at(error: BaseException) -> str:
    """Where in a user's code an error was raised, as " (at FILE:LINE, in NAME)"; else empty.

    Of a library that the user's code calls, the line of the call is told.
    """
    frames = [
        (frame.f_code, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_globals.get("__name__", "").startswith(_NOT_THEIRS)
    ]
    # The first that is not ours is the user's file; below it, others may be a library's.
    theirs = [one for one in frames if one[0].co_filename == frames[0][0].co_filename]
    if not theirs:
        return ""
    code, line = theirs[-1]
    return f" (at {code.co_filename}:{line}, in {code.co_name})"


def _load_file(path: Path) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise FileNotFoundError(f"{path} is no file")
    # Files of one name in two folders are two modules.
    name = f"rolemesh_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by its name, as soon as it runs.
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before
        raise
    return module
