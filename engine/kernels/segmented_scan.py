"""Advantages and returns of packed rows as one scan, in Triton.

The reference is `algorithms/advantages.gae`. Each token is an affine map of what lies behind it
(advantage, value), and maps compose; so a block of a row is one associative scan.

Shape letters: B rows, N packed completion tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MOST_BLOCK_TOKENS = 512
"""Tokens of a row that are scanned at a time; the blocks of a row follow each other."""
LEAST_BLOCK_TOKENS = 16


def scan_gae(
    rewards_N: torch.Tensor,
    values_N: torch.Tensor,
    loss_mask_N: torch.Tensor,
    offsets: torch.Tensor,
    *,
    gamma: float,
    lam: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns; arguments and results are those of `gae`, and are not checked.

    Rewards and values are float32 or float64; offsets may lie on the CPU, too.
    """
    advantages_N = torch.empty_like(rewards_N)
    returns_N = torch.empty_like(rewards_N)
    num_rows = len(offsets) - 1
    if num_rows and len(rewards_N):
        longest = triton.next_power_of_2(int(offsets.diff().max()))
        _scan_row[(num_rows,)](
            rewards_N.contiguous(),
            values_N.contiguous(),
            loss_mask_N.contiguous().view(torch.uint8),
            offsets.to(rewards_N.device),
            advantages_N,
            returns_N,
            # As tensors: a number that is passed itself would become a float32 one.
            torch.tensor([gamma, gamma * lam], dtype=torch.float64, device=rewards_N.device),
            BLOCK=min(MOST_BLOCK_TOKENS, max(LEAST_BLOCK_TOKENS, longest)),
        )
    return advantages_N, returns_N


@triton.jit
def _compose(
    first_sum: tl.tensor,
    first_by_value: tl.tensor,
    first_by_advantage: tl.tensor,
    first_value: tl.tensor,
    first_keeps: tl.tensor,
    then_sum: tl.tensor,
    then_by_value: tl.tensor,
    then_by_advantage: tl.tensor,
    then_value: tl.tensor,
    then_keeps: tl.tensor,
) -> tl.tensor:
    """One map after another.

    A map takes advantage and value to sum + by_value * value + by_advantage * advantage, and to
    its own value + keeps * value.
    """
    return (
        then_sum + then_by_value * first_value + then_by_advantage * first_sum,
        then_by_value * first_keeps + then_by_advantage * first_by_value,
        then_by_advantage * first_by_advantage,
        then_value + then_keeps * first_value,
        then_keeps * first_keeps,
    )


@triton.jit
def _scan_row(
    rewards: tl.tensor,
    values: tl.tensor,
    mask: tl.tensor,
    offsets: tl.tensor,
    advantages: tl.tensor,
    returns: tl.tensor,
    factors: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """A row from its end, in blocks."""
    row = tl.program_id(0)
    start = tl.load(offsets + row)
    stop = tl.load(offsets + row + 1)
    gamma = tl.load(factors)
    decay = tl.load(factors + 1)
    place = tl.arange(0, BLOCK)
    advantage_behind = tl.zeros((1,), dtype=tl.float64)
    value_behind = tl.zeros((1,), dtype=tl.float64)
    for done in range(0, stop - start, BLOCK):
        at = stop - 1 - done - place
        is_token = at >= start
        counts = is_token & (tl.load(mask + at, mask=is_token, other=0) != 0)
        # What a masked token holds is not read: it may be NaN.
        reward = tl.load(rewards + at, mask=counts, other=0.0).to(tl.float64)
        value = tl.load(values + at, mask=counts, other=0.0).to(tl.float64)
        by_value = tl.where(counts, gamma, 0.0)
        by_advantage = tl.where(counts, decay, 1.0)
        keeps = tl.where(counts, 0.0, 1.0).to(tl.float64)
        total, by_value, by_advantage, last_value, keeps = tl.associative_scan(
            (reward - value, by_value, by_advantage, value, keeps), 0, _compose
        )
        advantage = total + by_value * value_behind + by_advantage * advantage_behind
        tl.store(advantages + at, tl.where(counts, advantage, 0.0), mask=is_token)
        tl.store(returns + at, tl.where(counts, advantage + value, 0.0), mask=is_token)
        is_last = place == BLOCK - 1
        value_here = last_value + keeps * value_behind
        advantage_behind = tl.sum(tl.where(is_last, advantage, 0.0), 0, keep_dims=True)
        value_behind = tl.sum(tl.where(is_last, value_here, 0.0), 0, keep_dims=True)
