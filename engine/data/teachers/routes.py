"""Which rows of a batch one of several teachers scores: see `specs.TeacherRouteSpec`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rolemesh.engine.data.rows import DataInvalidError
from rolemesh.engine.nested import lacking
from rolemesh.engine.specs import LEFT, routed_value


@dataclass(frozen=True, slots=True)
class RowRoute:
    """The rows of one teacher, by a value of their metadata.

    Example: with the field "domain", the weights {"math": 1.0} and the values "code" left to
    others, a row of domain "code" is left, and one of domain "law" refused.
    """

    field: str
    """Place of the value in the metadata; empty: rows have no value."""
    weights: Mapping[str, float]
    """What the teacher counts for, by the value."""
    left: frozenset[str]
    """Values whose rows are left to others."""
    others: float | Literal["left"] | None
    """Weight of all other rows; None: they are refused."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that it reads of a batch."""
        return ("metadata",) if self.field else ()

    def of(self, metadata: Sequence[str] | None, num_rows: int) -> dict[int, float]:
        """The rows that are not left to others, ascending, each with its weight.

        Args:
            metadata: JSON objects, one a row; None where the route reads none.
            num_rows: Rows of the batch.

        Raises:
            DataInvalidError: A row has a value of which the route says nothing; names the row.
        """
        found: dict[int, float] = {}
        for row in range(num_rows):
            weight = self.others
            if metadata is not None and self.field:
                weight = self._weight(metadata[row], row)
            if weight is None:
                raise DataInvalidError(
                    f"row {row} of the experience goes to no teacher: give teacher.route.default"
                )
            if weight != LEFT:
                found[row] = weight
        return found

    def _weight(self, metadata: str, row: int) -> float | Literal["left"]:
        value = routed_value(metadata, self.field)
        if value is not None and value in self.weights:
            return self.weights[value]
        if value in self.left:
            return LEFT
        if self.others is not None:
            return self.others
        known = ", ".join(map(repr, sorted({*self.weights, *self.left})))
        if value is None:
            said = f"no metadata.{self.field} ({lacking(json.loads(metadata or '{}'), self.field)})"
        else:
            said = f"{value!r} as its metadata.{self.field}, and teacher.route.to has {known}"
        raise DataInvalidError(
            f"row {row} of the experience has {said}: add the value to teacher.route.to, or give "
            "teacher.route.default for all others"
        )
