"""Functions of the user that a recipe names as losses and estimators."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import Field

from rolemesh.engine.specs.base import Spec
from rolemesh.engine.specs.named import CODE_PATTERN, Names

_PYTHON = re.compile(r"python:(?P<function>.+:[A-Za-z_]\w*)")


def python_form(text: str) -> dict[str, Any] | None:
    """The long form of a function of the user that is written as one text; None for another text.

    Example: "python:mine.py:f" is {"type": "python", "function": "mine.py:f"}.
    """
    found = _PYTHON.fullmatch(text)
    return None if found is None else {"type": "python", "function": found["function"]}


class OwnFunctionSpec(Spec):
    """A function of yours."""

    function: Annotated[str, Names("code")] = Field(pattern=CODE_PATTERN)
    """"path/to/file.py:name", "module:name" or an entry point, as the actor's service finds it."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""
