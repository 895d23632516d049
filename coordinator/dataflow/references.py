"""References to experience, joined by columns and put together by rows. No row is touched."""

from __future__ import annotations

from collections.abc import Sequence

from rolemesh.v1 import experience_pb2


def join_references(
    references: Sequence[experience_pb2.ExperienceRef],
) -> experience_pb2.ExperienceRef:
    """One reference with the columns of all; a later column replaces an earlier one of its name.

    Raises:
        ValueError: They are not over the same rows.
    """
    first = references[0]
    joined = experience_pb2.ExperienceRef(
        run_id=first.run_id, step=first.step, num_rows=first.num_rows
    )
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
    joined.groups.extend(reversed(groups))
    return joined


def concat_references(
    references: Sequence[experience_pb2.ExperienceRef],
) -> experience_pb2.ExperienceRef:
    """One reference over the rows of all, in order.

    Raises:
        ValueError: There are none, or their columns differ.
    """
    if not references:
        raise ValueError("no references to put together: give at least one")
    whole = experience_pb2.ExperienceRef()
    whole.CopyFrom(references[0])
    for reference in references[1:]:
        if len(reference.groups) != len(whole.groups) or any(
            list(group.columns) != list(more.columns)
            for group, more in zip(whole.groups, reference.groups, strict=True)
        ):
            raise ValueError(
                f"cannot put together the columns {_names(whole)} and {_names(reference)}: every "
                "block of an experience must have the same ones"
            )
        for group, more in zip(whole.groups, reference.groups, strict=True):
            for shard in more.shards:
                moved = group.shards.add()
                moved.CopyFrom(shard)
                moved.row_start += whole.num_rows
                moved.rows[:] = [row + whole.num_rows for row in shard.rows]
        whole.num_rows += reference.num_rows
    return whole


def _names(reference: experience_pb2.ExperienceRef) -> list[list[str]]:
    return [[column.name for column in group.columns] for group in reference.groups]
