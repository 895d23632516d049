"""Settings of another system, as one flat mapping that knows which of them have been read."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal, TypeVar

import yaml

from rolemesh.engine.specs.urls import masked_url

T = TypeVar("T")

SystemName = Literal["trl", "openrlhf", "verl"]

TITLES: Mapping[SystemName, str] = {"trl": "TRL", "openrlhf": "OpenRLHF", "verl": "verl"}


class ImportedError(ValueError):
    """No recipe can be made of the settings. The text names field and value, and a remedy."""


class Unresolved(str):
    """A text with a part that is known only where the other system runs, e.g. "${NNODES}"."""


ANY = object()
"""A default of fields of which no value asks for anything."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What is said of fields without a counterpart."""

    why: str
    pattern: str
    """Name of a field, or of several: "*.param_offload"."""
    default: Any = None
    has_default: bool = False
    """Whether a value that is equal to the default asks for nothing; ANY is equal to all."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """What is known of a system's fields, beside the table."""

    defaults: Mapping[str, Any]
    """Of fields that have a counterpart."""
    renamed: Mapping[str, str]
    """Other names of fields, of earlier versions and of other back ends."""
    always: Mapping[str, Any]
    """Values of fields without a counterpart that are so here in any case, by pattern."""
    rules: Sequence[Rule]
    """Of fields without a counterpart; the first that fits counts."""


@cache
def known(system: SystemName, trainer: str = "") -> Known:
    """The facts in <system>.yaml; a trainer may have defaults of its own there."""
    text = files(__package__).joinpath(f"{system}.yaml").read_text(encoding="utf-8")
    read = yaml.safe_load(text)
    rules = [
        Rule(one["why"], pattern, default, has_default)
        for one in read["absent"]
        for pattern, default, has_default in (
            *((name, None, False) for name in one.get("names", ())),
            *((name, default, True) for name, default in one.get("defaults", {}).items()),
            *((name, ANY, True) for name in one.get("any", ())),
        )
    ]
    defaults = {**read["defaults"], **read.get(trainer, {})}
    return Known(defaults=defaults, renamed=read["renamed"], always=read["always"], rules=rules)


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """What was given and has no place in a recipe."""

    reasons: dict[str, str]
    """By field that has no counterpart."""
    at_default: list[str]
    """Fields with the system's default, which ask for nothing."""
    as_here: list[str]
    """Fields with a value that is so here in any case."""


class Source:
    """Settings of another system that a user gave.

    Invariant: each field that was given is in the end one that was read, one that was lost with a
    reason, one at the default of its system, or one that is not known.
    """

    def __init__(
        self,
        system: SystemName,
        values: Mapping[str, Any],
        *,
        notes: Sequence[str] = (),
        options: Mapping[str, int] | None = None,
    ) -> None:
        """Takes the fields that were given, by their own names or earlier ones."""
        self.system: SystemName = system
        self.known = known(system)
        self.given_notes = tuple(notes)
        """Of reading the settings."""
        self.notes_here: list[str] = []
        """Remarks on what became of them."""
        self._asked = dict(options or {})
        self.options = dict(self._asked)
        self._values: dict[str, Any] = {}
        self._shown: dict[str, str] = {}
        self._used: set[str] = set()
        self.lost: dict[str, str] = {}
        """Reasons by field."""
        self._made: dict[Callable[[Source], Any], Any] = {}
        for name, value in values.items():
            self._add(name, value)

    def _add(self, name: str, value: Any) -> None:
        new = self.known.renamed.get(name, name)
        for old, later in self.known.renamed.items():
            if old.endswith(".*") and name.startswith(old[:-1]):
                new = later[:-1] + name.removeprefix(old[:-1])
        if self._values.get(new) is not None and new != name:
            # A newer name counts before an older one; null asks for nothing.
            if value is not None:
                self._shown[name] = name
                self._values[name] = value
                self.lose(name, f"{self.name_of(new)} is given, too, and is taken")
            return
        if new in self._values and value is None:
            return
        self._values[new] = value
        self._shown[new] = name

    def once(self, make: Callable[[Source], T]) -> T:
        """What a function makes of the source; made at the first call."""
        if make not in self._made:
            self._made[make] = make(self)
        made: T = self._made[make]
        return made

    def say(self, remark: str) -> None:
        """Remarks on what becomes of the settings, once."""
        if remark not in self.notes_here:
            self.notes_here.append(remark)

    @property
    def title(self) -> str:
        """Name of the system for people."""
        return TITLES[self.system]

    def name_of(self, field: str) -> str:
        """A field as the user wrote it."""
        name = self._shown.get(field, field)
        return f"--{name}" if self.system == "openrlhf" else name

    def given(self, field: str) -> bool:
        """Whether the user gave the field a value."""
        return self._values.get(field) is not None

    def fields(self) -> Iterator[tuple[str, Any]]:
        """All that was given."""
        yield from self._values.items()

    def get(self, field: str) -> Any:
        """The value as given, else the system's default; the field then counts as read."""
        self._used.add(field)
        value = self._values.get(field)
        return self.known.defaults.get(field) if value is None else value

    def without(self, field: str) -> Source:
        """The same settings, of which the user has left this one out."""
        others = {name: value for name, value in self._values.items() if name != field}
        made = Source(self.system, others, options=self._asked)
        made.known = self.known
        return made

    def read_and_given(self) -> list[str]:
        """Fields that were read, with a value that is neither lost nor the default."""
        return [
            field
            for field, value in self._values.items()
            if field in self._used
            and field not in self.lost
            and value is not None
            and not self.is_default(field)
        ]

    def is_default(self, field: str) -> bool:
        """Whether a field that has a counterpart was given its system's default."""
        defaults = self.known.defaults
        return field in defaults and _same(self._values.get(field), defaults[field])

    def was_read(self, field: str) -> bool:
        """Whether something has taken the field's value."""
        return field in self._used

    def lose(self, field: str, why: str) -> None:
        """Says why a value that was given has no counterpart."""
        if field in self._values:
            self.lost.setdefault(field, why)

    def _typed(self, field: str, what: str, read: Callable[[Any], T]) -> T | None:
        value = self.get(field)
        if value is None:
            return None
        if isinstance(value, Unresolved):
            self.lose(field, "the value is not known here: set what it is for by hand")
            value = self.known.defaults.get(field)
            return None if value is None else read(value)
        try:
            return read(value)
        except (TypeError, ValueError, OverflowError):
            raise ImportedError(
                f"{self.name_of(field)} is {value!r}: give {what}, or leave it out"
            ) from None

    def number(self, field: str) -> float | None:
        """A number, also one that is written 1e-6."""
        return self._typed(field, "a number", _number)

    def whole(self, field: str) -> int | None:
        """A whole number."""
        return self._typed(field, "a whole number", _whole)

    def flag(self, field: str) -> bool:
        """Whether something is on."""
        return bool(self._typed(field, "true or false", _flag))

    def text(self, field: str) -> str | None:
        """A text, where nothing in it is unknown."""
        value = self.get(field)
        if isinstance(value, Unresolved):
            self.lose(field, "the value is not known here: set what it is for by hand")
            return None
        return None if value is None else str(value)

    def known_part(self, field: str) -> str:
        """What is known of a text, without the parts that are not."""
        return re.sub(r"\$(\{[^}]*\}|\([^)]*\)|\w+)", "", str(self.get(field) or ""))

    def texts(self, field: str) -> list[str]:
        """One text, several in a list, or several that commas part."""
        value = self.get(field)
        if isinstance(value, Unresolved):
            self.lose(field, "the value is not known here: set what it is for by hand")
            return []
        if value is None:
            return []
        items = value if isinstance(value, list | tuple) else str(value).split(",")
        return [str(item).strip() for item in items if str(item).strip()]

    def numbers(self, field: str) -> list[float]:
        """Several numbers, or one."""

        def read(given: Any) -> list[float]:
            return [_number(one) for one in (given if isinstance(given, list | tuple) else [given])]

        return self._typed(field, "numbers", read) or []

    def leftover(self, in_table: set[str]) -> Leftover:
        """What is left when all has been read.

        Args:
            in_table: Fields that the table has.
        """
        reasons, at_default, as_here = dict(self.lost), list[str](), list[str]()
        for field, value in self._values.items():
            if field in reasons or field in self._used:
                continue
            rule = next((r for r in self.known.rules if fnmatch.fnmatch(field, r.pattern)), None)
            own = self.known.defaults.get(field, rule.default if rule else None)
            has_default = field in self.known.defaults or (rule is not None and rule.has_default)
            if value is None or (has_default and _same(value, own)):
                at_default.append(field)
            elif any(
                fnmatch.fnmatch(field, pattern) and _same(value, here)
                for pattern, here in self.known.always.items()
            ):
                as_here.append(field)
            elif rule is not None:
                reasons[field] = rule.why
            elif field in in_table:
                reasons[field] = "nothing reads it with what else is given here"
            else:
                reasons[field] = "not known to the importer: look for it by hand"
        return Leftover(reasons=reasons, at_default=at_default, as_here=as_here)

    def shown_value(self, field: str) -> str:
        """A value for a comment, in one line; of a secret nothing."""
        value = self._values.get(field)
        if isinstance(value, str) and field.lower().endswith(_SECRETS) and value:
            return "(a secret, left out)"
        text = masked_url(" ".join(str(value).split()))
        return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


_LONGEST = 120
_SECRETS = ("token", "password", "secret", "api_key", "wandb.key")
"""Ends of names of fields that hold one."""


def _number(value: Any) -> float:
    if value is True:
        raise TypeError
    # verl's own scripts write False for an interval that is off.
    return float(value)


def _whole(value: Any) -> int:
    number = _number(value)
    if number != int(number):
        raise ValueError
    return int(number)


def _flag(value: Any) -> bool:
    if isinstance(value, str):
        word = value.lower()
        if word in ("true", "1", "yes", "on"):
            return True
        if word in ("false", "0", "no", "off", "none", "null", ""):
            return False
        raise ValueError
    return bool(value)


def _same(value: Any, default: Any) -> bool:
    """Whether a value is the default, however it is written: "1e-6", 1.0E-06 and 0.000001."""
    if default is ANY or value == default:
        return True
    if isinstance(default, bool):
        return str(value).lower() == str(default).lower()
    if isinstance(default, int | float) and not isinstance(value, bool):
        try:
            return float(value) == float(default)
        except (TypeError, ValueError):
            return False
    return str(value) in ("None", "null") if default is None else str(value) == str(default)
