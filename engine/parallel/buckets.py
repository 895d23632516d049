"""Sums of many tensors over ranks, in few messages.

Apart from what cuts models (`data_parallel`): that brings FSDP and transformers, which a process
that holds no model need not import.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist

from rolemesh.engine.parallel.mesh import RankGroup

BUCKET_BYTES = 64 * 2**20
"""Gradients that are sent as one message."""


def sum_over(tensors: Iterable[torch.Tensor], group: RankGroup) -> None:
    """Adds up tensors over the ranks of a group, in place, in buckets.

    Args:
        tensors: Of any shapes, but the same ones in the same order on all ranks, of one dtype.
        group: Who takes part.
    """
    if group.process_group is None:
        return
    for bucket in buckets((tensor for tensor in tensors if tensor.numel()), BUCKET_BYTES):
        if len(bucket) == 1 and bucket[0].is_contiguous():
            dist.all_reduce(bucket[0], group=group.process_group)
            continue
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        dist.all_reduce(flat, group=group.process_group)
        unpack(flat, bucket)


def buckets(tensors: Iterable[torch.Tensor], max_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Yields lists of consecutive tensors (of any shape) that have at most max_bytes together.

    A tensor that is larger stands alone.
    """
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and size + tensor.nbytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


def unpack(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Writes a packed bucket, [sum of elements], back into its tensors (of any shape), in order."""
    sizes = [tensor.numel() for tensor in tensors]
    for tensor, part in zip(tensors, torch.split(flat, sizes), strict=True):
        tensor.copy_(part.view_as(tensor))
