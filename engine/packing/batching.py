"""Rows for ranks and for forward passes, by their lengths.

Rows may come in units: neighbours (of a group, of a pair) that stay together from the shuffle to
the forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rolemesh.engine.packing.balance import balanced_partition


def check_units(num_rows: int, rows_per_unit: int) -> None:
    """Raises ValueError unless rows can be cut into units.

    Args:
        num_rows: Rows, in order.
        rows_per_unit: Neighbouring rows that stay together, at least 1.
    """
    if rows_per_unit < 1:
        raise ValueError(f"rows_per_unit is {rows_per_unit}: give at least 1")
    if num_rows % rows_per_unit:
        raise ValueError(
            f"the batch has {num_rows} rows, which is no multiple of rows_per_unit "
            f"{rows_per_unit}: give whole units"
        )


def unit_lengths(lengths: Sequence[int], rows_per_unit: int) -> list[int]:
    """Tokens in each unit.

    Args:
        lengths: Tokens in each row.
        rows_per_unit: Neighbouring rows that stay together; 1: each row for itself.

    Raises:
        ValueError: The rows are no multiple of rows_per_unit.
    """
    check_units(len(lengths), rows_per_unit)
    return [
        sum(lengths[first : first + rows_per_unit])
        for first in range(0, len(lengths), rows_per_unit)
    ]


def unit_rows(units: Sequence[int], rows_per_unit: int) -> list[int]:
    """The rows of units, in the order of the units.

    Example: units (2, 0) of 2 rows each are the rows [4, 5, 0, 1].
    """
    return [unit * rows_per_unit + row for unit in units for row in range(rows_per_unit)]


def rectangles(lengths: Sequence[int], max_tokens: int, rows_per_unit: int = 1) -> list[list[int]]:
    """Groups rows of similar length so that a padded group costs at most max_tokens.

    For models that take no packed rows; see `planning.plan_passes` for all others. The cost of a
    group is its rows times its longest row. Units are taken by their longest row, longest first
    (ties by index), so little is padded, the groups depend on nothing but the lengths, and the most
    expensive pass comes first. A single unit that costs more than max_tokens stands alone.

    Args:
        lengths: Tokens in each row.
        max_tokens: Budget of a group, padding included; at least 1.
        rows_per_unit: Neighbouring rows that stay together; 1: each row for itself.

    Returns:
        Row indexes, each exactly once.

    Example: lengths (3, 9, 2, 3) with a budget of 9 give [[1], [0, 3, 2]]: 1 x 9 and 3 x 3.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}: give at least 1")
    check_units(len(lengths), rows_per_unit)
    longest_of = [
        max(lengths[first : first + rows_per_unit])
        for first in range(0, len(lengths), rows_per_unit)
    ]
    groups: list[list[int]] = []
    longest = 0
    for unit in sorted(range(len(longest_of)), key=lambda index: (-longest_of[index], index)):
        if not groups or (len(groups[-1]) + rows_per_unit) * longest > max_tokens:
            groups.append([])
            longest = longest_of[unit]
        groups[-1] += unit_rows([unit], rows_per_unit)
    return groups


def update_assignment(
    lengths: Sequence[int],
    *,
    epochs: int,
    mini_batch_rows: int,
    seed: int,
    num_parts: int,
    rows_per_unit: int = 1,
) -> list[list[list[int]]]:
    """Which rows each data-parallel rank trains on in each optimizer step of an update.

    Every rank works it out for itself. The mini-batches do not depend on num_parts: each epoch's
    units are shuffled (torch.randperm of a generator with the seed) and split in order, and each
    mini-batch is then cut by `balanced_partition`.

    Args:
        lengths: Tokens in each row.
        epochs: Passes over the rows, at least 1.
        mini_batch_rows: Rows of one optimizer step over all ranks, at least 1; the last one of an
            epoch may have fewer.
        seed: Of the shuffles.
        num_parts: Data-parallel ranks.
        rows_per_unit: Neighbouring rows that stay together; 1: each row for itself. Divides the
            rows and mini_batch_rows.

    Returns:
        Rows by mini-batch and part, in the order in which their units were drawn. A mini-batch of
        fewer units than parts leaves parts empty.
    """
    for name, number in (("epochs", epochs), ("mini_batch_rows", mini_batch_rows)):
        if number < 1:
            raise ValueError(f"{name} is {number}: give at least 1")
    lengths_of_units = unit_lengths(lengths, rows_per_unit)
    if mini_batch_rows % rows_per_unit:
        raise ValueError(
            f"mini_batch_rows is {mini_batch_rows}, no multiple of rows_per_unit {rows_per_unit}: "
            "give whole units"
        )
    shuffle = torch.Generator().manual_seed(seed)
    assignment = []
    step = mini_batch_rows // rows_per_unit
    for _ in range(epochs):
        order: list[int] = torch.randperm(len(lengths_of_units), generator=shuffle).tolist()
        for start in range(0, len(order), step):
            units = order[start : start + step]
            parts = balanced_partition([lengths_of_units[unit] for unit in units], num_parts)
            assignment.append(
                [unit_rows([units[place] for place in part], rows_per_unit) for part in parts]
            )
    return assignment
