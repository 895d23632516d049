"""A packed row that neighbours of the data axis cut evenly among them (Ulysses, arXiv 2309.14509).

Everything but attention treats each token by itself, so there a rank computes its own part of the
row. Around attention ranks hand out heads for tokens: each gets all tokens of its share of the
heads, and attends as one rank would. Its gradients of weights are those of its own tokens, which
are summed over the data axis as all gradients are.

Shape letters: S tokens of the row, L = ceil(S / c) of each of the c ranks (zeros fill the last ones
up), H heads of a rank's slice, F = H / c of them, E width of a head, K things that were computed of
the row, M of them by this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from rolemesh.engine.parallel.mesh import RankGroup
from rolemesh.engine.parallel.token_shares import all_gather


def tokens_each(num_tokens: int, size: int) -> int:
    """L: tokens of each rank of a row of so many, those that fill up counted."""
    return -(-num_tokens // size)


def to_heads(
    tensors: Sequence[torch.Tensor], group: RankGroup, num_tokens: int
) -> tuple[torch.Tensor, ...]:
    """Hands out heads for tokens. All ranks of the group call it.

    Args:
        tensors: Floating [1, H, L, E] each, of this rank's tokens: queries, keys, values. Numbers
            of heads and widths may differ. A tensor with fewer heads than ranks has each repeated
            for the ranks whose queries attend to it; its gradient is the sum of theirs.
        group: The ranks that cut the row, its beginning first.
        num_tokens: S.

    Returns:
        [1, F, S, E] each: all tokens of the heads from F * index on.
    """
    enough = [_repeated(tensor, group.size) for tensor in tensors]
    handed: tuple[torch.Tensor, ...] = _ToHeads.apply(group, num_tokens, *enough)  # type: ignore[no-untyped-call]
    return handed


def to_tokens(attended_1SFE: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """Hands the heads back; the inverse of `to_heads`. All ranks of the group call it.

    Args:
        attended_1SFE: Floating, of all tokens.
        group: The ranks that cut the row.

    Returns:
        [1, L, H, E], of this rank's tokens; zeros where they fill up.
    """
    handed: torch.Tensor = _ToTokens.apply(attended_1SFE, group)  # type: ignore[no-untyped-call]
    return handed


def gather_results(
    found_M: torch.Tensor, own_M: torch.Tensor, came_K: torch.Tensor, most: int, group: RankGroup
) -> torch.Tensor:
    """Puts together what the ranks computed of their own tokens. All ranks of the group call it.

    Args:
        found_M: Of any type, [M, ...].
        own_M: int64, which of all K those are.
        came_K: int64, in ranks * most: where each one comes from.
        most: Most that a rank has.
        group: The ranks that cut the row.

    Returns:
        [K, ...], equal on all ranks. A rank gets the gradient of what it has computed, so all ranks
        must make the same of the results: each then has its own tokens' part of one whole gradient.
    """
    whole: torch.Tensor = _Results.apply(  # type: ignore[no-untyped-call]
        found_M, own_M, came_K, most, group
    )
    return whole


def _repeated(tensor_1HLE: torch.Tensor, size: int) -> torch.Tensor:
    heads = tensor_1HLE.shape[1]
    if heads >= size:
        return tensor_1HLE
    return tensor_1HLE.repeat_interleave(size // heads, dim=1)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, group: RankGroup, num_tokens: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        # In one function: the backward pass makes its exchanges in one order on all ranks.
        return tuple(
            _heads_of(one.transpose(1, 2), group, num_tokens).transpose(1, 2) for one in tensors
        )

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        back = (_tokens_of(one.transpose(1, 2), ctx.group).transpose(1, 2) for one in gradients)
        return (None, None, *back)


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, attended_1SFE: torch.Tensor, group: RankGroup) -> torch.Tensor:
        ctx.group, ctx.num_tokens = group, attended_1SFE.shape[1]
        return _tokens_of(attended_1SFE, group)

    @staticmethod
    def backward(ctx: Any, gradient_1LHE: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _heads_of(gradient_1LHE, ctx.group, ctx.num_tokens), None


class _Results(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        found_M: torch.Tensor,
        own_M: torch.Tensor,
        came_K: torch.Tensor,
        most: int,
        group: RankGroup,
    ) -> torch.Tensor:
        ctx.own_M = own_M
        further = found_M.shape[1:]
        if most == 0:
            return found_M.new_empty(0, *further)
        filled = found_M.new_zeros(most, *further)
        filled[: len(found_M)] = found_M
        came = found_M.new_empty(group.size * most, *further)
        all_gather(came, filled, group=group.process_group)
        return came.index_select(0, came_K)

    @staticmethod
    def backward(ctx: Any, gradient_K: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        return gradient_K.index_select(0, ctx.own_M), None, None, None, None


def _heads_of(tensor_1LHE: torch.Tensor, group: RankGroup, num_tokens: int) -> torch.Tensor:
    """[1, S, F, E] of [1, L, H, E]."""
    _, tokens, heads, width = tensor_1LHE.shape
    own = heads // group.size
    by_owner = tensor_1LHE[0].reshape(tokens, group.size, own, width).transpose(0, 1)
    came = _exchanged(by_owner.contiguous(), group)
    return came.view(1, group.size * tokens, own, width)[:, :num_tokens]


def _tokens_of(tensor_1SFE: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """[1, L, H, E] of [1, S, F, E]."""
    _, num_tokens, own, width = tensor_1SFE.shape
    tokens = tokens_each(num_tokens, group.size)
    missing = group.size * tokens - num_tokens
    filled = tensor_1SFE[0]
    if missing:
        filled = torch.nn.functional.pad(filled, (0, 0, 0, 0, 0, missing))
    came = _exchanged(filled.contiguous().view(group.size, tokens, own, width), group)
    return came.transpose(0, 1).reshape(1, tokens, group.size * own, width)


def _exchanged(parts: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """Sends part r of a contiguous tensor to rank r; gives what came, by rank."""
    came = torch.empty_like(parts)
    # As bytes: gloo does not take every type.
    dist.all_to_all_single(
        came.flatten().view(torch.uint8),
        parts.flatten().view(torch.uint8),
        group=group.process_group,
    )
    return came
