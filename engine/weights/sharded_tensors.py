"""Tensors that ranks hold in parts, as one of the ranks sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rolemesh.engine.layout.manifest import (
    ITEM_BYTES,
    Box,
    DtypeName,
    ManifestError,
    Parameter,
    Piece,
    RankShard,
    WeightLayout,
)
from rolemesh.engine.weights.disk_layout import element_type


@dataclass(frozen=True, slots=True)
class ShardedTensors:
    """A layout, and this rank's part of it."""

    layout: WeightLayout
    """What each rank holds."""
    tensors: Mapping[str, torch.Tensor]
    """This rank's, under the layout's names. A parameter that is absent on all ranks is not
    written."""

    @classmethod
    def whole(cls, tensors: Mapping[str, torch.Tensor]) -> ShardedTensors:
        """Those of a rank that is alone."""
        return cls(whole_tensors_layout(tensors), tensors)

    def check(self, rank: int) -> None:
        """Raises ManifestError unless the tensors are those of the layout."""
        shapes = self.layout.ranks[rank].shapes
        for name, tensor in self.tensors.items():
            if shapes.get(name) != tuple(tensor.shape):
                raise ManifestError(
                    f"rank {rank} has {name!r} of shape {tuple(tensor.shape)}, but its layout says "
                    f"{shapes.get(name)}: give the layout that the tensors are cut by"
                )
        for piece in self.layout.ranks[rank].pieces:
            expected = element_type(self.layout, piece.parameter)
            if piece.tensor in self.tensors:
                found = dtype_name(self.tensors[piece.tensor])
                if found != expected:
                    raise ManifestError(
                        f"rank {rank} has {piece.tensor!r} in {found}, but its layout says "
                        f"{expected}: give the layout of these tensors"
                    )


def whole_tensors_layout(tensors: Mapping[str, torch.Tensor]) -> WeightLayout:
    """The layout of one rank that holds these tensors, each a parameter of its own."""
    manifest = {
        name: Parameter(tuple(tensor.shape), dtype_name(tensor)) for name, tensor in tensors.items()
    }
    pieces = tuple(
        Piece(name, parameter.box, name, (0,) * len(parameter.shape))
        for name, parameter in manifest.items()
        if 0 not in parameter.shape
    )
    shapes = {name: parameter.shape for name, parameter in manifest.items()}
    return WeightLayout(manifest, (RankShard(pieces, shapes),))


def dtype_name(tensor: torch.Tensor) -> DtypeName:
    """The element type as layouts name it; raises ManifestError for one that they do not know."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in ITEM_BYTES:
        raise ManifestError(f"element type is {name}: only {', '.join(ITEM_BYTES)} can be saved")
    return name


def ranges(origin: Sequence[int], box: Box) -> tuple[slice, ...]:
    """Where a box lies in a tensor in which it begins at `origin`."""
    return tuple(
        slice(at, at + stop - start) for at, (start, stop) in zip(origin, box, strict=True)
    )


def part(tensor: torch.Tensor, origin: Sequence[int], box: Box) -> torch.Tensor:
    """The view of a tensor that holds a box."""
    return tensor[ranges(origin, box)]
