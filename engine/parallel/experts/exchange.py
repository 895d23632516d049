"""Rows on their way to the ranks that hold their experts, and back (expert parallelism).

Ranks of a group hold the experts of a layer in equal, consecutive parts. Every rank sends its rows
to the owners of the experts that they chose, and gets from them what the experts made; gradients
go the other way round. All ranks of the group call this together, as often as each other: also one
whose rows choose none of an owner's experts, and one that has no rows.

Shape letters: N rows of this rank, M rows of this rank's experts, E experts, L of them here, D.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from rolemesh.engine.parallel.mesh import RankGroup

ByExperts = Callable[[torch.Tensor, Sequence[int]], torch.Tensor]
"""Takes rows in the order of their experts, and how many each expert has; gives as many rows."""


def computed_by_owners(
    x_ND: torch.Tensor, counts: Sequence[int], group: RankGroup, compute: ByExperts
) -> torch.Tensor:
    """What the experts make of rows, wherever they are.

    Args:
        x_ND: Floating, the rows of expert 0 first.
        counts: Rows of each of all E experts, which sum to N; E is a multiple of the group's size.
        group: The ranks that hold the experts.
        compute: Of this rank's own L experts.

    Returns:
        [N, D], in the order and type of x_ND.
    """
    asked_RL = torch.tensor(counts, device=x_ND.device).view(group.size, -1)
    given_RL = _told(asked_RL, group)
    send, receive = asked_RL.sum(1).tolist(), given_RL.sum(1).tolist()
    came_MD = _exchanged(x_ND, send, receive, group)
    # They come by rank, and of each rank by expert.
    num_own = given_RL.shape[1]
    expert_of_block = torch.arange(num_own, device=x_ND.device).repeat(group.size)
    expert_M = expert_of_block.repeat_interleave(given_RL.flatten())
    order_M = expert_M.argsort(stable=True)
    place_M = torch.empty_like(order_M)
    place_M[order_M] = torch.arange(len(order_M), device=order_M.device)
    made_MD = compute(permuted(came_MD, order_M, place_M), given_RL.sum(0).tolist())
    return _exchanged(permuted(made_MD, place_M, order_M), receive, send, group)


def _told(asked_RL: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """Rows that each rank has for this one's experts. A rank says what it has for each."""
    given_RL = torch.empty_like(asked_RL)
    dist.all_to_all_single(given_RL, asked_RL, group=group.process_group)
    return given_RL


def permuted(x_ND: torch.Tensor, order_N: torch.Tensor, inverse_N: torch.Tensor) -> torch.Tensor:
    """Rows in another order, without the sums that an index's own gradient would make."""
    rows: torch.Tensor = _Permuted.apply(x_ND, order_N, inverse_N)  # type: ignore[no-untyped-call]
    return rows


def _exchanged(
    rows: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: RankGroup
) -> torch.Tensor:
    came: torch.Tensor = _Exchange.apply(rows, send, receive, group)  # type: ignore[no-untyped-call]
    return came


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: RankGroup
    ) -> torch.Tensor:
        ctx.back = (receive, send, group)
        return _all_to_all(rows, send, receive, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _all_to_all(gradient, *ctx.back), None, None, None


class _Permuted(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: torch.Tensor, order_N: torch.Tensor, inverse_N: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(inverse_N)
        return x_ND[order_N]

    @staticmethod
    def backward(ctx: Any, grad_ND: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (inverse_N,) = ctx.saved_tensors
        return grad_ND[inverse_N], None, None


def _all_to_all(
    rows: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: RankGroup
) -> torch.Tensor:
    """Sends the first rows to the first rank, and so on."""
    came = rows.new_empty(sum(receive), rows.shape[1])
    row_bytes = rows.shape[1] * rows.element_size()
    # As bytes: gloo does not take every type.
    dist.all_to_all_single(
        came.flatten().view(torch.uint8),
        # A gradient without rows may have strides of 0, which no view takes.
        (rows.contiguous() if rows.numel() else rows.new_empty(0)).flatten().view(torch.uint8),
        [count * row_bytes for count in receive],
        [count * row_bytes for count in send],
        group=group.process_group,
    )
    return came
