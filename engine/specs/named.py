"""Marks of fields that name something outside of a spec, and a walk over all that a spec names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

NamedKind = Literal["code", "command", "path", "url", "variable", "network"]
"""Python code, a word of a command that is run, a file or folder, an address that is connected to,
an environment variable, and connections that a user's code opens by itself."""

CODE_PATTERN = r"^(.+:)?[A-Za-z_]\w*$"
"""Of a name of code: "path/to/file.py:name", "module:name", or that of an entry point."""


@dataclass(frozen=True, slots=True)
class Names:
    """Mark of a field, in its Annotated: what the text there, or each text of several, names.

    Of "network" it is a flag, which names something where it is True.

    Fields of type Path need no mark.
    """

    kind: NamedKind
    gets_secret: bool = False
    """Of an address: a secret of the process goes there. So it does where the spec has a
    token_variable that is set."""


@dataclass(frozen=True, slots=True)
class Named:
    """Something that a spec names."""

    field: str
    """Where it stands, e.g. "reward.source.rewards.0.source.function"."""
    kind: NamedKind
    value: str
    gets_secret: bool = False
    """Of an address: a secret of the process that connects goes there."""


def named_in(spec: BaseModel, prefix: str = "") -> Iterator[Named]:
    """Yields what a spec names, and the specs in it, in the order of their fields.

    Args:
        spec: A role's section, or a whole recipe.
        prefix: Stands before the field of each, e.g. "reward.".
    """
    has_token = getattr(spec, "token_variable", None) is not None
    for name, info in type(spec).model_fields.items():
        mark = next((one for one in info.metadata if isinstance(one, Names)), None)
        if mark is not None and mark.kind == "url" and has_token:
            mark = Names("url", gets_secret=True)
        yield from _named(getattr(spec, name), f"{prefix}{info.alias or name}", mark)


def _named(value: Any, field: str, mark: Names | None) -> Iterator[Named]:
    if isinstance(value, BaseModel):
        yield from named_in(value, f"{field}.")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _named(item, f"{field}.{key}", mark)
    elif isinstance(value, tuple | list):
        for number, item in enumerate(value):
            yield from _named(item, f"{field}.{number}", mark)
    elif isinstance(value, Path):
        yield Named(field, "path", str(value))
    elif mark is not None and (isinstance(value, str) or value is True):
        yield Named(field, mark.kind, "true" if value is True else value, mark.gets_secret)
