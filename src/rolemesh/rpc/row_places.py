"""Places of the rows of a referenced batch: arithmetic on the reference."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from rolemesh.v1 import experience_pb2


def rows_of(shard: experience_pb2.Shard) -> Sequence[int]:
    """Rows of the batch that a shard holds, ascending.

    Raises:
        ValueError: the rows that it names are not num_rows ascending ones from row_start.
    """
    if not shard.rows:
        return range(shard.row_start, shard.row_start + shard.num_rows)
    rows = list(shard.rows)
    is_ascending = all(first < second for first, second in itertools.pairwise(rows))
    if len(rows) != shard.num_rows or rows[0] != shard.row_start or not is_ascending:
        raise ValueError(
            f"shard {shard.experience_id} says that it holds {shard.num_rows} rows from "
            f"{shard.row_start}, but names {len(rows)} from {rows[0]}: rows must be ascending"
        )
    return rows


def is_consecutive(rows: Sequence[int]) -> bool:
    """Whether each row follows the one before it."""
    return all(row == rows[0] + index for index, row in enumerate(rows))


def place(
    shards: Iterable[experience_pb2.Shard], wanted: Sequence[int]
) -> list[tuple[experience_pb2.Shard, Sequence[int], list[int]]]:
    """Finds wanted rows in shards.

    Returns:
        For each shard that holds some of them: the shard, their positions in it (a range where
        they are neighbours), and their positions in `wanted`.

    Raises:
        ValueError: a row is in no shard, or in two.
    """
    wanted_at = {row: index for index, row in enumerate(wanted)}
    found: list[tuple[experience_pb2.Shard, Sequence[int], list[int]]] = []
    missing = dict(wanted_at)
    for shard in shards:
        positions, targets = [], []
        for position, row in enumerate(rows_of(shard)):
            if row in wanted_at:
                if row not in missing:
                    raise ValueError(
                        f"row {row} lies in two shards, the second being {shard.experience_id}"
                    )
                positions.append(position)
                targets.append(missing.pop(row))
        if positions:
            is_range = is_consecutive(positions)
            found.append(
                (
                    shard,
                    range(positions[0], positions[-1] + 1) if is_range else positions,
                    targets,
                )
            )
    if missing:
        raise ValueError(
            f"rows {sorted(missing)[:3]} ({len(missing)} of {len(wanted)}) lie in no shard: every "
            "row of a batch must lie in one"
        )
    return found
