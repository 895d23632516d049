"""Tensors that ranks hold in parts, as one of the ranks sees them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from rolemesh.engine.layout.boxes import whole_layout
from rolemesh.engine.layout.manifest import (
    ITEM_BYTES,
    Box,
    DtypeName,
    Manifest,
    ManifestError,
    Parameter,
    Piece,
    WeightLayout,
    ranges,
)

TORCH_DTYPES: Mapping[DtypeName, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
"""Element types by their names in manifests."""


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
        """All tensors (floating, of any shape, by name) of a rank that is alone."""
        return cls(whole_layout(tensors_manifest(tensors)), tensors)

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
            expected = self.layout.dtype_of(piece.parameter)
            if piece.tensor in self.tensors:
                found = dtype_name(self.tensors[piece.tensor])
                if found != expected:
                    raise ManifestError(
                        f"rank {rank} has {piece.tensor!r} in {found}, but its layout says "
                        f"{expected}: give the layout of these tensors"
                    )


def tensors_manifest(
    tensors: Mapping[str, torch.Tensor], buffers: Collection[str] = ()
) -> Manifest:
    """The manifest of tensors that are each a parameter of its own.

    Args:
        tensors: Floating, of any shape, by name.
        buffers: Those that keep their element type.

    Raises:
        ManifestError: An element type is one that layouts do not know.
    """
    return {
        name: Parameter(tuple(tensor.shape), dtype_name(tensor), name in buffers)
        for name, tensor in tensors.items()
    }


def dtype_name(tensor: torch.Tensor) -> DtypeName:
    """The element type of a tensor of any shape, as layouts name it.

    Raises:
        ManifestError: Layouts do not know this type.
    """
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in ITEM_BYTES:
        raise ManifestError(f"element type is {name}: only {', '.join(ITEM_BYTES)} can be saved")
    return name


def tensor_dtypes(layout: WeightLayout, rank: int) -> dict[str, torch.dtype]:
    """The element type of each tensor of a rank.

    Raises:
        ManifestError: A tensor would hold two types, or its type cannot be known.
    """
    shard = layout.shard(rank)
    dtypes: dict[str, torch.dtype] = {}
    for piece in shard.pieces:
        dtype = TORCH_DTYPES[layout.dtype_of(piece.parameter)]
        if dtypes.setdefault(piece.tensor, dtype) != dtype:
            raise ManifestError(
                f"tensor {piece.tensor!r} would hold {dtypes[piece.tensor]} and, with "
                f"{piece.parameter!r}, {dtype}: give the layout one dtype"
            )
    for name in shard.shapes:
        # The last rank of an FSDP group may hold no rows of a parameter.
        if name not in dtypes:
            if layout.dtype is None and name not in layout.manifest:
                raise ManifestError(
                    f"tensor {name!r} holds no parameter: give the layout a dtype, or leave it out"
                )
            dtypes[name] = TORCH_DTYPES[layout.dtype_of(name)]
    return dtypes


def part(tensor: torch.Tensor, origin: Sequence[int], box: Box) -> torch.Tensor:
    """The view of a tensor (of any type and shape) that holds a box."""
    return tensor[ranges(origin, box)]


@torch.no_grad()
def place(tensor: torch.Tensor, piece: Piece, values: torch.Tensor) -> None:
    """Writes the values of a box to its place in a tensor, cast to the tensor's type.

    Args:
        tensor: Floating, of the shape that the piece's rank holds.
        piece: Which box, and where it begins in the tensor.
        values: Floating, shaped as the box, on any device.
    """
    part(tensor, piece.origin, piece.box).copy_(values)
