"""Names of models and data at the Hugging Face hub, in the place of a recipe's paths.

What a name stands for on this machine is found by `hf_files`. Here is text alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel

from rolemesh.coordinator.recipe.schema import Recipe

_PREFIX = "hf:"

_NAME = re.compile(
    r"hf:(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?"
    r"(?::(?P<config>[^:/\s]+)(?::(?P<split>[^:/\s]+))?)?",
    re.ASCII,
)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, kw_only=True, slots=True)
class HfName:
    """A name as it stands in a recipe.

    Example: HfName.parse("hf:openai/gsm8k:main:train").config is "main".
    """

    repo: str
    """ORG/NAME."""
    revision: str | None = None
    """Branch, tag or commit; None: the default branch of models, the converted one of data."""
    config: str | None = None
    """Configuration of a data set."""
    split: str | None = None
    """Split of a data set."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError for what is no name."""
        found = _NAME.fullmatch(text)
        if found is None:
            raise ValueError(
                "give hf:ORG/NAME or hf:ORG/NAME@REVISION, behind which data may have :CONFIG or "
                ":CONFIG:SPLIT"
            )
        return cls(**found.groupdict())

    @property
    def is_pinned(self) -> bool:
        """Whether it names a commit, and so the same bytes for ever."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

    def at(self, commit: str) -> Self:
        """The name of the same thing at a commit."""
        return replace(self, revision=commit)

    def __str__(self) -> str:
        parts = (f"{self.repo}@{self.revision}" if self.revision else self.repo, self.config)
        return ":".join(("hf", *(one for one in (*parts, self.split) if one)))


@dataclass(frozen=True, kw_only=True, slots=True)
class HfPlace:
    """Where a name stands."""

    field: str
    """E.g. "actor.model.path"."""
    text: str
    spec: BaseModel
    """The section that has the field."""


def is_hf_name(path: Path | str) -> bool:
    """Whether a path of a recipe is meant as a name at the hub."""
    return str(path).startswith(_PREFIX)


def hf_places(value: Any, field: str = "") -> Iterator[HfPlace]:
    """The paths in a recipe, or in a section of one, that are names at the hub."""
    for key, inner in _parts(value):
        where = f"{field}.{key}" if field else key
        if isinstance(value, BaseModel) and isinstance(inner, Path) and is_hf_name(inner):
            yield HfPlace(field=where, text=str(inner), spec=value)
        else:
            yield from hf_places(inner, where)


def with_values(value: Any, values: Mapping[str, Any], field: str = "") -> Any:
    """A recipe with other values of some fields; what holds none of them stays the same object."""
    if field in values:
        return values[field]
    changed = {}
    for key, inner in _parts(value):
        new = with_values(inner, values, f"{field}.{key}" if field else key)
        if new is not inner:
            changed[key] = new
    if not changed:
        return value
    if isinstance(value, BaseModel):
        attributes = {key: name for name, key in _keys(value)}
        return value.model_copy(update={attributes[key]: new for key, new in changed.items()})
    if isinstance(value, Mapping):
        return {key: changed.get(str(key), inner) for key, inner in value.items()}
    return tuple(changed.get(str(place), inner) for place, inner in enumerate(value))


def named_values(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain JSON values, with names at the hub in place of this machine's folders.

    Any machine can make the same run of them: each name has its commit.
    """
    values = recipe.model_dump(mode="json")
    put_names(values, recipe.hf_names)
    return values


def put_names(values: dict[str, Any], names: Mapping[str, str]) -> None:
    """Puts names, by field, into a recipe of plain values."""
    for field, name in names.items():
        *way, last = field.split(".")
        node: Any = values
        for key in way:
            node = node[int(key)] if isinstance(node, list) else node[key]
        node[last] = name


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    match value:
        case BaseModel():
            for name, key in _keys(value):
                yield key, getattr(value, name)
        case Mapping():
            for key, inner in value.items():
                yield str(key), inner
        case tuple() | list():
            for place, inner in enumerate(value):
                yield str(place), inner


def _keys(section: BaseModel) -> Iterator[tuple[str, str]]:
    """Attributes of a section, each with its key in a recipe."""
    for name, field in type(section).model_fields.items():
        yield name, field.alias or name
