"""Brute-force policy losses in plain Python floats: a loop over rows and tokens.

A loss is a function of the log-probs now and of `frozen`, the same numbers where no gradient
passes: its gradient is that of finite differences in the first alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

from support import oracles
from support.oracles import Rows
from support.ragged_batches import RaggedBatch

from rolemesh.engine.specs import (
    CispoPolicyLossSpec,
    GspoPolicyLossSpec,
    PolicyTermsSpec,
    PpoPolicyLossSpec,
    ReinforcePolicyLossSpec,
)

STEP = 1e-6
"""Of central differences: its own error is about 1e-12, that of rounding about 1e-10."""


def policy_loss(new: Rows, frozen: Rows, batch: RaggedBatch, spec: PolicyTermsSpec) -> float:
    """The loss of a whole mini-batch, entropy and KL included."""
    losses = []
    for b, mask in enumerate(batch.masks):
        kept = [t for t, counts in enumerate(mask) if counts]
        row = [0.0] * len(mask)
        for t in kept:
            row[t] = _token_loss(new[b], frozen[b], kept, t, b, batch, spec)
            row[t] -= spec.entropy_coefficient * batch.columns["entropy"][b][t]
            if spec.kl_in_loss:
                reference = batch.columns["reference_logprobs"][b][t]
                row[t] += spec.kl_in_loss * oracles.kl(spec.kl_form, new[b][t], reference)
        losses.append(row)
    return oracles.aggregate(losses, batch.masks, spec.aggregation, spec.norm_length)


def gradient(loss: Callable[[Rows], float], at: Rows) -> list[list[float]]:
    """Central differences of a function of rows by each number."""
    slopes = [[0.0] * len(row) for row in at]
    for b, row in enumerate(at):
        for t, number in enumerate(row):

            def moved(to: float, b: int = b, t: int = t) -> float:
                rows = [list(other) for other in at]
                rows[b][t] = to
                return loss(rows)

            slopes[b][t] = oracles.central_difference(moved, number, STEP)
    return slopes


def _token_loss(
    new: oracles.Row,
    frozen: oracles.Row,
    kept: list[int],
    t: int,
    b: int,
    batch: RaggedBatch,
    spec: PolicyTermsSpec,
) -> float:
    advantage = batch.columns["advantages"][b][t]
    sampled = batch.columns["logprobs"][b]
    if isinstance(spec, PpoPolicyLossSpec):
        if spec.importance_cap is None:
            old, weight = sampled[t], 1.0
        else:
            old = batch.columns["proximal_logprobs"][b][t]
            weight = min(math.exp(old - sampled[t]), spec.importance_cap)
        cap = spec.dual_clip
        loss, _ = oracles.policy_token_loss(
            new[t], old, advantage, spec.clip_low, spec.clip_high, cap
        )
        return weight * loss
    if isinstance(spec, GspoPolicyLossSpec):
        if spec.level == "sequence":
            ratio = math.exp(statistics.fmean(new[u] - sampled[u] for u in kept))
        else:
            of_row = math.exp(statistics.fmean(frozen[u] - sampled[u] for u in kept))
            ratio = of_row * math.exp(new[t]) / math.exp(frozen[t])
        clipped = min(max(ratio, 1 - spec.clip_low), 1 + spec.clip_high)
        return -min(ratio * advantage, clipped * advantage)
    ratio = math.exp(frozen[t] - sampled[t])
    if isinstance(spec, CispoPolicyLossSpec):
        weight = min(ratio, 1 + spec.clip_high)
        if spec.clip_low is not None:
            weight = max(weight, 1 - spec.clip_low)
        return -weight * advantage * new[t]
    assert isinstance(spec, ReinforcePolicyLossSpec)
    weight = 1.0 if spec.importance_cap is None else min(ratio, spec.importance_cap)
    return -weight * advantage * new[t]
