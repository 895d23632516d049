"""Places of arrays in a payload, and descriptions that cannot be true."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rolemesh.engine.layout.payload import (
    ALIGNMENT_BYTES,
    ColumnLayout,
    PayloadLayout,
    aligned,
    plan_payload,
)

TWO_ROWS = plan_payload(2, [("rewards", "row", "float32", 1, 2), ("text", "text", "uint8", 1, 5)])


def test_arrays_stand_one_after_another_on_boundaries() -> None:
    assert TWO_ROWS.columns == (
        ColumnLayout("rewards", "row", "float32", 2, 0, None),
        ColumnLayout("text", "text", "uint8", 5, 128, 64),
    )
    assert TWO_ROWS.num_bytes == 192
    assert [[*TWO_ROWS.extents(one)] for one in TWO_ROWS.columns] == [
        [(0, 8)],
        [(128, 5), (64, 24)],
    ]


def test_sizes_are_rounded_up_to_a_boundary() -> None:
    assert [aligned(size) for size in (0, 1, 63, 64, 65)] == [0, 64, 64, 64, 128]
    assert ALIGNMENT_BYTES == 64


def test_an_element_type_that_may_not_travel_is_refused_by_column() -> None:
    with pytest.raises(ValueError, match=r"'a' has dtype uint16, .*'uint8'"):
        plan_payload(1, [("a", "row", "uint16", 1, 1)])


@pytest.mark.parametrize(("values_at", "num_values"), [(0, 5), (64, 1), (4, 1), (-64, 1), (0, -1)])
def test_bytes_that_do_not_fit_their_shape_are_refused(values_at: int, num_values: int) -> None:
    column = ColumnLayout("rewards", "row", "float32", num_values, values_at, None)
    with pytest.raises(ValueError, match=r"column 'rewards' claims bytes .* do not fit"):
        PayloadLayout(num_values, (column,), 16)


@pytest.mark.parametrize(
    ("index", "changes", "says"),
    [
        (0, {"offsets_at": 64}, "'rewards' of kind row must not have offsets"),
        (1, {"offsets_at": None}, "'text' of kind text lacks offsets"),
        (0, {"num_values": 3}, "'rewards' has 3 values for 2 rows"),
        (0, {"values_at": 128}, "'text' and 'rewards' overlap at byte 128"),
        (1, {"values_at": 64}, "'text' and 'text' overlap at byte 64"),
        (1, {"name": "rewards"}, "names a column twice"),
        (1, {"offsets_at": 96}, "'text' claims bytes 96"),
        (1, {"num_values": 1 << 62}, "'text' claims bytes 128"),
    ],
)
def test_a_column_that_contradicts_itself_is_refused(
    index: int, changes: dict[str, Any], says: str
) -> None:
    columns = list(TWO_ROWS.columns)
    columns[index] = replace(columns[index], **changes)
    with pytest.raises(ValueError, match=says):
        replace(TWO_ROWS, columns=tuple(columns))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"columns": ()}, "in 0 columns"),
        ({"num_rows": -1, "columns": TWO_ROWS.columns[:1]}, "claims -1 rows"),
    ],
)
def test_counts_below_what_there_must_be_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        replace(TWO_ROWS, **changes)
