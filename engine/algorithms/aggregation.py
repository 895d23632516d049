"""Aggregation of token losses into one number that does not depend on micro-batches.

Every mode is a weighted sum over unmasked tokens whose weights follow from counts over the whole
mini-batch. So micro-batches just add up, no mean is ever taken over one of them, and no
scatter-add (whose order is undefined on a GPU) is needed.

Shape letters: B rows, N packed completion tokens, M those of them with loss mask 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from rolemesh.engine.algorithms.ragged import loss_mask_of, unmasked_per_row
from rolemesh.engine.experience import Experience
from rolemesh.engine.hardware.devices import sent
from rolemesh.engine.specs import Aggregation


@dataclass(frozen=True, slots=True)
class LossScale:
    """Counts over a whole mini-batch: every micro-batch and every rank divides by the same.

    Example: two micro-batches of 3 and 1 rows with 10 and 2 unmasked tokens are both given
    LossScale(num_tokens=12, num_rows=4); their token_mean losses then add to the mean of 12.
    """

    num_tokens: float
    """Unmasked tokens."""
    num_rows: float
    """Rows with at least one unmasked token: a row that has nothing to learn dilutes nothing."""
    num_wanted: float = 0.0
    """Rows with preference 1; where there are pair_ids those of pairs only, so one a pair."""
    num_unwanted: float = 0.0
    """Rows with preference -1, counted alike."""
    weight_sum: float = 0.0
    """Sum over the unmasked tokens of their weights by a correction, where these are divided by
    their mean (`Loss.scale_of` counts it)."""
    mean_logprob: float = 0.0
    """Of the unmasked tokens, when sampled; 0 unless the loss completes it (`Loss.completed`)."""
    mean_advantage: float = 0.0
    """The same of their advantages."""
    least_score: float = math.inf
    """A loss that treats some tokens of the mini-batch in another way scores them: those of this
    score and above are the ones. Infinite unless the loss completes it."""

    @staticmethod
    def of(batch: Experience) -> LossScale:
        """Counts a mini-batch; it needs the column loss_mask."""
        counts = unmasked_per_row(*loss_mask_of(batch))
        num_wanted = num_unwanted = 0.0
        if "preference" in batch:
            preference_B = batch["preference"].values
            if "pair_ids" in batch:
                preference_B = preference_B[batch["pair_ids"].values >= 0]
            num_wanted = float((preference_B > 0).sum())
            num_unwanted = float((preference_B < 0).sum())
        return LossScale(
            num_tokens=float(counts.sum()),
            num_rows=float((counts > 0).sum()),
            num_wanted=num_wanted,
            num_unwanted=num_unwanted,
        )

    @staticmethod
    def total(scales: Iterable[LossScale]) -> LossScale:
        """Counts over parts that share no row, e.g. those of the data-parallel ranks."""
        parts = list(scales)
        return LossScale(
            num_tokens=sum(part.num_tokens for part in parts),
            num_rows=sum(part.num_rows for part in parts),
            num_wanted=sum(part.num_wanted for part in parts),
            num_unwanted=sum(part.num_unwanted for part in parts),
            weight_sum=sum(part.weight_sum for part in parts),
        )

    @property
    def token_divisor(self) -> float:
        """num_tokens, or 1 where there are none and every sum is 0 anyway."""
        return max(self.num_tokens, 1.0)

    @property
    def row_divisor(self) -> float:
        """num_rows, or 1 where there are none and every sum is 0 anyway."""
        return max(self.num_rows, 1.0)

    @property
    def pair_divisor(self) -> float:
        """Pairs, which have a wanted row each, or 1 where there are none."""
        return max(self.num_wanted, 1.0)

    @property
    def judged_divisor(self) -> float:
        """Rows that are wanted or not, or 1 where there are none."""
        return max(self.num_wanted + self.num_unwanted, 1.0)


def token_weights(
    batch: Experience,
    scale: LossScale,
    aggregation: Aggregation,
    norm_length: int | None,
    *,
    like: torch.Tensor,
) -> torch.Tensor:
    """Weights under which the losses of unmasked tokens add to the loss of the mini-batch.

    With T tokens and R rows in the mini-batch and t tokens in the token's own row:

        token_mean           1 / T
        seq_mean_token_sum   1 / R
        seq_mean_token_mean  1 / (R t)
        seq_sum_norm         1 / (R norm_length)   (arXiv 2503.20783)

    Args:
        batch: A micro-batch with the column loss_mask.
        scale: Counts over the whole mini-batch.
        aggregation: The mode.
        norm_length: Divisor of seq_sum_norm, in tokens; None for the other modes.
        like: A tensor with the type and device of the losses.

    Returns:
        float [M], in the order of the unmasked tokens.
    """
    mask_N, offsets = loss_mask_of(batch)
    counts_on_host = unmasked_per_row(mask_N, offsets)
    counts = sent(counts_on_host, like.device)
    rows = scale.row_divisor
    if aggregation == "token_mean":
        row_weights = torch.full_like(counts, 1.0 / scale.token_divisor, dtype=like.dtype)
    elif aggregation == "seq_mean_token_sum":
        row_weights = torch.full_like(counts, 1.0 / rows, dtype=like.dtype)
    elif aggregation == "seq_mean_token_mean":
        # A row without tokens gets a weight that no token takes: repeat_interleave drops it.
        row_weights = (1.0 / (rows * counts.clamp_min(1).double())).to(like.dtype)
    elif aggregation == "seq_sum_norm":
        if norm_length is None:
            raise ValueError("norm_length is None with aggregation 'seq_sum_norm': give it")
        row_weights = torch.full_like(counts, 1.0 / (rows * norm_length), dtype=like.dtype)
    else:
        raise ValueError(f"aggregation is {aggregation!r}: it is none of the known modes")
    return row_weights.repeat_interleave(counts, output_size=int(counts_on_host.sum()))
