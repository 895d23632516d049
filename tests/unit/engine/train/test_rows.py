"""Tests of which rows of a batch a data-parallel rank trains on, and which batches it refuses."""

from __future__ import annotations

import pytest
import torch
from support.token_batches import token_batch

from rolemesh.engine.packing.batching import balanced_partition, update_assignment
from rolemesh.engine.parallel.mesh import RankGroup
from rolemesh.engine.train.rows import HeldRows

BATCH = token_batch()
LENGTHS = BATCH["tokens"].lengths().tolist()


def _dp(index: int, size: int) -> RankGroup:
    return RankGroup(tuple(range(size)), index, None)


def test_places_point_at_the_rows_of_the_whole_batch() -> None:
    for index in range(3):
        part = balanced_partition(LENGTHS, 3)[index]
        rows = [7, *part[::-1]] if 7 not in part else part[::-1]
        held = BATCH.select(torch.tensor(rows))
        places = HeldRows(held, rows, LENGTHS).of_mini_batch(_dp(index, 3))
        assert [rows[place] for place in places] == part


def test_the_places_of_an_update_are_those_of_its_assignment() -> None:
    assignment = update_assignment(LENGTHS, epochs=2, mini_batch_rows=3, seed=9, num_parts=2)
    for index in range(2):
        found = HeldRows(BATCH, None, None).of_update(
            _dp(index, 2), epochs=2, mini_batch_rows=3, seed=9
        )
        assert found == [parts[index] for parts in assignment]


def test_one_rank_takes_all_rows_in_order() -> None:
    assert HeldRows(BATCH, None, None).of_mini_batch(_dp(0, 1)) == list(range(8))


@pytest.mark.parametrize(
    ("rows", "lengths", "said"),
    [
        ([0, 1], None, "go together"),
        (None, LENGTHS, "go together"),
        ([0, 1], LENGTHS, "rows has 2 entries, but the batch has 8"),
        ([*range(7), 8], LENGTHS, "rows has 8, but lengths has 8 entries"),
        ([*range(7), -1], LENGTHS, "rows has -1"),
        (list(range(8)), [*LENGTHS[:7], 99], "row 7 has 11 tokens, but lengths says 99"),
    ],
    ids=["no lengths", "no rows", "too few", "beyond", "negative", "other length"],
)
def test_rows_and_lengths_that_do_not_fit_are_refused(
    rows: list[int] | None, lengths: list[int] | None, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        HeldRows(BATCH, rows, lengths)


def test_a_part_that_is_not_held_is_refused() -> None:
    held = HeldRows(BATCH.slice(0, 2), [0, 1], LENGTHS)
    with pytest.raises(ValueError, match="but the batch does not hold it"):
        held.of_mini_batch(_dp(0, 2))
    with pytest.raises(ValueError, match="0 rows"):
        HeldRows(BATCH.slice(0, 0), None, None).of_mini_batch(_dp(0, 2))
