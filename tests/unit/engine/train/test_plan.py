"""Rows of a batch that a data-parallel rank trains on, and batches that it refuses."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.token_batches import token_batch

from rolemesh.engine.packing.balance import balanced_partition
from rolemesh.engine.packing.batching import update_assignment
from rolemesh.engine.parallel.mesh import RankGroup
from rolemesh.engine.train.plan import UpdatePlan

BATCH = token_batch()
LENGTHS = BATCH["tokens"].lengths().tolist()
NUMBERS: dict[str, Any] = {"epochs": 2, "mini_batch_rows": 3, "seed": 9}


def _dp(index: int, size: int) -> RankGroup:
    return RankGroup(tuple(range(size)), index, None)


def _rows_of_steps(plan: UpdatePlan) -> list[list[int]]:
    """The rows of the whole batch that the places of each step point at."""
    return [[plan.rows[place] for place in places] for places in plan.steps]


def test_the_rows_of_an_update_are_those_of_its_assignment() -> None:
    assignment = update_assignment(LENGTHS, num_parts=2, **NUMBERS)
    for index in range(2):
        plan = UpdatePlan.of_update(LENGTHS, _dp(index, 2), **NUMBERS)
        assert _rows_of_steps(plan) == [parts[index] for parts in assignment]
        assert plan.rows == sorted(set(itertools.chain(*_rows_of_steps(plan))))
        assert plan.rows_of_steps == [3, 3, 2] * 2


def test_rows_that_are_not_judged_are_planned_as_if_they_were_not_there() -> None:
    judged = [0, 2, 3, 5, 7]
    there = UpdatePlan.of_update([LENGTHS[row] for row in judged], _dp(1, 2), **NUMBERS)
    plan = UpdatePlan.of_update(LENGTHS, _dp(1, 2), judged=judged, **NUMBERS)
    assert plan.steps == there.steps
    assert plan.rows == [judged[row] for row in there.rows]
    plan.check(BATCH.select(torch.tensor(plan.rows)), num_steps=4)
    nothing = UpdatePlan.of_update(LENGTHS, _dp(1, 2), judged=[], **NUMBERS)
    assert (nothing.rows, nothing.steps) == ([], [])


@given(st.lists(st.integers(1, 40), max_size=20), st.integers(0, 6), st.integers(1, 4))
def test_rows_are_dealt_out_over_the_steps_in_order(
    lengths: list[int], num_steps: int, num_parts: int
) -> None:
    plans = [
        UpdatePlan.dealt(lengths, _dp(index, num_parts), num_steps=num_steps)
        for index in range(num_parts)
    ]
    dealt: list[int] = []
    for step in range(num_steps):
        rows = sorted(row for plan in plans for row in _rows_of_steps(plan)[step])
        assert {plan.rows_of_steps[step] for plan in plans} == {len(rows)}
        dealt += rows
    assert dealt == (list(range(len(lengths))) if num_steps else [])


def test_a_mini_batch_is_one_step_of_all_that_is_held() -> None:
    part = balanced_partition(LENGTHS, 3)[1]
    plan = UpdatePlan.of_mini_batch(LENGTHS, part)
    assert _rows_of_steps(plan) == [part]
    assert plan.rows_of_steps == [8]


@pytest.mark.parametrize(
    ("rows", "num_steps", "said"),
    [
        (range(7), 6, "the plan has 8 rows for this rank, but the batch has 7"),
        ([1, 0, *range(2, 8)], 6, "row 0 has .* tokens, but .* in the plan's lengths"),
        (range(8), 1, "the plan has 6 optimizer steps, but 1 are made"),
    ],
    ids=["too few", "other order", "other steps"],
)
def test_a_batch_that_is_not_the_plans_is_refused(
    rows: Sequence[int], num_steps: int, said: str
) -> None:
    plan = UpdatePlan.of_update(LENGTHS, _dp(0, 1), **NUMBERS)
    with pytest.raises(ValueError, match=said):
        plan.check(BATCH.select(torch.tensor(list(rows))), num_steps=num_steps)


@pytest.mark.parametrize("row", [8, -1], ids=["beyond", "negative"])
def test_rows_that_the_batch_does_not_have_are_refused(row: int) -> None:
    with pytest.raises(ValueError, match=f"judged has row {row}, but lengths has 8 entries"):
        UpdatePlan.of_update(LENGTHS, _dp(0, 1), judged=[0, row], **NUMBERS)
    with pytest.raises(ValueError, match=f"rows has row {row}, but lengths has 8 entries"):
        UpdatePlan.of_mini_batch(LENGTHS, [0, row])
    with pytest.raises(ValueError, match="the batch has 0 rows: give at least one"):
        UpdatePlan.of_mini_batch([], [])
