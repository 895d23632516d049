"""Arrays in one run of bytes: where each begins, and whether such a description can be true.

Element types and kinds stand by their names, so that torch, numpy and the wire read one plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

ALIGNMENT_BYTES = 64
"""Every array of a payload begins on a cache line, so that it can be viewed in place."""

ITEM_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float64": 8,
    "int64": 8,
    "int32": 4,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of one element, by the name of its type. Other types do not travel."""

ROW = "row"
"""The kind of a column with one value a row. Columns of every other kind carry offsets."""

WIDE_KINDS = ("sequence", "completion")
"""Kinds whose values may have several elements each."""

MAX_WIDTH = 1024
"""Most elements of a value. A bound on what a few bytes of a header can ask for."""

OFFSET_BYTES = 8
"""Offsets are int64."""


class ColumnMissingError(ValueError):
    """A batch lacks a column that is asked for; it has `column`, the missing one's name."""

    def __init__(self, column: str, known: Iterable[str]) -> None:
        super().__init__(
            f"column {column!r} is missing; the experience has {sorted(known)}: "
            "call the role that produces it first"
        )
        self.column = column


def aligned(num_bytes: int) -> int:
    """The number of bytes, rounded up to the next boundary."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class ColumnLayout:
    """Where one column lies in a payload."""

    name: str
    kind: str
    """How values relate to rows: "row", "sequence", "completion" or "text"."""
    dtype: str
    """Element type, a key of ITEM_BYTES."""
    num_values: int
    values_at: int
    """Byte offset of the packed values."""
    offsets_at: int | None
    """Byte offset of the int64 [rows + 1] offsets, None for ROW."""
    width: int = 1
    """Elements of each value, which lie one behind the other."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all values."""
        return self.num_values * self.width * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class PayloadLayout:
    """Where every column of a batch lies in one run of bytes.

    Invariant: every array begins on a boundary and ends within num_bytes, no two overlap, the
    counts fit the kinds, and no name comes twice. A layout that says otherwise cannot be made:
    ValueError.

    Example: two rows of float32 rewards and a text of 5 bytes in all are
    `plan_payload(2, [("rewards", "row", "float32", 1, 2), ("text", "text", "uint8", 1, 5)])`:
    rewards at byte 0, the offsets of the text at 64, its bytes at 128, and 192 bytes in all.
    """

    num_rows: int
    columns: tuple[ColumnLayout, ...]
    num_bytes: int

    def __post_init__(self) -> None:
        for column in self.columns:
            most = MAX_WIDTH if column.kind in WIDE_KINDS else 1
            if not 1 <= column.width <= most:
                raise ValueError(
                    f"column {column.name!r} of kind {column.kind} has a width of {column.width}: "
                    f"give 1 to {most}"
                )
            for at, length in self.extents(column):
                if length < 0 or at < 0 or at % ALIGNMENT_BYTES or at + length > self.num_bytes:
                    raise ValueError(
                        f"column {column.name!r} claims bytes {at} to {at + length} of a payload "
                        f"of {self.num_bytes} bytes: bytes and shape do not fit"
                    )
        if self.num_rows < 0 or self.num_bytes < 0 or not self.columns:
            raise ValueError(
                f"a payload claims {self.num_rows} rows and {self.num_bytes} bytes in "
                f"{len(self.columns)} columns: it needs at least one column, and sizes >= 0"
            )
        for column in self.columns:
            is_row = column.kind == ROW
            if (column.offsets_at is None) != is_row:
                raise ValueError(
                    f"column {column.name!r} of kind {column.kind} "
                    + ("must not have offsets" if is_row else "lacks offsets")
                )
            if is_row and column.num_values != self.num_rows:
                raise ValueError(
                    f"column {column.name!r} has {column.num_values} values for "
                    f"{self.num_rows} rows"
                )
        if len({column.name for column in self.columns}) != len(self.columns):
            raise ValueError("a payload names a column twice")
        # Few bytes that many columns share would become many bytes when each is held by itself.
        extents = sorted(
            (at, at + length, column.name)
            for column in self.columns
            for at, length in self.extents(column)
            if length
        )
        for (_, end, name), (at, _, other) in itertools.pairwise(extents):
            if at < end:
                raise ValueError(
                    f"columns {name!r} and {other!r} overlap at byte {at}: give each array bytes "
                    "of its own"
                )

    def extents(self, column: ColumnLayout) -> Iterator[tuple[int, int]]:
        """First byte and number of bytes of a column's values, then of its offsets if any."""
        yield column.values_at, column.num_bytes
        if column.offsets_at is not None:
            yield column.offsets_at, (self.num_rows + 1) * OFFSET_BYTES


def plan_payload(num_rows: int, columns: Iterable[tuple[str, str, str, int, int]]) -> PayloadLayout:
    """Lays columns out one after another, each array on a boundary, offsets before values.

    Args:
        num_rows: Of every column.
        columns: Name, kind, element type, elements of a value and number of values of each.

    Raises:
        ValueError: An element type that may not travel; names the column.
    """
    placed, at = [], 0
    for name, kind, dtype, width, num_values in columns:
        if dtype not in ITEM_BYTES:
            raise ValueError(
                f"column {name!r} has dtype {dtype}, which may not travel: use one of "
                f"{sorted(ITEM_BYTES)}"
            )
        offsets_at = None
        if kind != ROW:
            offsets_at, at = at, aligned(at + (num_rows + 1) * OFFSET_BYTES)
        placed.append(ColumnLayout(name, kind, dtype, num_values, at, offsets_at, width))
        at = aligned(at + placed[-1].num_bytes)
    return PayloadLayout(num_rows, tuple(placed), at)
