"""Columns of experience as numpy arrays: the light twin of the engine's, for ends without torch.

The bytes are the same as those of a service: elements are little-endian, and where arrays lie is
planned by the same function. numpy knows no bfloat16; a column of it is read as float32, which
holds every bfloat16 exactly, and none is written.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rolemesh.engine.layout.payload import ITEM_BYTES, WIDE_KINDS, plan_payload
from rolemesh.rpc.experience.payload import header_of, layout_of, payload_chunks
from rolemesh.rpc.experience.payload_stream import PayloadMalformedError
from rolemesh.rpc.experience.tensors import NAMES
from rolemesh.v1 import experience_pb2, tensor_pb2

Array = npt.NDArray[Any]


class ColumnKind(enum.Enum):
    """How the values of a column relate to rows."""

    ROW = experience_pb2.COLUMN_KIND_ROW
    """One value a row."""
    SEQUENCE = experience_pb2.COLUMN_KIND_SEQUENCE
    """One value for each token of prompt and completion."""
    COMPLETION = experience_pb2.COLUMN_KIND_COMPLETION
    """One value for each completion token."""
    TEXT = experience_pb2.COLUMN_KIND_TEXT
    """UTF-8 bytes of a row."""


@dataclass(frozen=True, slots=True, eq=False)
class ColumnData:
    """One packed column.

    Attributes:
        kind: How values relate to rows.
        values: 1-D, or [values, K] where each value of a SEQUENCE or COMPLETION column has K
            elements.
        offsets: int64 [rows + 1] for every kind but ROW: row b owns
            values[offsets[b]:offsets[b + 1]]. None for ROW.

    Example: ColumnData.completion([[0.5], [1.0, 2.0]]) has the offsets [0, 1, 3].
    """

    kind: ColumnKind
    values: Array
    offsets: npt.NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        most = 2 if self.kind.name.lower() in WIDE_KINDS else 1
        if not 1 <= self.values.ndim <= most:
            raise ValueError(
                f"values of a {self.kind.name} column have {self.values.ndim} dimensions: pack "
                "them into one" + (", or two where each has several elements" if most > 1 else "")
            )
        if (self.kind is ColumnKind.ROW) != (self.offsets is None):
            raise ValueError(f"a {self.kind.name} column and its offsets do not go together")
        if self.offsets is None:
            return
        if self.offsets.dtype != np.int64 or self.offsets.ndim != 1 or len(self.offsets) < 1:
            raise ValueError("offsets must be int64 and one-dimensional, with rows + 1 entries")
        if self.offsets[0] != 0 or self.offsets[-1] != len(self.values):
            raise ValueError(
                f"offsets run from {self.offsets[0]} to {self.offsets[-1]}, but must run from 0 to "
                f"the number of values, {len(self.values)}"
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
        return 1 if self.values.ndim == 1 else int(self.values.shape[1])

    def lengths(self) -> npt.NDArray[np.int64]:
        """Values in each row, int64 [rows]; 1 for a ROW column."""
        if self.offsets is None:
            return np.ones(len(self.values), dtype=np.int64)
        return np.diff(self.offsets)

    def rows(self) -> list[Array]:
        """The values of each row, as views; of a ROW column arrays of one value."""
        edges = range(len(self.values) + 1) if self.offsets is None else self.offsets.tolist()
        return [self.values[first:last] for first, last in itertools.pairwise(edges)]

    def strings(self) -> list[str]:
        """The rows of a TEXT column.

        Raises:
            ValueError: It is of another kind, or no UTF-8.
        """
        if self.kind is not ColumnKind.TEXT:
            raise ValueError(f"a {self.kind.name} column holds no text")
        return [row.tobytes().decode() for row in self.rows()]

    def select(self, rows: npt.NDArray[np.int64]) -> ColumnData:
        """The given rows, int64 [K], in the given order."""
        if self.offsets is None:
            return ColumnData(self.kind, self.values[rows])
        lengths = self.lengths()[rows]
        offsets = _offsets_of(lengths)
        starts = self.offsets[:-1][rows] - offsets[:-1]
        index = np.arange(offsets[-1]) + np.repeat(starts, lengths)
        return ColumnData(self.kind, self.values[index], offsets)

    @staticmethod
    def row(values: npt.ArrayLike, dtype: npt.DTypeLike = None) -> ColumnData:
        """One value a row."""
        return ColumnData(ColumnKind.ROW, np.asarray(values, dtype=dtype))

    @staticmethod
    def sequence(rows: Sequence[npt.ArrayLike], dtype: npt.DTypeLike = np.int64) -> ColumnData:
        """One value for each token of prompt and completion, e.g. the tokens."""
        return _ragged(ColumnKind.SEQUENCE, rows, dtype)

    @staticmethod
    def completion(rows: Sequence[npt.ArrayLike], dtype: npt.DTypeLike = np.float32) -> ColumnData:
        """One value for each completion token, e.g. advantages or a mask (dtype bool)."""
        return _ragged(ColumnKind.COMPLETION, rows, dtype)

    @staticmethod
    def text(rows: Sequence[str]) -> ColumnData:
        """Texts, packed as UTF-8."""
        encoded = [row.encode() for row in rows]
        lengths = np.array([len(row) for row in encoded], dtype=np.int64)
        values = np.frombuffer(b"".join(encoded), dtype=np.uint8)
        return ColumnData(ColumnKind.TEXT, values, _offsets_of(lengths))

    @staticmethod
    def concat(columns: Sequence[ColumnData]) -> ColumnData:
        """Stacks the rows of columns of one kind and dtype.

        Raises:
            ValueError: There are none, or they differ.
        """
        kinds = {(column.kind, column.values.dtype, column.width) for column in columns}
        if len(kinds) != 1:
            raise ValueError(
                f"columns of different kinds cannot be stacked: {sorted(map(str, kinds))}"
            )
        values = np.concatenate([column.values for column in columns])
        if columns[0].offsets is None:
            return ColumnData(columns[0].kind, values)
        lengths = np.concatenate([column.lengths() for column in columns])
        return ColumnData(columns[0].kind, values, _offsets_of(lengths))


class Columns(Mapping[str, ColumnData]):
    """Named columns over the same rows.

    Example::

        batch = Columns({"rewards": ColumnData.row([1.0, 0.0], np.float32)})
        batch["rewards"].values, batch.num_rows
    """

    def __init__(self, columns: Mapping[str, ColumnData]) -> None:
        if not columns:
            raise ValueError("columns are none: give at least one")
        counts = {name: column.num_rows for name, column in columns.items()}
        if len(set(counts.values())) != 1:
            raise ValueError(f"columns disagree on the number of rows: {counts}")
        self._columns = dict(columns)
        self.num_rows = next(iter(counts.values()))

    def __getitem__(self, name: str) -> ColumnData:
        """The column of that name."""
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        """The names, in order."""
        return iter(self._columns)

    def __len__(self) -> int:
        """How many columns there are."""
        return len(self._columns)

    def __repr__(self) -> str:
        return f"Columns(rows={self.num_rows}, columns={sorted(self._columns)})"

    def __or__(self, other: Mapping[str, ColumnData]) -> Columns:
        """Joins columns over the same rows; one of `other` replaces one of the same name."""
        return Columns({**self._columns, **other})

    def select(self, rows: Sequence[int] | npt.NDArray[np.int64]) -> Columns:
        """The given rows in the given order."""
        index = np.asarray(rows, dtype=np.int64)
        return Columns({name: column.select(index) for name, column in self.items()})


_WRITTEN = sorted(ITEM_BYTES.keys() - {"bfloat16"})
"""Element types that numpy has and that may travel."""


def encode(columns: Columns) -> tuple[experience_pb2.PayloadHeader, Iterator[bytes]]:
    """The wire form: a header, and the payload that it describes in chunks of at most 1 MiB.

    Raises:
        ValueError: A dtype that may not travel; names the column.
    """
    for name, column in columns.items():
        if column.values.dtype.name not in _WRITTEN:
            raise ValueError(
                f"column {name!r} has dtype {column.values.dtype}, which may not travel: use one "
                f"of {_WRITTEN}"
            )
    layout = plan_payload(
        columns.num_rows,
        (
            (
                name,
                column.kind.name.lower(),
                column.values.dtype.name,
                column.width,
                len(column.values),
            )
            for name, column in columns.items()
        ),
    )
    arrays = {
        name: [_bytes_of(one) for one in (column.values, column.offsets) if one is not None]
        for name, column in columns.items()
    }
    return header_of(layout), map(b"".join, payload_chunks(layout, arrays))


def _bytes_of(values: Array) -> memoryview:
    """The elements, little-endian."""
    ordered = values.astype(values.dtype.newbyteorder("<"), copy=False)
    return np.ascontiguousarray(ordered).reshape(-1).view(np.uint8).data


def decode(
    header: experience_pb2.PayloadHeader, payload: bytes | bytearray | memoryview
) -> Columns:
    """The columns of a payload, as views of it where numpy knows their dtype.

    Raises:
        PayloadMalformedError: Header and bytes do not fit; names the column.
    """
    layout_of(header)
    if header.HasField("shared_memory_name"):
        raise PayloadMalformedError("a payload header names shared memory, which was not offered")
    if len(payload) != header.num_bytes:
        raise PayloadMalformedError(
            f"a payload header claims {header.num_bytes} bytes, but {len(payload)} came"
        )
    columns: dict[str, ColumnData] = {}
    for column in header.columns:
        name = column.schema.name
        offsets = None
        if column.HasField("offsets_at"):
            offsets = np.frombuffer(payload, "<i8", header.num_rows + 1, column.offsets_at)
        width = column.schema.width or 1
        values = read_values(
            payload, column.schema.dtype, column.num_values * width, column.values_at
        )
        if width > 1:
            values = values.reshape(column.num_values, width)
        try:
            columns[name] = ColumnData(ColumnKind(column.schema.kind), values, offsets)
        except ValueError as error:
            raise PayloadMalformedError(f"column {name!r}: {error}") from error
    return Columns(columns)


def read_values(
    payload: bytes | bytearray | memoryview,
    dtype: tensor_pb2.DataType.ValueType,
    num_elements: int,
    at: int,
) -> Array:
    """Elements of a payload as an array, [num_elements]: a view, or of bfloat16 a float32 copy.

    Args:
        payload: Bytes that reach as far as is asked.
        dtype: One of those that may travel.
        num_elements: How many.
        at: Offset of the first one in bytes.
    """
    if dtype == tensor_pb2.DATA_TYPE_BFLOAT16:
        # A bfloat16 is the upper half of the float32 of the same value.
        halves = np.frombuffer(payload, "<u2", num_elements, at)
        return (halves.astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(payload, np.dtype(NAMES[dtype]).newbyteorder("<"), num_elements, at)


def _ragged(kind: ColumnKind, rows: Sequence[npt.ArrayLike], dtype: npt.DTypeLike) -> ColumnData:
    arrays = [np.asarray(row, dtype=dtype) for row in rows]
    values = np.concatenate(arrays) if arrays else np.empty(0, dtype=dtype)
    lengths = np.array([len(array) for array in arrays], dtype=np.int64)
    return ColumnData(kind, values, _offsets_of(lengths))


def _offsets_of(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
