"""Parts of blocks that become whole blocks."""

from __future__ import annotations

import pytest
from support.references import ref, shard

from rolemesh.rpc.experience.references import rows_of
from rolemesh.services.runtime.experience.blocks import BlockParts, block_of


def test_a_block_is_whole_with_the_part_that_brings_its_last_rows() -> None:
    parts = BlockParts()
    whole = ref(10, shard([4, 5, 7], "a"), shard([6], "b"))
    first, second = (ref(10, s) for s in whole.groups[0].shards)
    assert parts(block_of(first, 1, 4)) is None
    assert parts(block_of(ref(10, shard([8], "c")), 2, 4)) is None
    block = parts(block_of(second, 1, 4))
    assert block is not None
    assert block.index == 1
    assert block.experience.num_rows == 4
    assert [(s.experience_id, list(rows_of(s))) for s in block.experience.groups[0].shards] == [
        ("a", [0, 1, 3]),
        ("b", [2]),
    ]
    last = parts(block_of(ref(10, shard([9], "d")), 2, 4))
    assert last is not None
    assert last.experience.num_rows == 2


def test_a_row_of_a_block_that_two_ranks_send_is_an_error() -> None:
    parts = BlockParts()
    assert parts(block_of(ref(4, shard([0, 1])), 0, 3)) is None
    with pytest.raises(RuntimeError, match="published 4 rows of a batch of 3"):
        parts(block_of(ref(4, shard([1, 2])), 0, 3))
