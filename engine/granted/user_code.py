"""Classes and functions of a user, named in a recipe: 'path/to/file.py:name' or 'module:name'.

A name without a colon is that of an entry point. Loading one runs its file with all rights of this
process: `grants` says which names may arrive from others.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.metadata
import importlib.util
import re
import site
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

ENTRY_POINTS = "rolemesh.code"
"""Group of entry points under which installed packages offer functions and classes."""

INSTALLED = tuple(
    {
        Path(folder).resolve()
        for folder in (
            *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
            *site.getsitepackages(),
            site.getusersitepackages(),
        )
    }
)
"""Folders of the standard library and of installed packages."""

_NOT_THEIRS = ("rolemesh.", "importlib")
"""Beginnings of names of modules that stand between us and a user's code."""


class UserCodeError(ValueError):
    """What a recipe names cannot be loaded."""


def load_named(name: str, field: str) -> Any:
    """The object that a name leads to, e.g. "games/guess.py:Guess" or "mypackage.games:Guess".

    Args:
        name: Path from the process's working directory, or an importable module; a colon; a name.
            Without a colon, the name of an entry point.
        field: Of the recipe, for messages.

    Raises:
        UserCodeError: There is no such file, module or name, or importing it fails.
    """
    place, colon, attribute = name.rpartition(":")
    if not colon:
        return _load_entry_point(name, field)
    if not (place and attribute):
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


def files_of(place: str) -> list[Path]:
    """The files that loading a place would run, the one that is named last. Runs none of them.

    Args:
        place: A path that ends in .py, or a module.

    Returns:
        Absolute paths without links; none where the module is not found, or is no file.
    """
    if place.endswith(".py"):
        try:
            return [Path(place).resolve()]
        except (OSError, RuntimeError, ValueError):
            # A circle of links, or a character that no path has.
            return []
    files, paths = [], None
    parts = place.split(".")
    for count in range(1, len(parts) + 1):
        spec = _found(".".join(parts[:count]), paths)
        if spec is None:
            return []
        if spec.has_location and spec.origin is not None:
            files.append(Path(spec.origin).resolve())
        elif spec.submodule_search_locations is None or count == len(parts):
            # Of the interpreter itself, or a folder without a file.
            return []
        paths = list(spec.submodule_search_locations or ())
    return files


def _found(module: str, paths: list[str] | None) -> ModuleSpec | None:
    """Where an import would find a module, whose package lies at the paths; None: a top one."""
    # What is imported already is not looked for again, wherever a file of its name lies.
    if module in sys.modules:
        return getattr(sys.modules[module], "__spec__", None)
    if paths is None:
        return importlib.util.find_spec(module) if module.isidentifier() else None
    return PathFinder.find_spec(module, paths)


def defines(file: Path, name: str) -> bool:
    """Whether a Python file itself defines a name at its top level: by def, class or assignment.

    What it imports it does not define. A name that stands nowhere in the file passes, and so does
    any of a file that is no Python: both cannot be loaded, and loading tells why.
    """
    if file.suffix != ".py":
        return False
    try:
        source = file.read_bytes()
        tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError):
        return True
    if name in _defined(tree):
        return True
    imported = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    imports_all = any(alias.name == "*" for node in imported for alias in node.names)
    # Every module has names with two underscores.
    may_be_there = re.search(rb"\b%s\b" % re.escape(name.encode()), source) is not None
    return not (imports_all or may_be_there or name.startswith("__"))


def _defined(node: ast.AST) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield child.name
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child.id
        elif not isinstance(child, ast.Lambda):
            yield from _defined(child)


def _load_entry_point(name: str, field: str) -> Any:
    points = importlib.metadata.entry_points(group=ENTRY_POINTS, name=name)
    if not points:
        raise UserCodeError(
            f"{field} is {name!r}: no installed package has an entry point of that name in the "
            f"group {ENTRY_POINTS}; give 'path/to/file.py:name' or 'module:name', as this process "
            "finds it"
        )
    try:
        return next(iter(points)).load()
    except Exception as error:
        # Importing runs the package's code: it may raise anything.
        raise UserCodeError(
            f"{field} is {name!r}, an entry point that cannot be loaded "
            f"({type(error).__name__}: {error}){raised_at(error)}"
        ) from error


def load_offered(name: str, field: str, group: str) -> Any:
    """The object that a name leads to, which other packages may offer under a group of its kind.

    Args:
        name: As of `load_named`; without a colon, the name of an entry point of the group.
        field: Of the recipe, for messages.
        group: Of entry points.

    Returns:
        The object; None where no installed package has an entry point of that name.

    Raises:
        UserCodeError: It cannot be loaded.
    """
    if ":" in name:
        return load_named(name, field)
    for point in importlib.metadata.entry_points(group=group, name=name):
        try:
            return point.load()
        except Exception as error:
            # Importing runs the package's code: it may raise anything.
            raise UserCodeError(
                f"{field}: {name!r} cannot be loaded: {type(error).__name__}: {error}"
            ) from error
    return None


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
