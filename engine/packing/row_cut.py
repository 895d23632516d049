"""This rank's part of a packed row that several ranks cut among them, and the way back to rows.

`engine/parallel/context_parallel.py` says how ranks compute with it.

Shape letters: S tokens of the row, L of them here (those that fill up counted), W numbers of a
token's route; K places of the row, M of them among this rank's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch.nn import functional

from rolemesh.engine.hardware.devices import sent
from rolemesh.engine.packing.tree_layout import RowGather, TreeLayout
from rolemesh.engine.parallel.context_parallel import gather_results, tokens_each
from rolemesh.engine.parallel.mesh import RankGroup
from rolemesh.engine.specs.columns import NO_ROUTE


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Tokens of the whole row at which something is computed, each by the rank that has it.

    Example: places (5, 0, 4) of a row of 6 tokens, cut in two: the second rank has numbers 0 and 2
    of them, at 2 and 1 of its own tokens.
    """

    group: RankGroup
    own_M: torch.Tensor
    """int64, the numbers of those that this rank has."""
    tokens_M: RowGather
    """[M] of its own L tokens."""
    came_K: torch.Tensor
    """int64, in ranks * most: where each one's result comes from."""
    most: int
    """Most that a rank has."""

    @classmethod
    def of(cls, place_K: torch.Tensor, group: RankGroup, num_own: int) -> Self:
        """From places of the row, int64, of which each rank has so many tokens."""
        owner_K = place_K // num_own
        counts = torch.bincount(owner_K, minlength=group.size)
        most = int(counts.max())
        order_K = owner_K.argsort(stable=True)
        came_K = torch.empty_like(place_K)
        begin_K = (counts.cumsum(0) - counts)[owner_K[order_K]]
        came_K[order_K] = owner_K[order_K] * most + torch.arange(len(place_K)) - begin_K
        own_M = (owner_K == group.index).nonzero().flatten()
        return cls(
            group=group,
            own_M=own_M,
            tokens_M=RowGather.of(place_K[own_M] - group.index * num_own, num_own),
            came_K=came_K,
            most=most,
        )

    def of_all(self, found_M: torch.Tensor) -> torch.Tensor:
        """What all ranks found, [K, ...], of what this one did, [M, ...]: see `gather_results`."""
        return gather_results(found_M, self.own_M, self.came_K, self.most, self.group)

    def to(self, device: torch.device | str) -> Self:
        """The same on a device."""
        return replace(
            self,
            own_M=sent(self.own_M, device),
            tokens_M=self.tokens_M.to(device),
            came_K=sent(self.came_K, device),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCut:
    """What a rank computes of a packed row."""

    group: RankGroup
    """The ranks that cut it, its beginning first."""
    num_tokens: int
    """S."""
    tokens_1L: torch.Tensor
    """int64; zeros fill the last ranks' up."""
    positions_1L: torch.Tensor
    """int64, as `TreeLayout.rotations`."""
    routes_LW: torch.Tensor | None
    """uint8, as `PackedRows.routes_SW`; `NO_ROUTE` where they fill up."""
    states: Places
    """Before each distinct completion token."""
    completions: Places
    """Before each row's completion tokens, in the batch's order."""
    ends: Places
    """Of the last token of each row."""

    @classmethod
    def of(
        cls,
        group: RankGroup,
        layout: TreeLayout,
        tokens_1S: torch.Tensor,
        last_B: torch.Tensor,
        routes_SW: torch.Tensor | None,
    ) -> Self:
        """Cuts a packed row, which lies in host memory as all ranks of the group have it."""
        num_tokens = tokens_1S.shape[1]
        size = tokens_each(num_tokens, group.size)
        missing = size * group.size - num_tokens
        own = slice(group.index * size, (group.index + 1) * size)
        state_U = layout.states_U.index_M
        return cls(
            group=group,
            num_tokens=num_tokens,
            tokens_1L=functional.pad(tokens_1S, (0, missing))[:, own],
            positions_1L=functional.pad(layout.rotations, (0, missing))[..., own],
            routes_LW=None
            if routes_SW is None
            else functional.pad(routes_SW, (0, 0, 0, missing), value=NO_ROUTE)[own],
            states=Places.of(state_U, group, size),
            completions=Places.of(state_U[layout.rows_N.index_M], group, size),
            ends=Places.of(last_B, group, size),
        )

    def own_part(self, values_S: torch.Tensor, filler: int) -> torch.Tensor:
        """What this rank has of a number for each token, [L]; fillers stand where it is filled."""
        size = self.tokens_1L.shape[1]
        missing = size * self.group.size - self.num_tokens
        own = slice(self.group.index * size, (self.group.index + 1) * size)
        return functional.pad(values_S, (0, missing), value=filler)[own]

    def to(self, device: torch.device | str) -> Self:
        """The same on a device."""
        return replace(
            self,
            tokens_1L=sent(self.tokens_1L, device),
            positions_1L=sent(self.positions_1L, device),
            routes_LW=None if self.routes_LW is None else sent(self.routes_LW, device),
            states=self.states.to(device),
            completions=self.completions.to(device),
            ends=self.ends.to(device),
        )
