"""Shares of the tokens, which tensor slices hold between their blocks (sequence parallelism).

Norms and the residual stream treat each token by itself, so there each slice needs only its share
(arXiv 2205.05198, section 4.2.2): the all-reduce at the end of attention and MLP becomes a
reduce-scatter, and an all-gather stands at their beginning. Together they send the same bytes.

Shape letters: B rows, T longest row, D width; S tokens are B * T, pads of rows too; t slices; P
tokens of a share, ceil(S / t). Share r has the tokens from r * P on; zeros fill the last ones up.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from rolemesh.engine.parallel.mesh import RankGroup

# torch 2.12 and older have them by other names, which 2.13 warns of.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def share_range(num_tokens: int, group: RankGroup) -> range:
    """Places of the tokens of this slice's share; the last may lie behind all tokens.

    Args:
        num_tokens: S.
        group: The slices.
    """
    length = -(-num_tokens // group.size)
    return range(group.index * length, (group.index + 1) * length)


def take_share(whole_BTD: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """This slice's share of a tensor that is equal on all slices.

    Args:
        whole_BTD: Floating [B, T, D].
        group: The slices, more than one.

    Returns:
        [1, P, D], in memory of its own. Its gradient is gathered: equal on all slices, too.
    """
    share: torch.Tensor = _Take.apply(whole_BTD, group)  # type: ignore[no-untyped-call]
    return share


def gather_shares(
    share_1PD: torch.Tensor, group: RankGroup, shape: tuple[int, int]
) -> torch.Tensor:
    """Puts the shares together for what all slices compute alike; the inverse of `take_share`.

    Args:
        share_1PD: Floating [1, P, D].
        group: The slices.
        shape: B and T.

    Returns:
        [B, T, D], equal on all slices. Each share's gradient is its part of the whole gradient,
        which must be equal on all slices.
    """
    whole: torch.Tensor = _Gather.apply(  # type: ignore[no-untyped-call]
        share_1PD, group, shape, False
    )
    return whole


def gather_to_slices(
    share_1PD: torch.Tensor, group: RankGroup, shape: tuple[int, int] | None
) -> torch.Tensor:
    """Puts the shares together for slices that each do their part of the work on all tokens.

    Args:
        share_1PD: Floating [1, P, D].
        group: The slices.
        shape: B and T; None keeps the zeros that fill the last shares up.

    Returns:
        [B, T, D], or [1, t * P, D], equal on all slices. A share's gradient is the sum of what the
        slices have for its tokens, added in the tensor's own type.
    """
    whole: torch.Tensor = _Gather.apply(  # type: ignore[no-untyped-call]
        share_1PD, group, shape, True
    )
    return whole


def sum_to_shares(
    part_BTD: torch.Tensor, group: RankGroup, *, in_own_type: bool = False
) -> torch.Tensor:
    """Sums what the slices made of all tokens, for each slice its share.

    Args:
        part_BTD: Floating [B, T, D], of one shape on all slices.
        group: The slices.
        in_own_type: Whether it is sent and added in its own type, else at least in float32.

    Returns:
        [1, P, D] of the same type. The gradient is gathered: equal on all slices.
    """
    share: torch.Tensor = _Sum.apply(part_BTD, group, in_own_type)  # type: ignore[no-untyped-call]
    return share


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole_BTD: torch.Tensor, group: RankGroup) -> torch.Tensor:
        ctx.group, ctx.shape = group, whole_BTD.shape[:2]
        return _own(whole_BTD, group)

    @staticmethod
    def backward(ctx: Any, gradient_1PD: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _gathered(gradient_1PD, ctx.group, ctx.shape), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        share_1PD: torch.Tensor,
        group: RankGroup,
        shape: tuple[int, int] | None,
        sums_gradients: bool,
    ) -> torch.Tensor:
        ctx.group, ctx.sums_gradients = group, sums_gradients
        return _gathered(share_1PD, group, shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        if ctx.sums_gradients:
            return _summed(gradient, ctx.group, in_own_type=True), None, None, None
        return _own(gradient, ctx.group), None, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, part_BTD: torch.Tensor, group: RankGroup, in_own_type: bool
    ) -> torch.Tensor:
        ctx.group, ctx.shape = group, part_BTD.shape[:2]
        return _summed(part_BTD, group, in_own_type=in_own_type)

    @staticmethod
    def backward(ctx: Any, gradient_1PD: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _gathered(gradient_1PD, ctx.group, ctx.shape), None, None


def _gathered(
    share_1PD: torch.Tensor, group: RankGroup, shape: tuple[int, int] | None
) -> torch.Tensor:
    _, tokens, width = share_1PD.shape
    whole = share_1PD.new_empty(1, group.size * tokens, width)
    all_gather(whole[0], share_1PD[0].contiguous(), group=group.process_group)
    # In place, without the zeros at the end: FSDP2 warns of a stage whose result is a view.
    return whole if shape is None else whole.resize_(*shape, width)


def _own(whole_BTD: torch.Tensor, group: RankGroup) -> torch.Tensor:
    # A copy, also where nothing is filled up: a view would keep the whole alive.
    return _filled_up(whole_BTD, group)[group.index][None].clone()


def _summed(part_BTD: torch.Tensor, group: RankGroup, *, in_own_type: bool) -> torch.Tensor:
    dtype = part_BTD.dtype
    wide = dtype if in_own_type else torch.promote_types(dtype, torch.float32)
    filled_tPD = _filled_up(part_BTD.to(wide), group)
    share_1PD = filled_tPD.new_empty(1, *filled_tPD.shape[1:])
    _reduce_scatter(share_1PD, filled_tPD, group=group.process_group)
    return share_1PD.to(dtype)


def _filled_up(whole_BTD: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """[t, P, D], the last tokens zeros."""
    whole_SD = whole_BTD.flatten(0, 1)
    missing = -len(whole_SD) % group.size
    if missing:
        whole_SD = torch.nn.functional.pad(whole_SD, (0, 0, 0, missing))
    return whole_SD.contiguous().view(group.size, -1, whole_SD.shape[1])
