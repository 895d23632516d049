"""PPO's loss of tokens, its gradient and all of its statistics in one pass over them, in Triton.

The reference is `algorithms/losses/policy_losses.py`, which has the formulas and their sources:
about sixty operations on [M], each a launch of its own. Liger's GRPO loss is another contract:
padded rows, a loss that ends in the head, and other statistics.

Shape letters: M unmasked tokens, K blocks of them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from rolemesh.engine.specs import PpoPolicyLossSpec

ALL = tl.constexpr(tl.PropagateNan.ALL)
"""For bounds: NaN stays NaN, or a broken log-prob would go unnoticed."""

BLOCK_TOKENS = 1024

STATISTICS = (
    *("policy_loss", "kl_loss", "entropy", "ratio_mean", "approx_kl"),
    *("sampler_logprob_diff_mean", "clip_fraction_high", "clip_fraction_low"),
    *("dual_clip_fraction", "ratio_max", "sampler_logprob_diff_max"),
)
"""What is counted, in the kernel's order: sums over tokens, and at the end the largest ones."""
WEIGHTED = STATISTICS[:2]
"""Those that are summed with the weights of tokens."""
_NUM_SUMS = len(STATISTICS) - 2


def ppo_loss(
    logprobs_M: torch.Tensor,
    old_M: torch.Tensor,
    sampled_M: torch.Tensor,
    advantages_M: torch.Tensor,
    weights_M: torch.Tensor,
    importance_M: torch.Tensor | None,
    entropy_M: torch.Tensor | None,
    reference_M: torch.Tensor | None,
    spec: PpoPolicyLossSpec,
    *,
    max_log_ratio: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The weighted sum of token losses, KL to the reference included, and statistics.

    Args:
        logprobs_M: float32 [M], log-probs now; alone gets a gradient.
        old_M: float32 [M], log-probs that ratios compare with.
        sampled_M: float32 [M], log-probs under the weights that sampled.
        advantages_M: float32 [M].
        weights_M: float32 [M], of each token in the sum.
        importance_M: float32 [M], of each token's policy term besides; None: 1.
        entropy_M: float32 [M], for its statistic alone; None without one.
        reference_M: float32 [M], log-probs of the reference; None without a KL.
        spec: The numbers of the loss.
        max_log_ratio: Bound of a log-ratio in an exponent.

    Returns:
        float32 []; and statistics, float64 [] by name, summed over tokens and not divided by
        anything; only those that the spec asks for.
    """
    # In the kernel's order.
    policy = (logprobs_M, old_M, sampled_M, advantages_M)
    entropy_M = None if entropy_M is None else entropy_M.detach()
    columns_M = (*policy, weights_M, importance_M, entropy_M, reference_M)
    loss, statistics = _PpoLoss.apply(spec, max_log_ratio, *columns_M)  # type: ignore[no-untyped-call]
    found = dict(zip(STATISTICS, statistics.unbind(), strict=True))
    if reference_M is None:
        del found["kl_loss"]
    if entropy_M is None:
        del found["entropy"]
    if spec.dual_clip is None:
        del found["dual_clip_fraction"]
    return loss, found


class _PpoLoss(torch.autograd.Function):
    """The forward pass leaves the gradient of each token, which backward scales."""

    @staticmethod
    def forward(
        ctx: Any,
        spec: PpoPolicyLossSpec,
        max_log_ratio: float,
        logprobs_M: torch.Tensor,
        *others_M: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        has_importance, has_entropy, has_reference = (
            column_M is not None for column_M in others_M[-3:]
        )
        num_tokens = len(logprobs_M)
        blocks = triton.cdiv(num_tokens, BLOCK_TOKENS)
        gradient_M = torch.empty_like(logprobs_M, memory_format=torch.contiguous_format)
        found_K = logprobs_M.new_empty(blocks, len(STATISTICS), dtype=torch.float32)
        if blocks:
            _ppo_loss[(blocks,)](
                logprobs_M.contiguous(),
                *(None if column_M is None else column_M.contiguous() for column_M in others_M),
                gradient_M,
                found_K,
                num_tokens,
                1 - spec.clip_low,
                1 + spec.clip_high,
                spec.dual_clip or 0.0,
                spec.kl_in_loss,
                max_log_ratio,
                HAS_IMPORTANCE=has_importance,
                HAS_ENTROPY=has_entropy,
                HAS_DUAL_CLIP=spec.dual_clip is not None,
                KL_FORM=spec.kl_form if has_reference else "",
                NUM_STATISTICS=len(STATISTICS),
                BLOCK=BLOCK_TOKENS,
            )
        statistics = torch.cat(
            [found_K[:, :_NUM_SUMS].sum(0, dtype=torch.float64), *_maxima(found_K)]
        )
        loss = (statistics[0] + spec.kl_in_loss * statistics[1]).to(logprobs_M.dtype)
        ctx.save_for_backward(gradient_M)
        ctx.mark_non_differentiable(statistics)
        return loss, statistics

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        (gradient_M,) = ctx.saved_tensors
        return None, None, gradient * gradient_M, *[None] * 7


def _maxima(found_K: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The last two statistics, float64 [2]; 0 without tokens."""
    if not len(found_K):
        return (found_K.new_zeros(2, dtype=torch.float64),)
    return (found_K[:, _NUM_SUMS:].amax(0).double(),)


@triton.jit
def _between(x: tl.tensor, lowest: tl.tensor, highest: tl.tensor) -> tl.tensor:
    return tl.minimum(tl.maximum(x, lowest, propagate_nan=ALL), highest, propagate_nan=ALL)


@triton.jit
def _exp_less_one_less_itself(x: tl.tensor) -> tl.tensor:
    """exp(x) - 1 - x, by its series where the difference would lose its digits."""
    series = 1 + x / 7 * (1 + x / 8 * (1 + x / 9))
    series = 1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6 * series)))
    return tl.where(tl.abs(x) < 0.5, x * x / 2 * series, tl.exp(x) - 1 - x)


@triton.jit
def _ppo_loss(
    logprobs: tl.tensor,
    old: tl.tensor,
    sampled: tl.tensor,
    advantages: tl.tensor,
    weights: tl.tensor,
    importances: tl.tensor,
    entropy: tl.tensor,
    reference: tl.tensor,
    gradients: tl.tensor,
    found: tl.tensor,
    num_tokens: tl.tensor,
    lowest: tl.tensor,
    highest: tl.tensor,
    dual_clip: tl.tensor,
    kl_in_loss: tl.tensor,
    max_log_ratio: tl.tensor,
    HAS_IMPORTANCE: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_DUAL_CLIP: tl.constexpr,
    KL_FORM: tl.constexpr,
    NUM_STATISTICS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A block of tokens: their gradients, and a row of statistics."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_token = token < num_tokens
    logprob = tl.load(logprobs + token, mask=is_token, other=0.0)
    old_logprob = tl.load(old + token, mask=is_token, other=0.0)
    sampled_logprob = tl.load(sampled + token, mask=is_token, other=0.0)
    advantage = tl.load(advantages + token, mask=is_token, other=0.0)
    weight = tl.load(weights + token, mask=is_token, other=0.0)

    log_ratio = logprob - old_logprob
    bounded = _between(log_ratio, -max_log_ratio, max_log_ratio)
    ratio = tl.exp(bounded)
    clipped = _between(ratio, lowest, highest)
    plain_loss = -ratio * advantage
    clipped_loss = -clipped * advantage
    loss = tl.maximum(plain_loss, clipped_loss, propagate_nan=ALL)
    # Whether the ratio's gradient goes on: unless the clipped side is the larger one, and clipped.
    is_inside = (ratio >= lowest) & (ratio <= highest)
    passes = tl.where((plain_loss > clipped_loss) | is_inside, 1.0, 0.0)
    passes = tl.where(bounded == log_ratio, passes, 0.0)
    dual_clipped = tl.zeros((BLOCK,), dtype=tl.float32)
    if HAS_DUAL_CLIP:
        bound = -dual_clip * advantage
        kept = tl.where(loss < bound, 1.0, tl.where(loss == bound, 0.5, 0.0))
        passes = tl.where(advantage < 0, passes * kept, passes)
        loss = tl.where(advantage < 0, tl.minimum(loss, bound, propagate_nan=ALL), loss)
        dual_clipped = tl.where((advantage < 0) & (ratio > dual_clip), 1.0, 0.0)
    gradient = -advantage * ratio * passes
    if HAS_IMPORTANCE:
        importance = tl.load(importances + token, mask=is_token, other=0.0)
        loss *= importance
        gradient *= importance

    kl = tl.zeros((BLOCK,), dtype=tl.float32)
    if KL_FORM != "":
        against = tl.load(reference + token, mask=is_token, other=0.0) - logprob
        if KL_FORM == "k3":
            held = tl.minimum(against, max_log_ratio, propagate_nan=ALL)
            kl = _exp_less_one_less_itself(held)
            kl_gradient = tl.where(against <= max_log_ratio, -(kl + held), 0.0)
        else:
            kl = -against if KL_FORM == "k1" else 0.5 * against * against
            kl_gradient = -against
        gradient += kl_in_loss * kl_gradient
    tl.store(gradients + token, weight * gradient, mask=is_token)

    difference = tl.abs(logprob - sampled_logprob)
    is_high = is_token & (advantage > 0) & (ratio > highest)
    is_low = is_token & (advantage < 0) & (ratio < lowest)
    at = found + tl.program_id(0) * NUM_STATISTICS
    tl.store(at, tl.sum(weight * loss, 0))
    tl.store(at + 1, tl.sum(weight * kl, 0))
    if HAS_ENTROPY:
        tl.store(at + 2, tl.sum(tl.load(entropy + token, mask=is_token, other=0.0), 0))
    tl.store(at + 3, tl.sum(tl.where(is_token, ratio, 0.0), 0))
    tl.store(at + 4, tl.sum(_exp_less_one_less_itself(bounded), 0))
    tl.store(at + 5, tl.sum(difference, 0))
    tl.store(at + 6, tl.sum(tl.where(is_high, 1.0, 0.0), 0))
    tl.store(at + 7, tl.sum(tl.where(is_low, 1.0, 0.0), 0))
    tl.store(at + 8, tl.sum(dual_clipped, 0))
    tl.store(at + 9, tl.max(tl.where(is_token, ratio, 0.0), 0))
    tl.store(at + 10, tl.max(difference, 0))
