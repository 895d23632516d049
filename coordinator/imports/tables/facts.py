"""What the settings of three other systems are called here, as facts: a row of a page, and code.

A topic is a table of the page docs/from-others.md. Its facts also make recipes: each takes a value
from what is given, and puts it where it belongs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from pydantic import BaseModel

from rolemesh.coordinator.imports.draft import Draft
from rolemesh.coordinator.imports.source import Source, SystemName
from rolemesh.coordinator.recipe.algorithm.algorithms import AlgorithmSpec
from rolemesh.engine.specs import OwnFunctionSpec

Kind = Literal["whole", "number", "flag", "text"]
Take = Callable[[Source], Any]
Put = Callable[[Draft, Any], None]

_VERL_PREFIX = "actor_rollout_ref."


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What one system calls something."""

    fields: tuple[str, ...] = ()
    """Fields by their whole names."""
    text: str = ""
    """Markdown in which {0} is the first field; empty: the fields with commas."""
    take: Take | None = None
    """Gives the value as a recipe has it, or None for none. None: the only field as it is."""

    def markdown(self, system: SystemName) -> str:
        """The cell of the page."""
        prefix = "--" if system == "openrlhf" else ""
        names = [f"`{prefix}{name.removeprefix(_VERL_PREFIX)}`" for name in self.fields]
        return self.text.format(*names) if self.text else ", ".join(names)


EMPTY = Cell()


def cell(*fields: str, text: str = "", take: Take | None = None) -> Cell:
    """A cell with fields."""
    return Cell(fields=fields, text=text, take=take)


def words(text: str) -> Cell:
    """A cell that says something, and has no field."""
    return Cell(text=text)


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One setting, by the names that it has in three systems and here."""

    what: str
    target: str = ""
    """Key of a recipe that the value is put at; empty: `put` does it, or nothing can."""
    here: str = ""
    """Markdown; empty: the target."""
    kind: Kind = "number"
    trl: Cell = EMPTY
    openrlhf: Cell = EMPTY
    verl: Cell = EMPTY
    take: Take | None = None
    """In the place of all cells' own."""
    put: Put | None = None
    """In the place of setting the target."""
    is_shown: bool = True
    """Whether the page has a row of it."""

    def cell(self, system: SystemName) -> Cell:
        """What a system calls it."""
        found: Cell = getattr(self, system)
        return found

    def row(self) -> tuple[str, ...]:
        """The row of the page."""
        cells = (self.cell(system).markdown(system) for system in get_args(SystemName))
        return (self.what, *cells, self.here or f"`{self.target}`")

    def apply(self, source: Source, draft: Draft) -> None:
        """Takes the value and puts it into the recipe."""
        own = self.cell(source.system)
        take = self.take or own.take
        why = self.target and unsupported(draft, self.target)
        if why:
            for name in own.fields:
                if not source.was_read(name) and not source.is_default(name):
                    source.lose(name, why)
            return
        if take is None:
            if len(own.fields) != 1 or not (self.target or self.put):
                return
            value = getattr(source, self.kind)(own.fields[0])
        else:
            value = take(source)
        if value is None:
            return
        if self.put is not None:
            self.put(draft, value)
        else:
            draft.put(self.target, value)


@dataclass(frozen=True, kw_only=True)
class Topic:
    """A table of the page."""

    title: str
    facts: Sequence[Fact] = field(default_factory=tuple)

    def fields(self, system: SystemName) -> Iterator[str]:
        """Names of a system's fields that the topic has."""
        for fact in self.facts:
            yield from fact.cell(system).fields

    def table(self) -> str:
        """Markdown."""
        head = ("what", "TRL", "OpenRLHF", "verl", "here")
        rows = [head, *(fact.row() for fact in self.facts if fact.is_shown)]
        lines = ["|" + "|".join(f" {one} " if one else " " for one in row) + "|" for row in rows]
        return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]]) + "\n"


def unsupported(draft: Draft, target: str) -> str:
    """Why a recipe with the draft's algorithm cannot have a key; empty: it can."""
    kind = draft.get("algorithm.type")
    top, *keys = target.split(".")
    if top == "critic" and kind != "ppo":
        return f"algorithm {kind} has no critic"
    if top != "algorithm" or not keys:
        return ""
    node: Any = next(one for one in _variants(AlgorithmSpec) if _type_of(one) == kind)
    path = "algorithm"
    for key in keys:
        info = node.model_fields.get(key)
        if info is None:
            name = draft.get(f"{path}.type") or _type_of(node)
            return f"{path} of type {name} has no key {key}"
        path = f"{path}.{key}"
        node = _chosen(info.annotation, draft.get(f"{path}.type"))
        if node is None:
            return ""
    return ""


def _chosen(annotation: Any, kind: str | None) -> type[BaseModel] | None:
    """The section of an annotation: of this type, else the only one of ours."""
    found = [one for one in _variants(annotation) if not issubclass(one, OwnFunctionSpec)]
    return next((one for one in found if _type_of(one) == kind), found[0] if found else None)


def _variants(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [model for part in get_args(annotation) for model in _variants(part)]


def _type_of(section: type[BaseModel]) -> str:
    info = section.model_fields.get("type")
    return "" if info is None else str(info.default)
