"""Hydra's forms: overrides, and values that name other values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from rolemesh.coordinator.imports.forms.plain import plain_yaml
from rolemesh.coordinator.imports.source import ImportedError, Unresolved

_OVERRIDE = re.compile(r"(?P<sign>\+{0,2}|~)(?P<key>[\w.@/-]+)(?:=(?P<value>.*))?", re.S)
_INNERMOST = re.compile(r"\$\{([^${}]*)\}")
_MOST_LEAVES = 20_000
_MISSING = "???"

Path = tuple[str, ...]


def leaves(tree: Mapping[str, Any], above: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Values that have no fields of their own, each with its path."""
    for key, value in tree.items():
        where = (*above, str(key))
        if isinstance(value, Mapping) and value:
            yield from leaves(value, where)
        else:
            yield where, value


def flat(tree: Mapping[str, Any], source: str) -> dict[str, Any]:
    """A tree as values by dotted names; raises ImportedError where it has very many."""
    found: dict[str, Any] = {}
    for where, value in leaves(tree):
        if len(found) > _MOST_LEAVES:
            raise ImportedError(f"{source}: has more than {_MOST_LEAVES} values: give less")
        found[".".join(where)] = value
    return found


def overridden(values: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """Values with overrides of the command line: key=value, +key=value, ++key=value, ~key.

    Raises:
        ImportedError: A text is no override.
    """
    values = dict(values)
    for text in overrides:
        found = _OVERRIDE.fullmatch(text)
        if found is None or (found["value"] is None and found["sign"] != "~"):
            raise ImportedError(
                f"{text!r} is no override: give key=value, +key=value or ~key, e.g. "
                "trainer.total_training_steps=100"
            )
        key = found["key"]
        below = [name for name in values if name == key or name.startswith(f"{key}.")]
        value = None if found["value"] is None else _value(found["value"], text)
        for name in below:
            del values[name]
        if found["sign"] == "~":
            continue
        if isinstance(value, dict) and value:
            values.update({f"{key}.{name}": part for name, part in flat(value, text).items()})
        else:
            values[key] = value
    return values


def _value(written: str, text: str) -> Any:
    if isinstance(text, Unresolved):
        # Interpolations of Hydra are resolved later; a shell's variables are not.
        return Unresolved(written) if "$" in written else _parsed(written)
    return _parsed(written)


def _parsed(written: str) -> Any:
    try:
        return plain_yaml(written)
    except (yaml.YAMLError, ValueError, RecursionError):
        return written


def interpolated(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Values in which ${a.b.c}, ${.c} and ${oc.select:a.b,default} are replaced.

    What cannot be resolved stays, as Unresolved: ${oc.env:NAME} without a default, and others.
    """
    resolver = _Resolver({**defaults, **{k: v for k, v in values.items() if v is not None}})
    return {
        name: None if value == _MISSING else resolver.resolved(value, name)
        for name, value in values.items()
    }


class _Resolver:
    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def resolved(self, value: Any, name: str, depth: int = 0) -> Any:
        if isinstance(value, list):
            parts = [self.resolved(part, name, depth) for part in value]
            texts = (isinstance(part, Unresolved) for part in parts)
            return Unresolved(str(value)) if any(texts) else parts
        if not isinstance(value, str) or "${" not in value:
            return value
        text = str(value)
        for _ in range(20):
            found = _INNERMOST.search(text)
            if found is None:
                return text
            known, part = self._meant(found[1], name, depth)
            if not known or isinstance(part, Unresolved):
                return Unresolved(value)
            if found[0] == text:
                return part
            text = text.replace(found[0], "null" if part is None else str(part))
        return Unresolved(value)

    def _meant(self, inner: str, name: str, depth: int) -> tuple[bool, Any]:
        """Whether an interpolation is known, and its value."""
        if depth > 10:
            return False, None
        resolver, colon, rest = inner.partition(":")
        default = None
        if colon and resolver == "oc.select":
            key, _, default = rest.partition(",")
        elif colon and resolver == "oc.env":
            _, comma, default = rest.partition(",")
            return bool(comma), _parsed(default.strip())
        elif colon:
            return False, None
        else:
            key = inner
        key = key.strip()
        dots = len(key) - len(key.lstrip("."))
        if dots:
            above = name.split(".")[:-dots]
            key = ".".join((*above, key.lstrip(".")))
        if key in self._values:
            return True, self.resolved(self._values[key], key, depth + 1)
        return (True, _parsed(default.strip())) if default is not None else (False, None)
