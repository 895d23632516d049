"""References to experience that no service holds."""

from __future__ import annotations

from collections.abc import Sequence

from rolemesh.rpc.experience.references import is_consecutive
from rolemesh.v1 import experience_pb2


def shard(
    rows: Sequence[int], name: str = "one", tokens: Sequence[int] = (), rank: int = 0
) -> experience_pb2.Shard:
    return experience_pb2.Shard(
        experience_id=name,
        row_start=rows[0],
        num_rows=len(rows),
        rows=() if is_consecutive(rows) else rows,
        row_tokens=tokens,
        rank=rank,
    )


def ref(
    num_rows: int, *shards: experience_pb2.Shard, columns: Sequence[str] = ("tokens",)
) -> experience_pb2.ExperienceRef:
    group = experience_pb2.ColumnGroup(
        columns=[experience_pb2.ColumnSchema(name=name) for name in columns], shards=shards
    )
    return experience_pb2.ExperienceRef(num_rows=num_rows, groups=[group] if shards else [])
