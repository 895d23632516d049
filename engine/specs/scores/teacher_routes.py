"""Which of several teachers score a row, and how much each of them counts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from rolemesh.engine.nested import lacking, value_of
from rolemesh.engine.specs.base import Spec

_METADATA = "metadata."

MOST_TEACHERS = 8
"""Teachers that may score one row."""

TeacherName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9]{0,23}$")]
"""Part of the names of services and containers, so letters and digits alone."""

TeacherWeight = Annotated[float, Field(gt=0, allow_inf_nan=False)]

TeacherShares = TeacherName | dict[TeacherName, TeacherWeight]
"""One teacher, or several with a weight each."""

LEFT: Final = "left"
"""In the place of the weight of rows that other teachers score."""


@dataclass(frozen=True, slots=True)
class RouteShare:
    """Rows that one teacher scores, as one voice of several that a row may have.

    A weight is 0 where a row has fewer voices than another one: its numbers are 0 then.
    """

    teacher: str
    field: str
    """Place of the value in the metadata; empty: rows have no value."""
    weights: Mapping[str, float]
    """By the value."""
    left: tuple[str, ...]
    """Values whose rows are left to others."""
    others: float | Literal["left"] | None
    """Weight of rows with another value, or none; None: they are refused."""


class TeacherRouteSpec(Spec):
    """Which teachers score a row: by a value of the row's metadata, or the same ones for all.

    Where several score a row, the loss of its tokens (or their advantage) is the mean over these
    teachers by weight.
    """

    by: str | None = None
    """metadata.NAME, a column of the data; dots lead into objects. None: all rows have default."""
    to: dict[str, TeacherShares] = Field(default_factory=dict)
    """For each value the name of a teacher, or several with their weights, e.g. {math: t1, code:
    {t1: 0.3, t2: 0.7}}. Weights count by their ratio. A value that is no text is written as its
    JSON."""
    default: TeacherShares | None = None
    """The same for rows with another value, or none. None: such a row ends the step."""

    @field_validator("by")
    @classmethod
    def _check_by(cls, by: str | None) -> str | None:
        if by is not None and not re.fullmatch(r"metadata\.[^\s].*", by):
            raise ValueError(
                f"{by!r} is no place in a row's metadata: give metadata.NAME, where NAME is a "
                "column of the data"
            )
        return by

    @model_validator(mode="after")
    def _check_values(self) -> Self:
        if (self.by is None) != (not self.to):
            given, absent = ("to", "by") if self.by is None else ("by", "to")
            raise ValueError(
                f"{given} is given without {absent}: give both, or default alone for all rows"
            )
        if self.by is None and self.default is None:
            raise ValueError("no row goes to a teacher: give by and to, or default")
        for value, shares in self._places().items():
            if not 1 <= len(_weights(shares)) <= MOST_TEACHERS:
                raise ValueError(
                    f"{'default' if value is None else f'to.{value}'} has "
                    f"{len(_weights(shares))} teachers: give 1 to {MOST_TEACHERS}"
                )
        return self

    def teachers_of(self, value: str | None) -> tuple[str, ...]:
        """Teachers of a row; none where it goes to nobody.

        Args:
            value: Its value; None where it has none.
        """
        shares = self.default if value is None else self.to.get(value, self.default)
        return () if shares is None else tuple(_weights(shares))

    @property
    def field(self) -> str:
        """Place of the value in the metadata; empty where all rows have default."""
        return "" if self.by is None else self.by.removeprefix(_METADATA)

    @property
    def names(self) -> tuple[str, ...]:
        """Teachers that score rows, each once."""
        return tuple(
            dict.fromkeys(name for one in self._places().values() for name in _weights(one))
        )

    @property
    def most_teachers(self) -> int:
        """Teachers that score one row, at most."""
        return max(len(_weights(shares)) for shares in self._places().values())

    def voices(self) -> tuple[tuple[RouteShare, ...], ...]:
        """For each voice of a row the teachers that have it, each with its rows.

        The first voice of each row is the first teacher of its value, and so on. All rows have as
        many voices: where one has fewer teachers, a teacher of other rows gives it weight 0.
        """
        voices = []
        for number in range(self.most_teachers):
            given = {value: _voice(shares, number) for value, shares in self._places().items()}
            names = tuple(dict.fromkeys(one[0] for one in given.values() if one is not None))
            spoken = {value: one or (names[0], 0.0) for value, one in given.items()}
            voices.append(tuple(self._share(name, spoken) for name in names))
        return tuple(voices)

    def _share(self, name: str, spoken: Mapping[str | None, tuple[str, float]]) -> RouteShare:
        others: float | Literal["left"] | None = None
        if None in spoken:
            teacher, weight = spoken[None]
            others = weight if teacher == name else LEFT
        of_values = {value: voice for value, voice in spoken.items() if value is not None}
        return RouteShare(
            teacher=name,
            field=self.field,
            weights={
                value: weight for value, (teacher, weight) in of_values.items() if teacher == name
            },
            left=tuple(value for value, (teacher, _) in of_values.items() if teacher != name),
            others=others,
        )

    def _places(self) -> dict[str | None, TeacherShares]:
        """Shares by value; None stands for all other rows."""
        found: dict[str | None, TeacherShares] = dict(self.to.items())
        if self.default is not None:
            found[None] = self.default
        return found


def _weights(shares: TeacherShares) -> Mapping[str, float]:
    return {shares: 1.0} if isinstance(shares, str) else shares


def _voice(shares: TeacherShares, number: int) -> tuple[str, float] | None:
    """A voice of a row: its teacher, and what it counts for; None where it has fewer teachers."""
    weights = _weights(shares)
    names = list(weights)
    if number >= len(names):
        return None
    return names[number], weights[names[number]] / sum(weights.values())


def routed_value(metadata: str, field: str) -> str | None:
    """The value by which a row is routed; None where it has none.

    Args:
        metadata: A JSON object, or nothing.
        field: Place of the value in it.
    """
    record = json.loads(metadata or "{}")
    if lacking(record, field):
        return None
    value = value_of(record, field)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
