"""Payloads on the wire: the header that describes one, and the chunks that it is cut into.

What lies where is planned and checked in `engine/layout/payload.py`; engine and columns turn
their tensors and arrays into these buffers and back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rolemesh.engine.layout.payload import ColumnLayout, PayloadLayout, plan_payload
from rolemesh.rpc.channel import CHUNK_BYTES
from rolemesh.rpc.errors import OutOfRangeError
from rolemesh.rpc.experience.payload_stream import PayloadMalformedError
from rolemesh.rpc.experience.tensors import NAMES, data_type_of
from rolemesh.v1 import experience_pb2

_KINDS = {
    number: name.removeprefix("COLUMN_KIND_").lower()
    for name, number in experience_pb2.ColumnKind.items()[1:]
}
_KIND_NUMBERS = {name: number for number, name in _KINDS.items()}


def header_of(layout: PayloadLayout) -> experience_pb2.PayloadHeader:
    """The wire form of a layout, asking for all of its rows."""
    return experience_pb2.PayloadHeader(
        num_rows=layout.num_rows,
        num_bytes=layout.num_bytes,
        row_start=0,
        row_stop=layout.num_rows,
        columns=[
            experience_pb2.PayloadColumn(
                schema=experience_pb2.ColumnSchema(
                    name=column.name,
                    kind=_KIND_NUMBERS[column.kind],
                    dtype=data_type_of(column.dtype),
                    # 0, which is 1, for what older readers know.
                    width=column.width if column.width > 1 else 0,
                ),
                offsets_at=column.offsets_at,
                values_at=column.values_at,
                num_values=column.num_values,
            )
            for column in layout.columns
        ],
    )


def schemas_of(layout: PayloadLayout) -> list[experience_pb2.ColumnSchema]:
    """Name, kind, dtype and width of each column."""
    return [column.schema for column in header_of(layout).columns]


def layout_of(header: experience_pb2.PayloadHeader) -> PayloadLayout:
    """The layout that a header describes, checked before a byte is allocated for it.

    Raises:
        PayloadMalformedError: No columns, unknown kind or dtype, negative sizes, arrays off their
            boundary or beyond num_bytes, counts that do not fit, or a name twice.
    """
    try:
        return PayloadLayout(header.num_rows, tuple(map(_placed, header.columns)), header.num_bytes)
    except ValueError as error:
        raise PayloadMalformedError(str(error)) from error


def layout_without_rows(schemas: Iterable[experience_pb2.ColumnSchema]) -> PayloadLayout:
    """The layout of columns of these kinds and dtypes that have no rows.

    Raises:
        ValueError: Unknown kind or dtype; names the column.
    """
    return plan_payload(0, ((*_described(schema), 0) for schema in schemas))


def _placed(column: experience_pb2.PayloadColumn) -> ColumnLayout:
    name, kind, dtype, width = _described(column.schema)
    offsets_at = column.offsets_at if column.HasField("offsets_at") else None
    return ColumnLayout(name, kind, dtype, column.num_values, column.values_at, offsets_at, width)


def _described(schema: experience_pb2.ColumnSchema) -> tuple[str, str, str, int]:
    """Name, kind, dtype and width."""
    try:
        return schema.name, _KINDS[schema.kind], NAMES[schema.dtype], schema.width or 1
    except KeyError:
        raise ValueError(
            f"column {schema.name!r} has kind {schema.kind} and dtype {schema.dtype}, "
            "which this version does not know"
        ) from None


class ChunkCutter:
    """Cuts bytes into chunks of views: the only copy is the one into a message. Owner: one sender.

    Example: with chunks of 4 bytes, `add(b"abcdef")` gives [b"abcd"], `add(b"gh")` [b"ef", b"gh"],
    and `rest()` nothing.
    """

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = self._room = chunk_bytes
        self._pieces: list[memoryview] = []

    def add(self, content: memoryview | bytes) -> Iterator[list[memoryview]]:
        """The chunks that are full with this content. To be read to its end."""
        left = memoryview(content)
        while left:
            self._pieces.append(left[: self._room])
            left = left[self._room :]
            self._room -= len(self._pieces[-1])
            if self._room == 0:
                yield from self.rest()

    def rest(self) -> Iterator[list[memoryview]]:
        """The last chunk, unless it is empty."""
        if self._pieces:
            pieces, self._pieces, self._room = self._pieces, [], self._chunk_bytes
            yield pieces


def payload_chunks(
    layout: PayloadLayout,
    arrays: Mapping[str, Sequence[memoryview]],
    chunk_bytes: int = CHUNK_BYTES,
) -> Iterator[list[memoryview]]:
    """Cuts the arrays of a payload, with zeros between them, into chunks of views.

    Args:
        layout: Of the payload.
        arrays: By column its values and, unless it is a row column, its offsets; as bytes.
        chunk_bytes: Of each chunk but the last.
    """
    return part_chunks(placed_arrays(layout, arrays), 0, layout.num_bytes, chunk_bytes)


def placed_arrays(
    layout: PayloadLayout, arrays: Mapping[str, Sequence[memoryview]]
) -> list[tuple[int, memoryview]]:
    """First byte and content of each array of a payload, in their order there."""
    return sorted(
        (
            (at, array)
            for column in layout.columns
            for (at, _), array in zip(layout.extents(column), arrays[column.name], strict=True)
        ),
        key=lambda placed: placed[0],
    )


def part_chunks(
    placed: Iterable[tuple[int, memoryview]],
    start: int,
    stop: int,
    chunk_bytes: int = CHUNK_BYTES,
) -> Iterator[list[memoryview]]:
    """Cuts bytes start to stop - 1 of a payload into chunks of views, with zeros in its gaps.

    Args:
        placed: First byte and content, in ascending order; what lies outside is passed over.
        start: First byte.
        stop: One past the last byte.
        chunk_bytes: Of each chunk but the last.
    """
    cutter, end = ChunkCutter(chunk_bytes), start
    for at, content in placed:
        inside = content[max(0, start - at) : max(0, stop - at)]
        if inside:
            begin = max(at, start)
            yield from cutter.add(bytes(begin - end))
            yield from cutter.add(inside)
            end = begin + len(inside)
    yield from cutter.add(bytes(stop - end))
    yield from cutter.rest()


def part_asked_for(start: int, stop: int, num_bytes: int) -> tuple[int, int]:
    """First byte, and one past the last, of the part of a payload that a request names.

    Args:
        start: `byte_start` of the request.
        stop: Its `byte_stop`; 0 and what lies beyond the end mean the end.
        num_bytes: Of the payload.

    Raises:
        OutOfRangeError: BYTES_OUT_OF_RANGE.
    """
    end = min(stop or num_bytes, num_bytes)
    if not 0 <= start <= end:
        raise OutOfRangeError(
            f"bytes {start} to {stop} were asked for of a payload of {num_bytes}",
            reason="BYTES_OUT_OF_RANGE",
        )
    return start, end
