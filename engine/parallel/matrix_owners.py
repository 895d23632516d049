"""Brings matrices whole to one rank each, and what that makes of them back to all that hold parts.

What reads a whole matrix (`engine/train/optimizers/muon.py`) is so computed once, by one of the
ranks that share a stage, as in "Distributed Muon" (arXiv 2502.16982, section 2.3) for slices and
replicas too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist

from rolemesh.engine.layout.manifest import Box, Piece, WeightLayout, ranges
from rolemesh.engine.parallel.buckets import unpack
from rolemesh.engine.parallel.mesh import RankGroup

ROUND_BYTES = 64 * 2**20
"""Matrices of a round, in bytes for each rank: what a rank holds of whole ones at a time. A round
has at least room for a matrix of the largest size on each rank."""


def rounds_of(sizes: Mapping[str, int], num_ranks: int, item_bytes: int) -> list[list[str]]:
    """Cuts matrices into rounds: the same ones on all ranks, whatever each holds.

    Args:
        sizes: Numbers in each matrix, in the order of the model.
        num_ranks: Ranks that share them.
        item_bytes: Bytes of a number.
    """
    room = num_ranks * max(ROUND_BYTES, item_bytes * max(sizes.values(), default=0))
    rounds: list[list[str]] = []
    filled = 0
    for name, size in sizes.items():
        if not rounds or filled + size * item_bytes > room:
            rounds.append([])
            filled = 0
        rounds[-1].append(name)
        filled += size * item_bytes
    return rounds


def owners_of(work: Mapping[str, int], loads: list[int]) -> dict[str, int]:
    """Gives each matrix to the rank with the least work so far, the largest matrix first.

    Args:
        work: What each matrix costs its owner, in any unit.
        loads: Work of each rank; what is given is added, so that rounds even out.
    """
    owners = {}
    for name in sorted(work, key=lambda name: (-work[name], name)):
        owner = loads.index(min(loads))
        owners[name] = owner
        loads[owner] += work[name]
    return owners


@dataclass(frozen=True, slots=True)
class _Part:
    """A box of a matrix that several ranks may hold."""

    name: str
    box: Box
    sender: int
    """Who brings it to the owner: the owner itself where it holds the box, else the first."""
    holders: Mapping[int, Piece]
    """By number in the group: where it lies there."""


class MatrixOwners:
    """Some matrices of a stage: who owns which, and the way there and back.

    All ranks of the stage make it, and call both methods in the same order. Owned by the rank's
    compute thread. What travels does so in the type of what is given, bit by bit.

    Example, on every rank::

        owners = MatrixOwners(owners_of(work, loads), layout, mesh.stage, dtype=..., device=...)
        whole = owners.gather(parts)
        parts = owners.scatter({name: made_of(matrix) for name, matrix in whole.items()})
    """

    def __init__(
        self,
        owners: Mapping[str, int],
        layout: WeightLayout,
        group: RankGroup,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Plans.

        Args:
            owners: Of each matrix, by number in the group.
            layout: What each rank of the world holds.
            group: The ranks of the stage.
            dtype: In which all of it travels.
            device: On which this rank's tensors lie.
        """
        self._group, self._dtype, self._device = group, dtype, device
        own_shard = layout.ranks[group.ranks[group.index]]
        self._shapes = {name: layout.manifest[name].shape for name in owners}
        self._tensor_shapes = {name: own_shard.shapes[name] for name in owners}
        self.own = [name for name, owner in owners.items() if owner == group.index]
        """What this rank owns."""
        held: dict[str, dict[Box, dict[int, Piece]]] = {name: {} for name in owners}
        for index, rank in enumerate(group.ranks):
            for piece in layout.ranks[rank].pieces:
                if piece.parameter in held:
                    held[piece.parameter].setdefault(piece.box, {})[index] = piece
        self._parts = [
            [
                _Part(name, box, owner if owner in holders else min(holders), holders)
                for name, at in owners.items()
                if at == owner
                for box, holders in held[name].items()
            ]
            for owner in range(group.size)
        ]
        """By owner, all that makes up its matrices."""

    def gather(self, parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Brings matrices to their owners.

        Args:
            parts: Of all matrices, this rank's, shaped as its tensors of the layout.

        Returns:
            The matrices that this rank owns, whole.
        """
        here = self._group.index
        wholes = self._empty({name: self._shapes[name] for name in self.own})
        sends = [
            [_in_tensor(parts, part, here) for part in of_owner if part.sender == here]
            for of_owner in self._parts
        ]
        places = [
            [_in_whole(wholes, part) for part in self._parts[here] if part.sender == source]
            for source in range(self._group.size)
        ]
        self._exchange(sends, places)
        return wholes

    def scatter(self, wholes: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Brings what owners made back to all ranks that hold parts of it.

        Args:
            wholes: Of the matrices that this rank owns, whole.

        Returns:
            This rank's parts of all matrices, shaped as its tensors of the layout.
        """
        here = self._group.index
        parts = self._empty(self._tensor_shapes)
        sends = [
            [_in_whole(wholes, part) for part in self._parts[here] if holder in part.holders]
            for holder in range(self._group.size)
        ]
        places = [
            [_in_tensor(parts, part, here) for part in of_owner if here in part.holders]
            for of_owner in self._parts
        ]
        self._exchange(sends, places)
        return parts

    def _empty(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
        return {
            name: torch.empty(shape, dtype=self._dtype, device=self._device)
            for name, shape in shapes.items()
        }

    def _exchange(self, sends: _ByRank, places: _ByRank) -> None:
        """Sends views to each rank, and fills the views of what comes from each."""
        flat = torch.cat(
            [view.reshape(-1) for views in sends for view in views]
            or [torch.empty(0, dtype=self._dtype, device=self._device)]
        )
        sizes = [sum(view.numel() for view in views) for views in places]
        into = torch.empty(sum(sizes), dtype=self._dtype, device=self._device)
        # As bytes: gloo does not take every type.
        item = self._dtype.itemsize
        dist.all_to_all_single(
            into.view(torch.uint8),
            flat.view(torch.uint8),
            [size * item for size in sizes],
            [sum(view.numel() for view in views) * item for views in sends],
            group=self._group.process_group,
        )
        unpack(into, [view for views in places for view in views])


_ByRank: TypeAlias = Sequence[Sequence[torch.Tensor]]
"""Views for or from each rank of the group, in its order."""


def _in_tensor(parts: Mapping[str, torch.Tensor], part: _Part, index: int) -> torch.Tensor:
    """Where a box lies in a rank's own tensor."""
    return parts[part.name][ranges(part.holders[index].origin, part.box)]


def _in_whole(wholes: Mapping[str, torch.Tensor], part: _Part) -> torch.Tensor:
    """Where a box lies in the whole matrix."""
    return wholes[part.name][tuple(slice(*one) for one in part.box)]
