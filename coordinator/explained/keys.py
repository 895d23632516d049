"""Keys of a recipe with type, default, unit and explanation, read from the schema."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, JsonValue
from pydantic.fields import FieldInfo

from rolemesh.coordinator.explained.units import unit_of

REQUIRED = "required"
"""Default of a key that has none."""

_PLAIN_NAMES: Mapping[Any, str] = {
    int: "whole number",
    float: "number",
    str: "text",
    bool: "true or false",
    Path: "path",
    Any: "anything",
    JsonValue: "anything",
}
_BOUNDS: Mapping[str, str] = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
"""Words for the bounds of a number, by the attribute that holds each."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a section."""

    name: str
    values: str
    """In words, with the bounds that a value must keep."""
    default: str
    """As YAML; REQUIRED where there is none; empty for a section, whose keys have defaults."""
    unit: str
    """Of a number, e.g. "seconds"; empty for everything else."""
    text: str
    """What it does, in full sentences; empty where the source does not say it."""
    sections: tuple[type[BaseModel], ...]
    """Sections that may stand here; several where `type` chooses one."""


@cache
def keys_of(section: type[BaseModel]) -> tuple[Key, ...]:
    """The keys of a section, in the order of its class; `type` is left out where it chooses it."""
    return tuple(
        _key(section, name, field)
        for name, field in section.model_fields.items()
        if not (name == "type" and type_of(section))
    )


def text_of(section: type[BaseModel]) -> str:
    """The docstring of a section, with its indentation taken off."""
    return inspect.cleandoc(section.__doc__ or "")


def type_of(section: type[BaseModel]) -> str:
    """The value of `type` that chooses a section; empty where no such key does."""
    field = section.model_fields.get("type")
    literals = () if field is None else get_args(field.annotation)
    return str(literals[0]) if len(literals) == 1 else ""


def sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The sections that a type names, at any depth."""
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    else:
        for argument in get_args(annotation):
            yield from sections_in(argument)


def _key(section: type[BaseModel], name: str, field: FieldInfo) -> Key:
    sections = tuple(dict.fromkeys(sections_in(field.annotation)))
    text = _field_text(section, name)
    if not text and len(sections) == 1:
        # The key is the section.
        text = text_of(sections[0]).split("\n\n")[0]
    return Key(
        name=field.alias or name,
        values=_type_text(field.annotation, field.metadata),
        default=_default_text(field),
        unit=unit_of(section.__name__, name) if _is_number(field.annotation) else "",
        # A recipe is YAML, whose word for None is null.
        text=re.sub(r"\bNone\b", "null", " ".join(text.split())),
        sections=sections,
    )


def _field_text(section: type[BaseModel], name: str) -> str:
    """The docstring of a field; that of a base where the section only gives another default."""
    for base in section.__mro__:
        field = base.model_fields.get(name) if issubclass(base, BaseModel) else None
        if field is not None and field.description:
            return field.description
    return ""


def _default_text(field: FieldInfo) -> str:
    if field.is_required():
        return REQUIRED
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, BaseModel):
        # Only what differs from the section's own defaults.
        name = type_of(type(value))
        chosen = {"type": name} if name else {}
        value = chosen | value.model_dump(mode="json", exclude_defaults=True)
        if not value:
            return ""
    if isinstance(value, tuple):
        value = list(value)
    text = yaml.safe_dump(value, default_flow_style=True, width=1000)
    return text.removesuffix("...\n").strip()


def _is_number(annotation: Any) -> bool:
    """Whether numbers can stand here, alone or in a list."""
    if annotation in (int, float):
        return True
    if get_origin(annotation) is Literal or inspect.isclass(annotation):
        return False
    return any(_is_number(argument) for argument in get_args(annotation))


def _type_text(annotation: Any, metadata: Any = ()) -> str:
    """A type in words."""
    text = _bare_type_text(annotation)
    bounds = [
        f"{word} {getattr(bound, attribute)}"
        for bound in metadata
        for attribute, word in _BOUNDS.items()
        if hasattr(bound, attribute)
    ]
    return ", ".join([text, *bounds])


def _bare_type_text(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is None or annotation is type(None):
        return "null"
    if annotation in _PLAIN_NAMES:
        return _PLAIN_NAMES[annotation]
    if origin is Annotated:
        return _type_text(arguments[0], arguments[1:])
    if origin is Literal:
        return " or ".join(f"`{argument}`" for argument in arguments)
    if origin in (Union, types.UnionType):
        # Without repeats; sorting is stable, and puts null last.
        parts = dict.fromkeys(_bare_type_text(argument) for argument in arguments)
        return " or ".join(sorted(parts, key=lambda part: part == "null"))
    if inspect.isclass(origin) and issubclass(origin, Mapping):
        return f"names, each with: {_bare_type_text(arguments[1])}"
    if origin is tuple:
        return f"list, each: {_bare_type_text(arguments[0])}"
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return "section"
    raise TypeError(
        f"{annotation!r}: the reference has no words for this type: add them to _bare_type_text"
    )
