"""Arithmetic on references to experience: columns, rows, parts, lengths, places. No row is touched.

A reference is never changed in place: a function returns a new one, or the given one where nothing
is to change. `place` and what builds on it read a reference as a service that wants its rows does.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from rolemesh.engine.layout.payload import ColumnMissingError
from rolemesh.v1 import experience_pb2

TOKENS = "tokens"
"""The column whose shards tell how long rows are."""

Placed: TypeAlias = tuple[experience_pb2.Shard, Sequence[int], Sequence[int]]
"""A shard, positions of rows in it (a range where they are neighbours), and for each of them its
position among the rows that are wanted."""


# --- what a reference names -----------------------------------------------------------------


def names_of(ref: experience_pb2.ExperienceRef) -> list[str]:
    """Columns of a batch, each once."""
    return list(dict.fromkeys(column.name for group in ref.groups for column in group.columns))


def shards_of(ref: experience_pb2.ExperienceRef) -> list[experience_pb2.Shard]:
    """Shards of all groups."""
    return [shard for group in ref.groups for shard in group.shards]


def by_group(
    ref: experience_pb2.ExperienceRef, names: Iterable[str]
) -> dict[int, list[experience_pb2.ColumnSchema]]:
    """Wanted columns, each once, by the index of the group that holds them.

    The last group wins: in a join, a column of the right side replaces one of the same name.

    Raises:
        ColumnMissingError: No group has a column.
    """
    holders = {
        column.name: (index, column)
        for index, group in enumerate(ref.groups)
        for column in group.columns
    }
    found: dict[int, list[experience_pb2.ColumnSchema]] = {}
    for name in dict.fromkeys(names):
        if name not in holders:
            raise ColumnMissingError(name, holders)
        index, column = holders[name]
        found.setdefault(index, []).append(column)
    return found


def row_tokens(ref: experience_pb2.ExperienceRef) -> list[int]:
    """Tokens of each row of the batch, prompt and completion.

    Raises:
        ColumnMissingError: The batch has no column `tokens`.
        ValueError: Its shards do not tell the length of every row.
    """
    lengths: dict[int, int] = {}
    (holder,) = by_group(ref, [TOKENS])
    for shard in ref.groups[holder].shards:
        rows = rows_of(shard)
        if len(shard.row_tokens) != len(rows) or not rows or rows[-1] >= ref.num_rows:
            raise ValueError(
                f"shard {shard.experience_id} of {len(rows)} rows tells the tokens of "
                f"{len(shard.row_tokens)}: the producer must fill Shard.row_tokens"
            )
        lengths.update(zip(rows, shard.row_tokens, strict=True))
    # Counted before a list of num_rows is made: the reference may say any number.
    if len(lengths) != ref.num_rows:
        raise ValueError(
            f"the shards of {TOKENS!r} hold {len(lengths)} of {ref.num_rows} rows: every row must "
            "lie in one of them"
        )
    return [lengths[row] for row in range(ref.num_rows)]


# --- references made of references ----------------------------------------------------------


def join_references(
    references: Sequence[experience_pb2.ExperienceRef],
) -> experience_pb2.ExperienceRef:
    """One reference with the columns of all; a later column replaces an earlier one of its name.

    Raises:
        ValueError: They are not over the same rows.
    """
    first = references[0]
    if len(references) == 1 and len(first.groups) == 1:
        return first
    taken: set[str] = set()
    groups = []
    for reference in reversed(references):
        if (reference.run_id, reference.num_rows) != (first.run_id, first.num_rows):
            raise ValueError(
                f"cannot join {first.num_rows} rows of run {first.run_id!r} with "
                f"{reference.num_rows} rows of run {reference.run_id!r}: joined experience must "
                "be over the same rows"
            )
        for group in reversed(reference.groups):
            columns = [column for column in group.columns if column.name not in taken]
            taken.update(column.name for column in columns)
            if columns:
                groups.append(experience_pb2.ColumnGroup(columns=columns, shards=group.shards))
    return experience_pb2.ExperienceRef(
        run_id=first.run_id, step=first.step, num_rows=first.num_rows, groups=reversed(groups)
    )


def concat_references(
    references: Sequence[experience_pb2.ExperienceRef],
) -> experience_pb2.ExperienceRef:
    """One reference over the rows of all, in order.

    Raises:
        ValueError: There are none, or their columns differ.
    """
    if not references:
        raise ValueError("no references to put together: give at least one")
    if len(references) == 1:
        return references[0]
    num_rows = sum(reference.num_rows for reference in references)
    moved, first_row = [], 0
    for reference in references:
        if not _are_alike(references[0], reference):
            raise ValueError(
                f"cannot put together the columns {_names(references[0])} and "
                f"{_names(reference)}: every block of an experience must have the same ones"
            )
        moved.append(_moved(reference, first_row, num_rows))
        first_row += reference.num_rows
    return merge_parts(moved)


def merge_parts(parts: Sequence[experience_pb2.ExperienceRef]) -> experience_pb2.ExperienceRef:
    """One reference from some parts of the same batch, which need not make up all of it.

    Args:
        parts: One at least; those of ranks without rows have no groups.

    Returns:
        Shards ordered by their first row; no group when no part has one.

    Raises:
        RuntimeError: Columns differ.
    """
    filled = [part for part in parts if part.groups]
    first = filled[0] if filled else parts[0]
    for part in filled:
        if part.num_rows != first.num_rows or not _are_alike(part, first):
            raise RuntimeError(
                f"ranks published parts of {first.num_rows} and {part.num_rows} rows, with the "
                f"columns {names_of(first)} and {names_of(part)}"
            )
    merged = experience_pb2.ExperienceRef()
    merged.CopyFrom(first)
    for index, group in enumerate(merged.groups):
        shards = [shard for part in filled for shard in part.groups[index].shards]
        del group.shards[:]
        group.shards.extend(sorted(shards, key=lambda shard: shard.row_start))
    return merged


def join_parts(parts: Sequence[experience_pb2.ExperienceRef]) -> experience_pb2.ExperienceRef:
    """One reference from those of ranks that each published some rows of the same batch.

    Args:
        parts: In rank order; those of ranks without rows have no groups.

    Raises:
        RuntimeError: Columns differ, or the rows do not make up the batch.
    """
    if not any(part.groups for part in parts):
        raise RuntimeError("no rank has published a row")
    joined = merge_parts(parts)
    for group in joined.groups:
        held = sorted(row for shard in group.shards for row in rows_of(shard))
        if held != list(range(joined.num_rows)):
            raise RuntimeError(f"ranks published {len(held)} rows of a batch of {joined.num_rows}")
    return joined


def by_column(ref: experience_pb2.ExperienceRef) -> experience_pb2.ExperienceRef:
    """The same columns, each in a group of its own, by their names.

    So services of several makes may be joined: none has to group or order columns as others do.
    """
    schemas: dict[str, experience_pb2.ColumnSchema] = {}
    shards: dict[str, Sequence[experience_pb2.Shard]] = {}
    for group in ref.groups:
        for column in group.columns:
            known = experience_pb2.ColumnSchema()
            known.CopyFrom(column)
            # 0 means 1.
            known.width = max(1, column.width)
            schemas[column.name], shards[column.name] = known, group.shards
    return experience_pb2.ExperienceRef(
        run_id=ref.run_id,
        step=ref.step,
        num_rows=ref.num_rows,
        groups=[
            experience_pb2.ColumnGroup(columns=[schemas[name]], shards=shards[name])
            for name in sorted(schemas)
        ],
    )


def cut_out(
    part: experience_pb2.ExperienceRef, first_row: int, num_rows: int
) -> experience_pb2.ExperienceRef:
    """The same rows as a batch of their own, in which row 0 is `first_row`.

    Args:
        part: Of a batch; all its rows lie between first_row and first_row + num_rows - 1.
        first_row: First row of the cut.
        num_rows: Rows of the cut; the part may hold some of them only.

    Raises:
        ValueError: A shard holds a row that is not in the cut.
    """
    for shard in shards_of(part):
        rows = rows_of(shard)
        if rows[0] < first_row or rows[-1] >= first_row + num_rows:
            raise ValueError(
                f"shard {shard.experience_id} holds rows {rows[0]} to {rows[-1]}, outside the cut "
                f"of {num_rows} rows from {first_row}"
            )
    return _moved(part, -first_row, num_rows)


def _moved(
    ref: experience_pb2.ExperienceRef, by: int, num_rows: int
) -> experience_pb2.ExperienceRef:
    """The same shards under other row numbers, in a batch of num_rows rows."""
    moved = experience_pb2.ExperienceRef()
    moved.CopyFrom(ref)
    moved.num_rows = num_rows
    for shard in shards_of(moved):
        shard.row_start += by
        shard.rows[:] = [row + by for row in shard.rows]
    return moved


def _are_alike(one: experience_pb2.ExperienceRef, other: experience_pb2.ExperienceRef) -> bool:
    return [[*group.columns] for group in one.groups] == [
        [*group.columns] for group in other.groups
    ]


def _names(reference: experience_pb2.ExperienceRef) -> list[list[str]]:
    return [[column.name for column in group.columns] for group in reference.groups]


# --- where rows lie -------------------------------------------------------------------------


def rows_of(shard: experience_pb2.Shard) -> Sequence[int]:
    """Rows of the batch that a shard holds, ascending.

    Raises:
        ValueError: The rows that it names are not num_rows ascending ones from row_start.
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
    if isinstance(rows, range):
        return rows.step == 1
    return all(row == rows[0] + index for index, row in enumerate(rows))


def place(shards: Iterable[experience_pb2.Shard], wanted: Sequence[int]) -> list[Placed]:
    """Finds wanted rows, each named once, in shards; those without any of them are left out.

    The cost grows with the rows that are named one by one. Of neighbours, whose number a stranger
    may have made up, each wanted one takes a byte.

    Raises:
        ValueError: A row is in no shard, or in two.
    """
    wants_range = isinstance(wanted, range) and wanted.step == 1
    place_of = {} if wants_range else {row: at for at, row in enumerate(wanted)}
    ascending = wanted if wants_range else sorted(place_of)
    is_found = bytearray(len(wanted))
    found: list[Placed] = []
    for shard in shards:
        rows = rows_of(shard)
        positions: Sequence[int]
        targets: Sequence[int]
        if isinstance(rows, range):
            first, stop = (bisect.bisect_left(ascending, row) for row in (rows.start, rows.stop))
            held = ascending[first:stop]
            if isinstance(held, range):
                positions = range(held.start - rows.start, held.stop - rows.start)
                targets = range(first, stop)
            else:
                positions = [row - rows.start for row in held]
                targets = [place_of[row] for row in held]
        else:
            known = wanted if wants_range else place_of
            positions = [at for at, row in enumerate(rows) if row in known]
            targets = [
                rows[at] - wanted[0] if wants_range else place_of[rows[at]] for at in positions
            ]
        for target in targets:
            if is_found[target]:
                raise ValueError(
                    f"row {wanted[target]} lies in two shards, the second being "
                    f"{shard.experience_id}"
                )
            is_found[target] = 1
        if positions:
            neighbours = range(positions[0], positions[-1] + 1)
            found.append((shard, neighbours if is_consecutive(positions) else positions, targets))
    if num_missing := is_found.count(0):
        missing = (row for row, is_there in zip(wanted, is_found, strict=True) if not is_there)
        raise ValueError(
            f"rows {heapq.nsmallest(3, missing)} ({num_missing} of {len(wanted)}) lie in no shard: "
            "every row of a batch must lie in one"
        )
    return found


def order_of(found: Iterable[Placed]) -> list[int]:
    """For each wanted row its position among those that shards give, one shard after another.

    Example: a shard gives the wanted rows 0 and 2 and the next one row 1, so they come as
    [0, 2, 1], and the order [0, 2, 1] of these gives the wanted ones.
    """
    came = [target for *_, targets in found for target in targets]
    order = [0] * len(came)
    for position, target in enumerate(came):
        order[target] = position
    return order
