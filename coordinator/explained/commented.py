"""A recipe as YAML in which a comment explains each key."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from pydantic import BaseModel

from rolemesh.coordinator.explained.keys import REQUIRED, Key, keys_of
from rolemesh.coordinator.recipe.schema import Recipe

_WIDTH = 100


def commented_recipe(recipe: Recipe) -> str:
    """The recipe with every default spelled out; loads to an equal one.

    Above each key stand its explanation, its unit and its default.
    """
    return "\n".join(_section(recipe, recipe.model_dump(mode="json"), "")) + "\n"


def _section(section: BaseModel, dumped: Mapping[str, Any], indent: str) -> Iterator[str]:
    keys = {key.name: key for key in keys_of(type(section))}
    # A key may be no name for an attribute in Python, as "from" is.
    attributes = {field.alias: name for name, field in type(section).model_fields.items()}
    for name, value in dumped.items():
        if name in keys:
            yield from _comment(keys[name], indent)
        yield from _entry(name, getattr(section, attributes.get(name, name)), value, indent)


def _comment(key: Key, indent: str) -> Iterator[str]:
    facts = [] if key.unit in ("", "number") else [key.unit]
    if key.default:
        facts.append(REQUIRED if key.default == REQUIRED else f"default {key.default}")
    text = f"{key.text} [{'; '.join(facts)}]" if facts else key.text
    lead = f"{indent}# "
    yield from textwrap.wrap(
        text, _WIDTH, initial_indent=lead, subsequent_indent=lead, break_on_hyphens=False
    )


def _entry(name: str, value: Any, dumped: Any, indent: str) -> Iterator[str]:
    """A key with its value: sections with comments of their own, everything else as plain YAML."""
    inner = indent + "  "
    if isinstance(value, BaseModel) and isinstance(dumped, dict) and dumped:
        yield f"{indent}{name}:"
        yield from _section(value, dumped, inner)
    elif isinstance(value, Mapping) and any(isinstance(v, BaseModel) for v in value.values()):
        yield f"{indent}{name}:"
        for each in dumped:
            yield from _entry(each, value[each], dumped[each], inner)
    elif isinstance(value, tuple) and any(isinstance(v, BaseModel) for v in value):
        yield f"{indent}{name}:"
        for each, plain in zip(value, dumped, strict=True):
            first, *rest = _section(each, plain, "")
            yield f"{inner}- {first}"
            yield from (f"{inner}  {line}" for line in rest)
    else:
        text = yaml.safe_dump({name: dumped}, sort_keys=False, allow_unicode=True)
        yield from textwrap.indent(text, indent).splitlines()
