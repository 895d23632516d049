"""Places of tokens when rows are packed, and those that begin alike as a tree.

Shape letters: S packed tokens, M gathered rows, K columns; R branches of a block, of C tokens at
most, that attend to T tokens at most; U distinct completion tokens, N completion tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.nn import functional

from rolemesh.engine.hardware.devices import sent

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source_SK: torch.Tensor, gather: RowGather) -> torch.Tensor:
        ctx.gather = gather
        return source_SK.index_select(0, gather.index_M)

    @staticmethod
    def backward(ctx: Any, gradient_MK: torch.Tensor) -> tuple[torch.Tensor, None]:
        # A sum of each source's places, in their order on any device. index_add_ has none on a
        # GPU, and takes twice as long on a CPU (torch 2.13, 3000 rows of 192 numbers).
        gather: RowGather = ctx.gather
        return functional.embedding_bag(
            gather.places, gradient_MK.contiguous(), gather.first_place_S, mode="sum"
        ), None


@dataclass(frozen=True, slots=True)
class RowGather:
    """Takes rows of a matrix, some of them several times, some places being padding.

    Example: index (0, 1, 0) is row 0, row 1 and row 0 again; the gradient of row 0 is the sum of
    the first and the last one's, in this order on any device.
    """

    index_M: torch.Tensor
    """int64, the row for each place. Padding takes row 0 and gives it no gradient."""
    places: torch.Tensor
    """int64, the places that are no padding, by their row."""
    first_place_S: torch.Tensor
    """int64, by row: where its own begin in `places`."""

    @classmethod
    def of(cls, index_M: torch.Tensor, num_sources: int) -> Self:
        """From an index in which -1 marks padding, into so many rows."""
        places = (index_M >= 0).nonzero().flatten()
        rows = index_M[places]
        counts_S = torch.bincount(rows, minlength=num_sources)
        return cls(
            index_M.clamp_min(0), places[rows.argsort(stable=True)], counts_S.cumsum(0) - counts_S
        )

    def __call__(self, source_SK: torch.Tensor) -> torch.Tensor:
        """Rows of float [S, K] as float [M, K]."""
        found: torch.Tensor = _Gather.apply(source_SK, self)  # type: ignore[no-untyped-call]
        return found

    def to(self, device: torch.device | str) -> Self:
        """The same on a device."""
        return replace(
            self,
            index_M=sent(self.index_M, device),
            places=sent(self.places, device),
            first_place_S=sent(self.first_place_S, device),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Branches whose attention is computed at once, as a rectangle."""

    num_tokens: int
    """Of all of them, one branch after another; in S they follow those of the block before."""
    num_branches: int
    """R."""
    queries: RowGather | None
    """[R * C] of their tokens; None: they all have C tokens, and stand so already."""
    back: RowGather | None
    """[num_tokens] of [R * C]: their tokens again, one after another; None as `queries`."""
    keys: RowGather | None
    """[R * T] of all packed tokens: each branch's whole row. None: branches that share nothing with
    what stands before them attend to themselves, causally."""
    may_attend: torch.Tensor | None
    """bool [R or 1, 1, C, T]; None as `keys`. Every query, padding too, may attend to its row's
    first token."""

    @property
    def longest(self) -> int:
        """T."""
        if self.may_attend is not None:
            return self.may_attend.shape[-1]
        places = self.num_tokens if self.queries is None else len(self.queries.index_M)
        return places // self.num_branches

    def to(self, device: torch.device | str) -> Self:
        """The same on a device."""
        return replace(
            self,
            queries=None if self.queries is None else self.queries.to(device),
            back=None if self.back is None else self.back.to(device),
            keys=None if self.keys is None else self.keys.to(device),
            may_attend=None if self.may_attend is None else sent(self.may_attend, device),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeLayout:
    """How S packed tokens attend to each other: each to its own row's tokens so far.

    Everything but attention treats the tokens as one row of S. S is the tokens of one block after
    another.
    """

    positions_1S: torch.Tensor
    """int64 [1, S]: each token's place in the rows that have it."""
    blocks: tuple[Block, ...]
    states_U: RowGather
    """[U] of all packed tokens: the state before each distinct completion token."""
    rows_N: RowGather
    """[N] of the distinct completion tokens: those of each row, in the batch's order."""
    branch_S: torch.Tensor
    """int64 [S]: the branch of each token, counted in the tree's order."""
    last_branch_S: torch.Tensor
    """int64 [S]: the last branch whose row has the token; all from its own up to it have it."""
    axes_31S: torch.Tensor | None = None
    """int64 [3, 1, S]: of rows with images, time, height and width, by which tokens are rotated;
    None: by their places."""
    block_mask: BlockMask | None = None
    """For attention over S at once (`engine/models/layers/shared_flex.py`); None: by blocks."""

    @property
    def rotations(self) -> torch.Tensor:
        """int64 [1, S] or [3, 1, S]: the positions by which tokens are rotated."""
        return self.positions_1S if self.axes_31S is None else self.axes_31S

    @property
    def longest(self) -> int:
        """Most tokens that one attends to, padding counted."""
        return max(block.longest for block in self.blocks)

    def to(self, device: torch.device | str) -> Self:
        """The same on a device."""
        return replace(
            self,
            positions_1S=sent(self.positions_1S, device),
            axes_31S=None if self.axes_31S is None else sent(self.axes_31S, device),
            blocks=tuple(block.to(device) for block in self.blocks),
            states_U=self.states_U.to(device),
            rows_N=self.rows_N.to(device),
            branch_S=sent(self.branch_S, device),
            last_branch_S=sent(self.last_branch_S, device),
        )
