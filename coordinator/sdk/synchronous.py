"""Writes the methods of the synchronous SDK from those of the asynchronous one: `make sdk`.

Each file of a synchronous class has a line with MARK. What stands above it is written by hand;
what stands below it comes from here: the same signatures and docstrings, without await.
"""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rolemesh.coordinator.sdk.async_client import AsyncClient
from rolemesh.coordinator.sdk.async_mesh import AsyncMesh
from rolemesh.coordinator.sdk.async_role import AsyncRole
from rolemesh.coordinator.sdk.service_calls import ServiceCalls
from rolemesh.coordinator.sdk.weight_calls import WeightCalls

MARK = "    # --- written by `make sdk` from the asynchronous class ---\n"

FOLDER = Path(__file__).parent

SOURCES: Mapping[str, tuple[type, ...]] = {
    "client": (AsyncClient,),
    "mesh": (AsyncMesh,),
    "role": (ServiceCalls, AsyncRole, WeightCalls),
}
"""By the name of a file, the classes whose methods it has; self._<name> is the object itself."""


def written(name: str) -> str:
    """The whole text of a file, as it has to be.

    Args:
        name: Of the file, without ".py".
    """
    head, _, _ = (FOLDER / f"{name}.py").read_text().partition(MARK)
    methods = [
        _synchronous(method, f"self._{name}")
        for source in SOURCES[name]
        for method in vars(source).values()
        if (inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method))
        and not method.__name__.startswith("_")
        and f" def {method.__name__}(" not in head
    ]
    formatted = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--stdin-filename", FOLDER / f"{name}.py", "-"],
        input=head + MARK + "\n" + "\n".join(methods),
        capture_output=True,
        text=True,
        check=True,
    )
    return formatted.stdout


def _synchronous(method: Any, target: str) -> str:
    """The text of one method: its head and its docstring as they are, and a call."""
    text = textwrap.dedent(inspect.getsource(method))
    (parsed,) = ast.parse(text).body
    assert isinstance(parsed, ast.AsyncFunctionDef)
    lines = text.splitlines()[: parsed.body[0].end_lineno]  # the docstring comes first
    shown = "\n".join(lines)
    for awaited, plain in (("async def", "def"), ("AsyncIterator", "Iterator"), ("await ", "")):
        shown = shown.replace(awaited, plain)
    passed = ", ".join(
        f"{one.name}={one.name}" if one.kind is one.KEYWORD_ONLY else one.name
        for one in list(inspect.signature(method).parameters.values())[1:]
    )
    run = "iterate" if inspect.isasyncgenfunction(method) else "run"
    call = f"self._loop.{run}({target}.{method.__name__}({passed}))"
    returned = "" if method.__annotations__["return"] == "None" else "return "
    return textwrap.indent(f"{shown}\n    {returned}{call}\n", "    ")


def main() -> None:
    """Writes the files."""
    for name in SOURCES:
        (FOLDER / f"{name}.py").write_text(written(name))


if __name__ == "__main__":
    main()
