"""Blocks of a generation: finished rows that leave as an experience of their own.

The rows of a block may lie on several ranks, which sample each their own prompts. A rank publishes
what it has of a block, once, as shards of the whole batch; a block is the same shards under other
row numbers.
"""

from __future__ import annotations

import threading

from rolemesh.rpc.experience.references import cut_out, join_parts, merge_parts, rows_of
from rolemesh.v1 import experience_pb2, rollout_pb2


def block_of(
    part: experience_pb2.ExperienceRef, index: int, block_rows: int
) -> rollout_pb2.GeneratedBlock:
    """A block, or a rank's part of it, as it goes out.

    Example: of a batch of 10 rows, block 2 of 4 rows each is rows 8 and 9 as rows 0 and 1.

    Args:
        part: Rows of the block, by their numbers in the whole batch.
        index: Number of the block.
        block_rows: Rows of a block that is not the last.
    """
    first = index * block_rows
    cut = cut_out(part, first, min(block_rows, part.num_rows - first))
    return rollout_pb2.GeneratedBlock(index=index, experience=cut)


class BlockParts:
    """Joins the parts of blocks, as ranks send them, to whole ones. Thread-safe.

    Invariant: a block is returned once, by the call that brings its last rows.

    Example: for a block of 4 rows, `parts(block with rows 0 and 1)` returns None, and then
    `parts(block with rows 2 and 3)` the block with all four.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: dict[int, list[experience_pb2.ExperienceRef]] = {}

    def __call__(self, part: rollout_pb2.GeneratedBlock) -> rollout_pb2.GeneratedBlock | None:
        """The whole block, if this part makes it whole.

        Raises:
            RuntimeError: Ranks disagree on columns, or two hold the same row.
        """
        with self._lock:
            parts = self._parts.setdefault(part.index, [])
            parts.append(part.experience)
            here = merge_parts(parts)
            held = sum(len(rows_of(shard)) for shard in here.groups[0].shards)
            if held < here.num_rows:
                return None
            del self._parts[part.index]
        return rollout_pb2.GeneratedBlock(index=part.index, experience=join_parts(parts))
