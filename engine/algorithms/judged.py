"""Rows that could not be judged: all that follows works as if they had not been sampled.

Shape letters: B rows, J judged rows, N packed completion tokens.
"""

from __future__ import annotations

import torch

from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.specs.columns import IS_JUDGED

_ABSENT = {"pair_ids": -1}
"""What a row that is left out gets in a new column; 0 in others."""


LOSS_MASK = "loss_mask"
"""The mask of a row that is left out becomes False, so that no update counts it."""


def whole_groups(failed_B: torch.Tensor, prompt_ids_B: torch.Tensor) -> torch.Tensor:
    """The rows whose prompt has a row that failed, bool [B]."""
    return torch.isin(prompt_ids_B, prompt_ids_B[failed_B])


def left_out(batch: Experience, is_judged_B: torch.Tensor) -> Experience:
    """The columns is_judged and loss_mask of a batch of which rows are left out.

    Args:
        batch: With loss_mask; with is_judged if another role has left rows out.
        is_judged_B: bool [B], False for the rows to leave out.
    """
    if IS_JUDGED in batch:
        is_judged_B = is_judged_B & batch[IS_JUDGED].values
    mask = batch[LOSS_MASK]
    counts_N = is_judged_B.repeat_interleave(mask.lengths())
    return Experience(
        {
            IS_JUDGED: Column(ColumnKind.ROW, is_judged_B),
            LOSS_MASK: Column(mask.kind, mask.values & counts_N, mask.offsets),
        }
    )


def judged_rows(batch: Experience) -> torch.Tensor | None:
    """int64 [J], the rows that have a reward; None: all.

    Raises:
        ValueError: The column holds something else.
    """
    if IS_JUDGED not in batch:
        return None
    is_judged_B = batch[IS_JUDGED].values
    if is_judged_B.dtype != torch.bool or batch[IS_JUDGED].kind is not ColumnKind.ROW:
        raise ValueError(
            f"column {IS_JUDGED!r} is a {batch[IS_JUDGED].kind.value} column of "
            f"{is_judged_B.dtype}: give torch.bool, one a row"
        )
    if bool(is_judged_B.all()):
        return None
    rows_J: torch.Tensor = is_judged_B.nonzero().flatten()
    return rows_J


def with_absent_rows(columns: Experience, rows_J: torch.Tensor, batch: Experience) -> Experience:
    """Columns over some rows of a batch as columns over all: 0 in the others (pair_ids: -1).

    Args:
        columns: Row and completion columns over the rows `rows_J`.
        rows_J: int64 [J], row numbers, ascending.
        batch: All rows, with the column loss_mask.

    Example: advantages ((0.5), (-0.5, -0.5)) of the rows (0, 2) become ((0.5), (0, 0, 0),
    (-0.5, -0.5)) where row 1 has 3 completion tokens.
    """
    mask = batch["loss_mask"]
    is_there_B = torch.zeros(mask.num_rows, dtype=torch.bool)
    is_there_B[rows_J] = True
    is_there_N = is_there_B.repeat_interleave(mask.lengths())

    def over_all(name: str, column: Column) -> Column:
        is_row = column.kind is ColumnKind.ROW
        is_there = is_there_B if is_row else is_there_N
        values = torch.full((len(is_there),), _ABSENT.get(name, 0), dtype=column.values.dtype)
        values[is_there] = column.values.cpu()
        return Column(column.kind, values, None if is_row else mask.offsets)

    return Experience({name: over_all(name, column) for name, column in columns.columns.items()})
