"""Translates columns and layouts between engine and protos."""

from __future__ import annotations

import math

import torch

from rolemesh.engine.experience import (
    Column,
    ColumnKind,
    ColumnLayout,
    PayloadLayout,
)
from rolemesh.rpc.payload_stream import PayloadMalformedError
from rolemesh.v1 import experience_pb2, tensor_pb2

DTYPES: dict[torch.dtype, tensor_pb2.DataType.ValueType] = {
    torch.float32: tensor_pb2.DATA_TYPE_FLOAT32,
    torch.bfloat16: tensor_pb2.DATA_TYPE_BFLOAT16,
    torch.float16: tensor_pb2.DATA_TYPE_FLOAT16,
    torch.float64: tensor_pb2.DATA_TYPE_FLOAT64,
    torch.int64: tensor_pb2.DATA_TYPE_INT64,
    torch.int32: tensor_pb2.DATA_TYPE_INT32,
    torch.uint8: tensor_pb2.DATA_TYPE_UINT8,
    torch.bool: tensor_pb2.DATA_TYPE_BOOL,
}
"""Element types that may travel."""

KINDS: dict[ColumnKind, experience_pb2.ColumnKind.ValueType] = {
    ColumnKind.ROW: experience_pb2.COLUMN_KIND_ROW,
    ColumnKind.SEQUENCE: experience_pb2.COLUMN_KIND_SEQUENCE,
    ColumnKind.COMPLETION: experience_pb2.COLUMN_KIND_COMPLETION,
    ColumnKind.TEXT: experience_pb2.COLUMN_KIND_TEXT,
}
"""How values relate to rows."""

_DTYPE_OF = {number: dtype for dtype, number in DTYPES.items()}
_KIND_OF = {number: kind for kind, number in KINDS.items()}


def column_schema(name: str, column: Column) -> experience_pb2.ColumnSchema:
    """Name, kind and dtype of a column.

    Raises:
        ValueError: a dtype that may not travel.
    """
    return _schema(name, column.kind, column.values.dtype)


def _schema(name: str, kind: ColumnKind, dtype: torch.dtype) -> experience_pb2.ColumnSchema:
    if dtype not in DTYPES:
        raise ValueError(
            f"column {name!r} has dtype {dtype}, which may not travel: "
            f"use one of {sorted(map(str, DTYPES))}"
        )
    return experience_pb2.ColumnSchema(name=name, kind=KINDS[kind], dtype=DTYPES[dtype])


def empty_column(schema: experience_pb2.ColumnSchema) -> Column:
    """A column of that kind and dtype without rows."""
    dtype, kind = _DTYPE_OF[schema.dtype], _KIND_OF[schema.kind]
    if kind is ColumnKind.ROW:
        return Column(kind, torch.empty(0, dtype=dtype))
    return Column.ragged(kind, [], dtype)


def header_of(layout: PayloadLayout) -> experience_pb2.PayloadHeader:
    """The wire form of a layout, asking for all of its rows."""
    return experience_pb2.PayloadHeader(
        num_rows=layout.num_rows,
        num_bytes=layout.num_bytes,
        row_start=0,
        row_stop=layout.num_rows,
        columns=[
            experience_pb2.PayloadColumn(
                schema=_schema(column.name, column.kind, column.dtype),
                offsets_at=column.offsets_at,
                values_at=column.values_at,
                num_values=column.num_values,
            )
            for column in layout.columns
        ],
    )


def layout_of(header: experience_pb2.PayloadHeader) -> PayloadLayout:
    """The layout that a header describes, checked against its own length.

    Raises:
        PayloadMalformedError: unknown kind or dtype, negative sizes, or arrays beyond num_bytes.
    """
    if header.num_rows < 0 or header.num_bytes < 0:
        raise PayloadMalformedError(
            f"a payload header claims {header.num_rows} rows and {header.num_bytes} bytes"
        )
    columns = []
    for column in header.columns:
        name = column.schema.name
        kind = _KIND_OF.get(column.schema.kind)
        dtype = _DTYPE_OF.get(column.schema.dtype)
        if kind is None or dtype is None:
            raise PayloadMalformedError(
                f"column {name!r} has kind {column.schema.kind} and dtype {column.schema.dtype}, "
                "which this version does not know"
            )
        has_offsets = column.HasField("offsets_at")
        if has_offsets == (kind is ColumnKind.ROW):
            raise PayloadMalformedError(
                f"column {name!r} of kind {kind.value} "
                + ("must not have offsets" if has_offsets else "lacks offsets")
            )
        if kind is ColumnKind.ROW and column.num_values != header.num_rows:
            raise PayloadMalformedError(
                f"column {name!r} has {column.num_values} values for {header.num_rows} rows"
            )
        _check_extent(name, column.values_at, column.num_values, dtype.itemsize, header.num_bytes)
        if has_offsets:
            _check_extent(name, column.offsets_at, header.num_rows + 1, 8, header.num_bytes)
        columns.append(
            ColumnLayout(
                name=name,
                kind=kind,
                dtype=dtype,
                num_values=column.num_values,
                values_at=column.values_at,
                offsets_at=column.offsets_at if has_offsets else None,
            )
        )
    if len({column.name for column in columns}) != len(columns):
        raise PayloadMalformedError("a payload header names a column twice")
    return PayloadLayout(header.num_rows, tuple(columns), header.num_bytes)


def _check_extent(name: str, at: int, num_values: int, item_bytes: int, num_bytes: int) -> None:
    stop = at + math.prod((num_values, item_bytes))
    if at < 0 or num_values < 0 or stop > num_bytes:
        raise PayloadMalformedError(
            f"column {name!r} claims {num_values} values of {item_bytes} bytes at byte {at} of a "
            f"payload of {num_bytes} bytes: bytes and shape do not fit"
        )
