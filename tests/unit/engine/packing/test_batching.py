"""Parts for ranks, and rows of similar length together."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rolemesh.engine.packing.balance import balanced_partition
from rolemesh.engine.packing.batching import rectangles, update_assignment

LENGTHS = st.lists(st.integers(0, 40), max_size=40)


@given(LENGTHS, st.integers(1, 100))
def test_every_row_is_in_exactly_one_group_within_the_budget(
    lengths: list[int], max_tokens: int
) -> None:
    groups = rectangles(lengths, max_tokens)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    for group in groups:
        cost = len(group) * max(lengths[row] for row in group)
        assert cost <= max_tokens or len(group) == 1


@given(LENGTHS, st.integers(1, 100))
def test_groups_run_from_long_to_short_rows(lengths: list[int], max_tokens: int) -> None:
    order = [lengths[row] for group in rectangles(lengths, max_tokens) for row in group]
    assert order == sorted(lengths, reverse=True)


def test_groups_follow_from_lengths_alone() -> None:
    assert rectangles([3, 9, 2, 3], 9) == [[1], [0, 3, 2]]
    assert rectangles([20, 1], 9) == [[0], [1]]
    assert rectangles([], 9) == []


def test_a_budget_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens is 0: give at least 1"):
        rectangles([1], 0)


def drawn_now(num_rows: int, epochs: int, mini_batch_rows: int, seed: int) -> list[list[int]]:
    """The mini-batches of a trainer on one rank, by torch's own words for them."""
    shuffle = torch.Generator().manual_seed(seed)
    return [
        rows.tolist()
        for _ in range(epochs)
        for rows in torch.split(torch.randperm(num_rows, generator=shuffle), mini_batch_rows)
    ]


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=30),
    st.integers(1, 3),
    st.integers(1, 12),
    st.integers(0, 2**63 - 1),
    st.integers(1, 5),
)
def test_ranks_train_together_on_the_mini_batches_of_one_rank(
    lengths: list[int], epochs: int, mini_batch_rows: int, seed: int, num_parts: int
) -> None:
    assignment = update_assignment(
        lengths, epochs=epochs, mini_batch_rows=mini_batch_rows, seed=seed, num_parts=num_parts
    )
    expected = drawn_now(len(lengths), epochs, mini_batch_rows, seed)
    assert [sorted(row for part in parts for row in part) for parts in assignment] == [
        sorted(rows) for rows in expected
    ]
    for parts, rows in zip(assignment, expected, strict=True):
        assert len(parts) == num_parts
        cut = balanced_partition([lengths[row] for row in rows], num_parts)
        assert parts == [[rows[place] for place in part] for part in cut]


def test_one_part_has_the_rows_in_the_order_in_which_they_were_drawn() -> None:
    lengths = [5, 3, 9, 9, 1, 2, 7]
    assignment = update_assignment(lengths, epochs=2, mini_batch_rows=3, seed=7, num_parts=1)
    assert [rows for (rows,) in assignment] == drawn_now(7, 2, 3, 7)


def test_a_small_mini_batch_leaves_parts_empty() -> None:
    # 5 rows by 4: the second mini-batch has one row for three parts.
    _, parts = update_assignment([3] * 5, epochs=1, mini_batch_rows=4, seed=1, num_parts=3)
    assert [len(part) for part in parts] == [1, 0, 0]


@pytest.mark.parametrize(
    ("epochs", "mini_batch_rows", "num_parts", "message"),
    [
        pytest.param(0, 1, 1, "epochs is 0: give at least 1", id="epochs"),
        pytest.param(1, 0, 1, "mini_batch_rows is 0: give at least 1", id="mini-batch"),
        pytest.param(1, 1, 0, "num_parts is 0: give at least 1", id="parts"),
    ],
)
def test_sizes_of_an_update_below_one_are_refused(
    epochs: int, mini_batch_rows: int, num_parts: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        update_assignment(
            [1],
            epochs=epochs,
            mini_batch_rows=mini_batch_rows,
            seed=0,
            num_parts=num_parts,
        )


# --- units --------------------------------------------------------------------------------

UNITS = st.integers(1, 4).flatmap(
    lambda size: st.tuples(
        st.just(size),
        st.lists(st.lists(st.integers(1, 40), min_size=size, max_size=size), max_size=12),
    )
)
"""(rows_per_unit, lengths of each unit's rows)."""


def _units_of(rows: list[int], rows_per_unit: int) -> list[int]:
    """The units of rows; fails where one is cut apart or out of order."""
    found = rows[::rows_per_unit]
    assert rows == [first + row for first in found for row in range(rows_per_unit)]
    assert all(first % rows_per_unit == 0 for first in found)
    return [first // rows_per_unit for first in found]


@given(UNITS, st.integers(1, 100))
def test_rectangles_cut_no_unit(units: tuple[int, list[list[int]]], max_tokens: int) -> None:
    rows_per_unit, by_unit = units
    lengths = [length for unit in by_unit for length in unit]
    groups = rectangles(lengths, max_tokens, rows_per_unit)
    found = [_units_of(group, rows_per_unit) for group in groups]
    assert sorted(unit for group in found for unit in group) == list(range(len(by_unit)))
    for group in groups:
        cost = len(group) * max(lengths[row] for row in group)
        assert cost <= max_tokens or len(group) == rows_per_unit


@given(UNITS, st.integers(1, 3), st.integers(1, 5), st.integers(1, 3))
def test_an_update_cuts_no_unit(
    units: tuple[int, list[list[int]]], epochs: int, units_per_step: int, num_parts: int
) -> None:
    rows_per_unit, by_unit = units
    arguments = {"epochs": epochs, "seed": 3, "num_parts": num_parts}
    assignment = update_assignment(
        [length for unit in by_unit for length in unit],
        mini_batch_rows=units_per_step * rows_per_unit,
        rows_per_unit=rows_per_unit,
        **arguments,
    )
    # Units are dealt out as rows of their total length are.
    expected = update_assignment(
        [sum(unit) for unit in by_unit], mini_batch_rows=units_per_step, **arguments
    )
    found = [[_units_of(rows, rows_per_unit) for rows in parts] for parts in assignment]
    assert found == expected


@pytest.mark.parametrize(
    ("rows", "mini_batch_rows", "rows_per_unit", "message"),
    [
        (5, 2, 2, "the batch has 5 rows, which is no multiple of rows_per_unit 2"),
        (6, 3, 2, "mini_batch_rows is 3, no multiple of rows_per_unit 2"),
        (6, 2, 0, "rows_per_unit is 0: give at least 1"),
    ],
)
def test_units_that_do_not_divide_the_rows_are_refused(
    rows: int, mini_batch_rows: int, rows_per_unit: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        update_assignment(
            [1] * rows,
            epochs=1,
            mini_batch_rows=mini_batch_rows,
            seed=0,
            num_parts=1,
            rows_per_unit=rows_per_unit,
        )
