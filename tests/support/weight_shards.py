"""Weights in parts as numpy arrays: cut straight from the whole, and moved by a plan.

The oracle for everything that moves weights: `shards` never looks at a plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rolemesh.engine.layout.manifest import Box, Manifest, WeightLayout
from rolemesh.engine.weights.copies import Copy
from rolemesh.engine.weights.plan import Plan

Array = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Shards = list[dict[str, Array]]

PADDING = -1
"""What stands where no piece covers a tensor."""


def numbered(manifest: Manifest) -> dict[str, Array]:
    """Whole parameters in which every element of the model is a different number."""
    weights, filled = {}, 0
    for name, parameter in manifest.items():
        size = int(np.prod(parameter.shape))
        weights[name] = np.arange(filled, filled + size, dtype=np.int64).reshape(parameter.shape)
        filled += size
    return weights


def shards(layout: WeightLayout, weights: Mapping[str, Array]) -> Shards:
    """Tensors of each rank, cut from the whole."""
    ranks: Shards = []
    for shard in layout.ranks:
        tensors = {name: np.full(shape, PADDING) for name, shape in shard.shapes.items()}
        for piece in shard.pieces:
            content = weights[piece.parameter][_slices(piece.box)]
            tensors[piece.tensor][_at(piece.origin, content.shape)] = content
        ranks.append(tensors)
    return ranks


def carry_out(plan: Plan, before: Sequence[Mapping[str, Array]]) -> Shards:
    """The target's tensors, moved by the plan; an element that is written twice is an error."""
    after: Shards = [
        {name: np.full(shape, PADDING) for name, shape in shard.shapes.items()}
        for shard in plan.target.ranks
    ]

    def write(copy: Copy, source: Mapping[str, Array]) -> None:
        sizes = tuple(stop - start for start, stop in copy.box)
        content = source[copy.source_tensor][_at(copy.source_origin, sizes)]
        into = after[copy.target][copy.target_tensor][_at(copy.target_origin, sizes)]
        assert content.shape == into.shape == sizes
        assert (into == PADDING).all(), "written twice"
        assert (content != PADDING).all(), "padding was read"
        into[...] = content

    for rank, copies in enumerate(plan.local):
        for copy in copies:
            assert copy.source == copy.target == rank
            write(copy, before[rank])
    for bucket in plan.buckets:
        for copy in bucket.copies:
            assert copy.source != copy.target
            write(copy, before[copy.source])
    for rank, copies in enumerate(plan.duplicates):
        for copy in copies:
            assert copy.source == copy.target == rank
            write(copy, after[rank])
    return after


def assert_same(left: Shards, right: Shards) -> None:
    """Every tensor of every rank is equal."""
    assert len(left) == len(right)
    for rank, (tensors, others) in enumerate(zip(left, right, strict=True)):
        assert tensors.keys() == others.keys(), rank
        for name, tensor in tensors.items():
            assert np.array_equal(tensor, others[name]), (rank, name)


def missing_elements(plan: Plan, rank: int) -> dict[str, int]:
    """By parameter: elements that the rank needs in the target and lacks in the source."""
    counts = {}
    for name, parameter in plan.source.manifest.items():
        held, needed = (
            _mask(side, rank, name, parameter.shape) for side in (plan.source, plan.target)
        )
        counts[name] = int((needed & ~held).sum())
    return counts


def _mask(
    layout: WeightLayout, rank: int, name: str, shape: tuple[int, ...]
) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    mask = np.zeros(shape, dtype=np.bool_)
    for piece in layout.ranks[rank].pieces if rank < len(layout.ranks) else ():
        if piece.parameter == name:
            mask[_slices(piece.box)] = True
    return mask


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def _at(origin: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(origin, sizes, strict=True))


def divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
