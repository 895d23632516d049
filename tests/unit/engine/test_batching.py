"""Micro-batches and padding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rolemesh.engine.batching import micro_batches, pad_rows
from rolemesh.engine.experience import Column, ColumnKind, Experience

LENGTHS = st.lists(st.integers(0, 40), max_size=40)


@given(LENGTHS, st.integers(1, 100))
def test_every_row_is_in_exactly_one_group_within_the_budget(
    lengths: list[int], max_tokens: int
) -> None:
    groups = micro_batches(lengths, max_tokens)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    for group in groups:
        cost = len(group) * max(lengths[row] for row in group)
        assert cost <= max_tokens or len(group) == 1


@given(LENGTHS, st.integers(1, 100))
def test_groups_run_from_long_to_short_rows(lengths: list[int], max_tokens: int) -> None:
    order = [lengths[row] for group in micro_batches(lengths, max_tokens) for row in group]
    assert order == sorted(lengths, reverse=True)


def test_groups_follow_from_lengths_alone() -> None:
    assert micro_batches([3, 9, 2, 3], 9) == [[1], [0, 3, 2]]
    assert micro_batches([20, 1], 9) == [[0], [1]]
    assert micro_batches([], 9) == []


def test_a_budget_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens is 0: give at least 1"):
        micro_batches([1], 0)


def _batch(rows: list[list[int]], prompt_lengths: list[int]) -> Experience:
    return Experience(
        {
            "tokens": Column.ragged(ColumnKind.SEQUENCE, rows, torch.int32),
            "prompt_lengths": Column(ColumnKind.ROW, torch.tensor(prompt_lengths)),
        }
    )


def test_padding_keeps_tokens_and_points_at_the_state_before_each_completion_token() -> None:
    rows = pad_rows(_batch([[5, 6, 7], [8, 9, 10, 11, 12], [13]], [2, 1, 1]), "cpu")
    assert rows.tokens_BT.tolist() == [[5, 6, 7, 0, 0], [8, 9, 10, 11, 12], [13, 0, 0, 0, 0]]
    assert rows.tokens_BT.dtype == torch.int64
    assert rows.lengths_B.tolist() == [3, 5, 1]
    assert rows.targets_N.tolist() == [7, 9, 10, 11, 12]
    assert rows.state_index_N.tolist() == [1, 5, 6, 7, 8]
    before = rows.tokens_BT.flatten()[rows.state_index_N]
    assert before.tolist() == [6, 8, 9, 10, 11]


@pytest.mark.parametrize("prompt_length", [0, 4, -1])
def test_a_prompt_without_tokens_or_longer_than_its_row_is_refused(prompt_length: int) -> None:
    with pytest.raises(ValueError, match=rf"prompt_lengths of row 1 is {prompt_length} in a row"):
        pad_rows(_batch([[5, 6], [7, 8, 9]], [1, prompt_length]), "cpu")
