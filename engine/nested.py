"""Columns by name, and parts of the objects that columns hold: "reward_model.ground_truth".

A name that no column has leads into objects at its dots; so a column whose own name has dots is
found first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def column_of(name: str, columns: Sequence[str]) -> str:
    """The column that a name is, or leads into."""
    return name if name in columns else name.partition(".")[0]


def value_of(record: Mapping[str, Any], name: str) -> Any:
    """The value of a column, or of a part of one; None if there is none.

    Example: of {"a": {"b": 1}} it is 1 for "a.b".
    """
    if name in record:
        return record[name]
    if "." not in name:
        return None
    value: Any = record
    for part in name.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def lacking(record: Mapping[str, Any], name: str) -> str:
    """What there is in place of a column, or of a part of one, for messages; empty if it is there.

    Example: of {"a": {"c": 1}} it is "its 'a' has c" for "a.b". An object that is null lacks no
    part: each is null.
    """
    if name in record:
        return ""
    value: Any = record
    place = ""
    for part in name.split("."):
        if value is None:
            return ""
        if not isinstance(value, Mapping):
            return f"its {place!r} is no object but {type(value).__name__}"
        if part not in value:
            return f"{f'its {place!r}' if place else 'it'} has {listed(value)}"
        place = f"{place}.{part}" if place else part
        value = value[part]
    return ""


def listed(record: Mapping[str, Any]) -> str:
    """The keys of an object, for messages."""
    return ", ".join(map(str, record)) or "nothing"
