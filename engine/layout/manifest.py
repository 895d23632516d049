"""Manifests and layouts: the weights of a model, and the part of them that each rank holds.

Pure: no torch. A manifest names the parameters of a model, a layout says which box of which
parameter lies where in which tensor of which rank. `plan` turns one layout into another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

DtypeName: TypeAlias = Literal["float64", "float32", "bfloat16", "float16"]

ITEM_BYTES: dict[DtypeName, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of an element."""

Box: TypeAlias = tuple[tuple[int, int], ...]
"""Half-open ranges [start, stop), one for each dimension."""


def ranges(origin: Sequence[int], box: Box) -> tuple[slice, ...]:
    """Where a box lies in a tensor in which it begins at `origin`."""
    return tuple(
        slice(at, at + stop - start) for at, (start, stop) in zip(origin, box, strict=True)
    )


class ManifestError(ValueError):
    """Weights, manifests or layouts that do not fit together: names the parameter."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of the whole model, or a buffer that is in its files as parameters are."""

    shape: tuple[int, ...]
    """Global shape."""
    dtype: DtypeName
    """Element type."""
    keeps_dtype: bool = field(default=False, compare=False)
    """Whether it stays in that type where others are rounded, as a buffer does."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole parameter."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def box(self) -> Box:
        """All of it."""
        return tuple((0, size) for size in self.shape)


Manifest: TypeAlias = Mapping[str, Parameter]
"""Parameters by Hugging Face name; tied ones once, under the name of the input embedding."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a parameter, and where it lies in a tensor of a rank.

    Example: rank 1 of 2 holds rows 4 to 8 of a k_proj of shape [8, 16] as rows 8 to 12 of its fused
    qkv_proj: `Piece("...k_proj.weight", ((4, 8), (0, 16)), "...qkv_proj.weight", (8, 0))`.
    """

    parameter: str
    """Hugging Face name."""
    box: Box
    """Part of the parameter, in global coordinates; not empty."""
    tensor: str
    """Name of the tensor that holds it, on the rank: a trainer's parameter, a sampler's (fused)
    weight, a key in a file."""
    origin: tuple[int, ...]
    """Where the box begins in that tensor. The box lies there unpermuted and unstretched."""


@dataclass(frozen=True, slots=True)
class RankShard:
    """All that one rank holds."""

    pieces: tuple[Piece, ...]
    """Without overlap in any tensor. A parameter (or a part) may occur in two tensors: a tied
    embedding and head on one rank."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shape of each tensor that the pieces name, padding included."""


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """How a manifest's parameters are held by ranks 0..n-1.

    Together the ranks hold every element at least once; replicas hold the same.
    """

    manifest: Manifest
    """The whole."""
    ranks: tuple[RankShard, ...]
    """What each rank holds."""
    dtype: DtypeName | None = None
    """Element type in which the tensors are held, but for parameters that keep theirs; None means
    the manifest's."""

    def shard(self, rank: int) -> RankShard:
        """What a rank holds; nothing, where the layout has fewer ranks."""
        return self.ranks[rank] if rank < len(self.ranks) else RankShard((), {})

    def dtype_of(self, parameter: str) -> DtypeName:
        """Element type in which a parameter is held."""
        found = self.manifest.get(parameter)
        if self.dtype is not None and (found is None or not found.keeps_dtype):
            return self.dtype
        return self.manifest[parameter].dtype

    def of(self, is_kept: Callable[[str], bool]) -> WeightLayout:
        """The layout of some parameters alone."""
        # Ranks that share a shard go on sharing one.
        shards = {id(shard): _shard_of(shard, self.manifest, is_kept) for shard in self.ranks}
        manifest = {name: one for name, one in self.manifest.items() if is_kept(name)}
        return WeightLayout(manifest, tuple(shards[id(shard)] for shard in self.ranks), self.dtype)

    def in_dtype(self, dtype: DtypeName) -> WeightLayout:
        """The same boxes on the same ranks, of parameters and tensors of another element type.

        But for those that keep theirs.
        """
        manifest = {
            name: parameter if parameter.keeps_dtype else Parameter(parameter.shape, dtype)
            for name, parameter in self.manifest.items()
        }
        return WeightLayout(manifest, self.ranks, dtype)


def _shard_of(shard: RankShard, manifest: Manifest, is_kept: Callable[[str], bool]) -> RankShard:
    pieces = tuple(piece for piece in shard.pieces if is_kept(piece.parameter))
    gone = {piece.tensor for piece in shard.pieces} - {piece.tensor for piece in pieces}
    # A tensor without elements has no piece, and mostly its parameter's name.
    gone |= {name for name in shard.shapes if name in manifest and not is_kept(name)}
    shapes = {name: shape for name, shape in shard.shapes.items() if name not in gone}
    return RankShard(pieces, shapes)


def intersection(left: Box, right: Box) -> Box | None:
    """The common part of two boxes of one parameter, or None."""
    common = tuple(
        (max(a_start, b_start), min(a_stop, b_stop))
        for (a_start, a_stop), (b_start, b_stop) in zip(left, right, strict=True)
    )
    return common if all(start < stop for start, stop in common) else None


def num_elements(box: Box) -> int:
    """Elements in a box."""
    return math.prod(stop - start for start, stop in box)
