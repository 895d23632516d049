"""Formulas of advantages and returns on packed tokens: GAE, and whitening.

Shape letters: B rows, N packed completion tokens, M those of them that count (loss mask 1).
`values[t]` is the state before completion token t. Tokens with loss mask 0 (tool output, also
in the middle of a row) are skipped: the recursion runs from one unmasked token to the next.
"""

from __future__ import annotations

import torch

from rolemesh.engine.algorithms.ragged import decayed_sums, unmasked_per_row
from rolemesh.engine.kernels.choice import triton_serves

WHITEN_EPS = 1e-8
"""Added to the variance, so that equal values become zeros and not NaN."""


def gae(
    rewards_N: torch.Tensor,
    values_N: torch.Tensor,
    loss_mask_N: torch.Tensor,
    offsets: torch.Tensor,
    *,
    gamma: float,
    lam: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16) over completion tokens.

        delta[t] = rewards[t] + gamma * values[t + 1] - values[t]
        advantages[t] = delta[t] + gamma * lam * advantages[t + 1]
        returns[t] = advantages[t] + values[t]

    where t + 1 is the row's next unmasked token, and everything after the last one is 0: a
    completion ends its episode, so nothing is bootstrapped.

    Accumulates in float64 and returns the type of `rewards_N`.

    Args:
        rewards_N: float [N]; what a masked token holds is not read.
        values_N: float [N]; what a masked token holds is not read.
        loss_mask_N: bool [N], 1 = sampled token that counts.
        offsets: int64 [B + 1], row b owns tokens offsets[b]..offsets[b + 1] - 1.
        gamma: Discount a token, 0 to 1.
        lam: Trace decay a token, 0 to 1.

    Returns:
        advantages and returns, float [N], both 0 at masked tokens.

    Example: one row, rewards (0, 0, 1), values (0.5, 0.5, 0.5), all unmasked, gamma = lam = 1
    give advantages (0.5, 0.5, 0.5) and returns (1, 1, 1).
    """
    if not rewards_N.shape == values_N.shape == loss_mask_N.shape or rewards_N.dim() != 1:
        raise ValueError(
            f"rewards, values and loss_mask have shapes {tuple(rewards_N.shape)}, "
            f"{tuple(values_N.shape)} and {tuple(loss_mask_N.shape)}: give one value a token"
        )
    if loss_mask_N.dtype != torch.bool:
        raise ValueError(f"loss_mask has type {loss_mask_N.dtype}: give torch.bool")
    if int(offsets[-1]) != len(rewards_N):
        raise ValueError(
            f"offsets end at {int(offsets[-1])}, but there are {len(rewards_N)} tokens"
        )
    for name, number in (("gamma", gamma), ("lam", lam)):
        if not 0 <= number <= 1:
            raise ValueError(f"{name} is {number}: give a number from 0 to 1")

    if triton_serves(rewards_N.device):
        from rolemesh.engine.kernels.segmented_scan import scan_gae

        return scan_gae(rewards_N, values_N, loss_mask_N, offsets, gamma=gamma, lam=lam)
    index_M = loss_mask_N.nonzero().flatten()
    counts = unmasked_per_row(loss_mask_N, offsets)
    values_M = values_N.index_select(0, index_M).double()
    next_values_M = torch.zeros_like(values_M)
    next_values_M[:-1] = values_M[1:]
    next_values_M[counts[counts > 0].cumsum(0) - 1] = 0
    deltas_M = next_values_M.mul_(gamma).sub_(values_M)
    deltas_M += rewards_N.index_select(0, index_M)

    advantages_M = decayed_sums(deltas_M, counts, gamma * lam)
    advantages_N = torch.zeros_like(rewards_N)
    returns_N = torch.zeros_like(rewards_N)
    advantages_N.scatter_(0, index_M, advantages_M.to(rewards_N.dtype))
    returns_N.scatter_(0, index_M, values_M.add_(advantages_M).to(rewards_N.dtype))
    return advantages_N, returns_N


def whiten(values_N: torch.Tensor, loss_mask_N: torch.Tensor) -> torch.Tensor:
    """Shifts and scales to mean 0 and variance 1 over all unmasked tokens of the batch.

        (x - mean) / sqrt(variance + 1e-8), with Bessel's correction in the variance

    A single unmasked token has no variance and becomes 0, its distance from the mean. Masked
    tokens become 0; what they hold is not read. Accumulates in float64.

    Args:
        values_N: float [N].
        loss_mask_N: bool [N], 1 = counts.

    Returns:
        float [N], of the type of `values_N`.
    """
    whitened_N = torch.zeros_like(values_N)
    values_M = values_N[loss_mask_N].double()
    if len(values_M) > 1:
        variance, mean = torch.var_mean(values_M, correction=1)
        whitened_M = (values_M - mean) * torch.rsqrt(variance + WHITEN_EPS)
        whitened_N[loss_mask_N] = whitened_M.to(values_N.dtype)
    return whitened_N
