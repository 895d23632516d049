"""Rows of a referenced batch: how long they are, where they lie, and how parts become one.

Ranks of a service share a batch out among them by the lengths of its rows. Each publishes what it
made of its own rows; the service's face joins the parts to one reference.
"""

from __future__ import annotations

from collections.abc import Sequence

from rolemesh.engine.experience import ColumnMissingError
from rolemesh.rpc.row_places import rows_of
from rolemesh.v1 import experience_pb2

TOKENS = "tokens"
"""The column whose shards tell how long rows are."""


def names_of(ref: experience_pb2.ExperienceRef) -> list[str]:
    """Columns of a batch, each once."""
    return list(dict.fromkeys(column.name for group in ref.groups for column in group.columns))


def group_with(ref: experience_pb2.ExperienceRef, name: str) -> int:
    """Index of the group that holds a column.

    The last one wins: in a join, a column of the right side replaces one of the same name.

    Raises:
        ColumnMissingError: no group has it.
    """
    for index in range(len(ref.groups) - 1, -1, -1):
        if any(column.name == name for column in ref.groups[index].columns):
            return index
    known = sorted({column.name for group in ref.groups for column in group.columns})
    raise ColumnMissingError(
        f"column {name!r} is missing; the experience has {known}: "
        "call the role that produces it first"
    )


def row_tokens(ref: experience_pb2.ExperienceRef) -> list[int]:
    """Tokens of each row of the batch, prompt and completion.

    Raises:
        ColumnMissingError: the batch has no column `tokens`.
        ValueError: its shards do not tell the length of every row.
    """
    lengths: list[int | None] = [None] * ref.num_rows
    for shard in ref.groups[group_with(ref, TOKENS)].shards:
        rows = rows_of(shard)
        if len(shard.row_tokens) != len(rows) or rows[-1] >= ref.num_rows:
            raise ValueError(
                f"shard {shard.experience_id} of {len(rows)} rows tells the tokens of "
                f"{len(shard.row_tokens)}: the producer must fill Shard.row_tokens"
            )
        for row, length in zip(rows, shard.row_tokens, strict=True):
            lengths[row] = length
    known = [length for length in lengths if length is not None]
    if len(known) != ref.num_rows:
        raise ValueError(
            f"the shards of {TOKENS!r} hold {len(known)} of {ref.num_rows} rows: every row must "
            "lie in one of them"
        )
    return known


def merge_parts(parts: Sequence[experience_pb2.ExperienceRef]) -> experience_pb2.ExperienceRef:
    """One reference from some parts of the same batch, which need not make up all of it.

    Args:
        parts: one at least; those of ranks without rows have no groups.

    Returns:
        Shards ordered by their first row; no group when no part has one.

    Raises:
        RuntimeError: columns differ.
    """
    filled = [part for part in parts if part.groups]
    merged = experience_pb2.ExperienceRef()
    merged.CopyFrom(filled[0] if filled else parts[0])
    for part in filled[1:]:
        if len(part.groups) != len(merged.groups) or part.num_rows != merged.num_rows:
            raise RuntimeError(
                f"ranks published parts of {merged.num_rows} and {part.num_rows} rows, in "
                f"{len(merged.groups)} and {len(part.groups)} groups"
            )
        for group, more in zip(merged.groups, part.groups, strict=True):
            if list(group.columns) != list(more.columns):
                raise RuntimeError(
                    f"ranks published the columns {[c.name for c in group.columns]} and "
                    f"{[c.name for c in more.columns]}"
                )
            group.shards.extend(more.shards)
    for group in merged.groups:
        shards = sorted(group.shards, key=lambda shard: shard.row_start)
        del group.shards[:]
        group.shards.extend(shards)
    return merged


def join_parts(parts: Sequence[experience_pb2.ExperienceRef]) -> experience_pb2.ExperienceRef:
    """One reference from those of ranks that each published some rows of the same batch.

    Args:
        parts: in rank order; those of ranks without rows have no groups.

    Raises:
        RuntimeError: columns differ, or the rows do not make up the batch.
    """
    if not any(part.groups for part in parts):
        raise RuntimeError("no rank has published a row")
    joined = merge_parts(parts)
    for group in joined.groups:
        held = sorted(row for shard in group.shards for row in rows_of(shard))
        if held != list(range(joined.num_rows)):
            raise RuntimeError(f"ranks published {len(held)} rows of a batch of {joined.num_rows}")
    return joined


def cut_out(
    part: experience_pb2.ExperienceRef, first_row: int, num_rows: int
) -> experience_pb2.ExperienceRef:
    """The same rows as a batch of their own, in which row 0 is `first_row`.

    Args:
        part: of a batch; all its rows lie between first_row and first_row + num_rows - 1.
        first_row: first row of the cut.
        num_rows: rows of the cut; the part may hold some of them only.

    Raises:
        ValueError: a shard holds a row that is not in the cut.
    """
    cut = experience_pb2.ExperienceRef()
    cut.CopyFrom(part)
    cut.num_rows = num_rows
    for group in cut.groups:
        for shard in group.shards:
            rows = [row - first_row for row in rows_of(shard)]
            if rows[0] < 0 or rows[-1] >= num_rows:
                raise ValueError(
                    f"shard {shard.experience_id} holds rows {rows[0] + first_row} to "
                    f"{rows[-1] + first_row}, outside the cut of {num_rows} rows from {first_row}"
                )
            shard.row_start = rows[0]
            if shard.rows:
                shard.rows[:] = rows
    return cut
