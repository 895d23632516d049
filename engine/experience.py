"""Ragged, columnar batches of trajectories.

Nothing here is padded. Shape letters: B rows, N all completion tokens of the batch,
S all tokens (prompt and completion) of the batch. Alignment: `values[t]`, `logprobs[t]`,
`rewards[t]` belong to the state before completion token t.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rolemesh.engine.layout.payload import (
    WIDE_KINDS,
    ColumnMissingError,
    PayloadLayout,
    plan_payload,
)
from rolemesh.engine.specs.columns import COLUMNS


class ColumnKind(enum.Enum):
    """How the values of a column relate to rows."""

    ROW = "row"
    """One value a row."""
    SEQUENCE = "sequence"
    """One value for each token of prompt and completion."""
    COMPLETION = "completion"
    """One value for each completion token."""
    TEXT = "text"
    """UTF-8 bytes of a row."""


@dataclass(frozen=True, slots=True)
class Column:
    """One packed column.

    Attributes:
        kind: how values relate to rows.
        values: contiguous, on the CPU or a device: 1-D, or [values, K] where each value of a
            SEQUENCE or COMPLETION column has K elements.
        offsets: int64 [B + 1] for every kind but ROW: row b owns
            values[offsets[b]:offsets[b + 1]]. None for ROW.
    """

    kind: ColumnKind
    values: torch.Tensor
    offsets: torch.Tensor | None = None

    def __post_init__(self) -> None:
        most = 2 if self.kind.value in WIDE_KINDS else 1
        if not 1 <= self.values.dim() <= most:
            raise ValueError(
                f"values of a {self.kind.value} column have {self.values.dim()} dimensions: pack "
                "them into one" + (", or two where each has several elements" if most > 1 else "")
            )
        if (self.kind is ColumnKind.ROW) != (self.offsets is None):
            raise ValueError(f"a {self.kind.value} column and its offsets do not go together")
        if self.offsets is None:
            return
        if self.offsets.dtype != torch.int64 or self.offsets.dim() != 1 or len(self.offsets) < 1:
            raise ValueError("offsets must be int64 and one-dimensional, with B + 1 entries")
        if int(self.offsets[0]) != 0 or int(self.offsets[-1]) != len(self.values):
            raise ValueError(
                f"offsets run from {int(self.offsets[0])} to {int(self.offsets[-1])}, but must "
                f"run from 0 to the number of values, {len(self.values)}"
            )
        if bool((self.offsets[1:] < self.offsets[:-1]).any()):
            raise ValueError("offsets decrease: row lengths must not be negative")

    @property
    def num_rows(self) -> int:
        """Rows in the column."""
        return len(self.values) if self.offsets is None else len(self.offsets) - 1

    @property
    def width(self) -> int:
        """Elements of each value."""
        return 1 if self.values.dim() == 1 else self.values.shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes of values and offsets."""
        offsets = 0 if self.offsets is None else self.offsets.nbytes
        return self.values.nbytes + offsets

    def lengths(self) -> torch.Tensor:
        """int64 [B], values in each row (1 for a ROW column)."""
        if self.offsets is None:
            return torch.ones(len(self.values), dtype=torch.int64)
        return self.offsets[1:] - self.offsets[:-1]

    def select(self, rows: torch.Tensor) -> Column:
        """The given rows in the given order; rows is int64 [K]."""
        if self.offsets is None:
            return Column(self.kind, self.values[rows])
        lengths = self.lengths()[rows]
        offsets = offsets_of(lengths)
        starts = self.offsets[:-1][rows] - offsets[:-1]
        index = torch.arange(int(offsets[-1])) + torch.repeat_interleave(starts, lengths)
        return Column(self.kind, self.values[index], offsets)

    def slice(self, start: int, stop: int) -> Column:
        """Rows start..stop-1 as a view."""
        if self.offsets is None:
            return Column(self.kind, self.values[start:stop])
        first, last = int(self.offsets[start]), int(self.offsets[stop])
        return Column(self.kind, self.values[first:last], self.offsets[start : stop + 1] - first)

    def rows(self) -> Iterator[torch.Tensor]:
        """The values of each row, as views."""
        if self.offsets is None:
            yield from self.values.unbind()
            return
        edges = self.offsets.tolist()
        for first, last in itertools.pairwise(edges):
            yield self.values[first:last]

    @staticmethod
    def concat(columns: Sequence[Column]) -> Column:
        """Stacks the rows of columns of one kind and dtype."""
        kinds = {(column.kind, column.values.dtype, column.width) for column in columns}
        if len(kinds) != 1:
            raise ValueError(
                f"columns of different kinds cannot be stacked: {sorted(map(str, kinds))}"
            )
        values = torch.cat([column.values for column in columns])
        if columns[0].offsets is None:
            return Column(columns[0].kind, values)
        lengths = torch.cat([column.lengths() for column in columns])
        return Column(columns[0].kind, values, offsets_of(lengths))

    @staticmethod
    def ragged(
        kind: ColumnKind, rows: Sequence[Sequence[float] | torch.Tensor], dtype: torch.dtype
    ) -> Column:
        """Packs one list or tensor a row."""
        tensors = [torch.as_tensor(row, dtype=dtype) for row in rows]
        lengths = torch.tensor([len(row) for row in tensors], dtype=torch.int64)
        values = torch.cat(tensors) if tensors else torch.empty(0, dtype=dtype)
        return Column(kind, values, offsets_of(lengths))

    @staticmethod
    def named(name: str, rows: Sequence[Any]) -> Column:
        """The column of that name, of the kind and dtype that `specs.columns.COLUMNS` states.

        Args:
            name: One of that table.
            rows: For each row a number, a list of numbers or a text, as the kind of the column is.
        """
        kind, dtype = ColumnKind(COLUMNS[name].kind), getattr(torch, COLUMNS[name].dtype)
        if kind is ColumnKind.TEXT:
            return Column.text(rows)
        if kind is ColumnKind.ROW:
            return Column(kind, torch.tensor(rows, dtype=dtype))
        return Column.ragged(kind, rows, dtype)

    @staticmethod
    def text(rows: Sequence[str]) -> Column:
        """Packs strings as UTF-8."""
        encoded = [row.encode() for row in rows]
        lengths = torch.tensor([len(row) for row in encoded], dtype=torch.int64)
        joined = bytearray(b"".join(encoded))
        values = (
            torch.frombuffer(joined, dtype=torch.uint8)
            if joined
            else torch.empty(0, dtype=torch.uint8)
        )
        return Column(ColumnKind.TEXT, values, offsets_of(lengths))

    def strings(self) -> list[str]:
        """The rows of a TEXT column."""
        if self.kind is not ColumnKind.TEXT:
            raise ValueError(f"a {self.kind.value} column holds no text")
        return [row.numpy().tobytes().decode() for row in self.rows()]


class Experience:
    """A batch of trajectories: named columns over the same rows.

    Immutable by convention: methods return new batches that share storage where they can.

    Example: two trajectories, prompt lengths 2 and 1, completion lengths 1 and 3::

        Experience({
            "tokens": Column(SEQUENCE, tensor([5, 6, 7, 8, 9, 10, 11]), tensor([0, 3, 7])),
            "prompt_lengths": Column(ROW, tensor([2, 1])),
            "logprobs": Column(COMPLETION, tensor([-.1, -.2, -.3, -.4]), tensor([0, 1, 4])),
        })
    """

    def __init__(self, columns: Mapping[str, Column]) -> None:
        if not columns:
            raise ValueError("an experience needs at least one column")
        counts = {name: column.num_rows for name, column in columns.items()}
        if len(set(counts.values())) != 1:
            raise ValueError(f"columns disagree on the number of rows: {counts}")
        self._columns = dict(columns)
        self.num_rows = next(iter(counts.values()))
        self._check_token_counts()

    @staticmethod
    def of_rows(columns: Mapping[str, Sequence[Any]]) -> Experience:
        """A batch of plain Python values; see `Column.named`."""
        return Experience({name: Column.named(name, rows) for name, rows in columns.items()})

    def _check_token_counts(self) -> None:
        """Completion columns must agree with each other and with tokens and prompt_lengths."""
        expected: tuple[str, torch.Tensor] | None = None
        if "tokens" in self._columns and "prompt_lengths" in self._columns:
            lengths = self._columns["tokens"].lengths() - self._columns["prompt_lengths"].values
            expected = ("tokens - prompt_lengths", lengths)
        for name, column in self._columns.items():
            if column.kind is not ColumnKind.COMPLETION:
                continue
            if expected is None:
                expected = (name, column.lengths())
            elif not torch.equal(expected[1], column.lengths()):
                raise ValueError(
                    f"column {name!r} and {expected[0]!r} disagree on completion lengths"
                )

    def __getitem__(self, name: str) -> Column:
        """The column of that name; raises ColumnMissingError."""
        try:
            return self._columns[name]
        except KeyError:
            raise ColumnMissingError(name, self._columns) from None

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __len__(self) -> int:
        return self.num_rows

    def __repr__(self) -> str:
        return f"Experience(rows={self.num_rows}, columns={sorted(self._columns)})"

    def __or__(self, other: Experience) -> Experience:
        """Joins columns over the same rows; a column of `other` replaces one of the same name."""
        if self.num_rows != other.num_rows:
            raise ValueError(f"cannot join {self.num_rows} rows with {other.num_rows} rows")
        return Experience({**self._columns, **other.columns})

    @property
    def columns(self) -> Mapping[str, Column]:
        """All columns by name."""
        return self._columns

    @property
    def num_bytes(self) -> int:
        """Bytes of all columns."""
        return sum(column.num_bytes for column in self._columns.values())

    @property
    def num_tokens(self) -> int:
        """Tokens of prompts and completions, 0 without a tokens column."""
        return len(self._columns["tokens"].values) if "tokens" in self._columns else 0

    def require(self, names: Iterable[str]) -> Experience:
        """Only the named columns, in that order; raises ColumnMissingError."""
        return Experience({name: self[name] for name in names})

    def select(self, rows: torch.Tensor) -> Experience:
        """The given rows in the given order; rows is int64 [K]."""
        return Experience({name: column.select(rows) for name, column in self._columns.items()})

    def slice(self, start: int, stop: int) -> Experience:
        """Rows start..stop-1, sharing storage."""
        return Experience(
            {name: column.slice(start, stop) for name, column in self._columns.items()}
        )

    @staticmethod
    def concat(batches: Sequence[Experience]) -> Experience:
        """Stacks the rows of batches with the same columns."""
        names = list(batches[0].columns)
        return Experience(
            {name: Column.concat([batch[name] for batch in batches]) for name in names}
        )


def offsets_of(lengths: torch.Tensor) -> torch.Tensor:
    """int64 [B + 1]: running sum of int64 [B] lengths, beginning with 0."""
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


# --- payload: one run of bytes, for shared memory and for streams --------------------------


def payload_layout(batch: Experience) -> PayloadLayout:
    """Lays the columns out one after another, each array on a 64-byte boundary.

    Raises:
        ValueError: A dtype that may not travel; names the column.
    """
    return _planned(batch, batch.num_rows, lambda column: len(column.values))


def selected_layout(batch: Experience, rows: Sequence[int]) -> PayloadLayout:
    """The layout of some rows of a batch, in the given order, without copying them."""
    if isinstance(rows, range) and rows.step == 1:
        return payload_layout(batch.slice(rows.start, rows.stop))
    index = torch.tensor(list(rows), dtype=torch.int64)
    return _planned(batch, len(rows), lambda column: int(column.lengths()[index].sum()))


def _planned(
    batch: Experience, num_rows: int, num_values: Callable[[Column], int]
) -> PayloadLayout:
    columns = []
    for name, column in batch.columns.items():
        dtype = str(column.values.dtype).removeprefix("torch.")
        columns.append((name, column.kind.value, dtype, column.width, num_values(column)))
    return plan_payload(num_rows, columns)


def selected_arrays(
    batch: Experience,
    rows: Sequence[int],
    layout: PayloadLayout,
    start: int,
    stop: int,
    window_bytes: int,
) -> Iterator[tuple[int, torch.Tensor]]:
    """The arrays of `selected_layout` that reach into bytes start to stop - 1.

    Args:
        batch: The columns.
        rows: The rows, in order.
        layout: Theirs.
        start: First byte wanted.
        stop: One past the last.
        window_bytes: Values are gathered so many bytes at a time, or a row if it has more.

    Yields:
        First byte and content of pieces, in ascending order.
    """
    index = torch.tensor(list(rows), dtype=torch.int64)
    for placed in layout.columns:
        column = batch[placed.name]
        offsets = offsets_of(column.lengths()[index])
        if placed.offsets_at is not None:
            yield placed.offsets_at, offsets
        edges = placed.values_at + offsets * column.width * column.values.itemsize
        first = max(0, int(torch.searchsorted(edges, start, right=True)) - 1)
        last = min(len(rows), int(torch.searchsorted(edges, stop)))
        while first < last:
            reached = int(torch.searchsorted(edges, edges[first] + window_bytes, right=True)) - 1
            until = min(max(reached, first + 1), last)
            yield int(edges[first]), column.select(index[first:until]).values.flatten()
            first = until


def write_payload(batch: Experience, layout: PayloadLayout, buffer: memoryview) -> None:
    """Copies the batch into a writable buffer of layout.num_bytes bytes."""
    if layout.num_bytes == 0:
        return
    target = torch.frombuffer(buffer, dtype=torch.uint8)
    for placed in layout.columns:
        column = batch[placed.name]
        _write(target, placed.values_at, column.values)
        if column.offsets is not None and placed.offsets_at is not None:
            _write(target, placed.offsets_at, column.offsets)


def _write(target: torch.Tensor, at: int, values: torch.Tensor) -> None:
    source = values.detach().cpu().contiguous().flatten().view(torch.uint8)
    target[at : at + source.numel()].copy_(source)


def read_payload(layout: PayloadLayout, payload: torch.Tensor) -> Experience:
    """Views a payload as a batch, without a copy.

    Args:
        layout: Where the columns lie.
        payload: uint8 [layout.num_bytes]; the batch keeps it alive.

    Raises:
        ValueError: The payload is of another size, or its offsets do not fit its values.
    """
    if payload.numel() != layout.num_bytes:
        raise ValueError(
            f"a payload of {layout.num_bytes} bytes is described, but {payload.numel()} came"
        )
    columns = {}
    for placed in layout.columns:
        dtypes = (getattr(torch, placed.dtype), torch.int64)
        values, *offsets = (
            payload[at : at + length].view(dtype)
            for (at, length), dtype in zip(layout.extents(placed), dtypes, strict=False)
        )
        if placed.width > 1:
            values = values.view(placed.num_values, placed.width)
        columns[placed.name] = Column(ColumnKind(placed.kind), values, *offsets)
    return Experience(columns)
