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
    GeometricRejectionSpec,
    GspoPolicyLossSpec,
    MaskingSpec,
    PolicyTermsSpec,
    PpoPolicyLossSpec,
    ReinforcePolicyLossSpec,
    SequenceTruncationSpec,
    TokenTruncationSpec,
)

STEP = 1e-6
"""Of central differences: its own error is about 1e-12, that of rounding about 1e-10."""


def policy_loss(new: Rows, frozen: Rows, batch: RaggedBatch, spec: PolicyTermsSpec) -> float:
    """The loss of a whole mini-batch, entropy, KL and a correction included."""
    losses = []
    weights = correction_weights(frozen, batch, spec)
    for b, mask in enumerate(batch.masks):
        kept = [t for t, counts in enumerate(mask) if counts]
        row = [0.0] * len(mask)
        for t in kept:
            row[t] = weights[b][t] * _token_loss(new[b], frozen[b], kept, t, b, batch, spec)
            row[t] -= spec.entropy_coefficient * batch.columns["entropy"][b][t]
            if spec.kl_in_loss:
                reference = batch.columns["reference_logprobs"][b][t]
                row[t] += spec.kl_in_loss * oracles.kl(spec.kl_form, new[b][t], reference)
        losses.append(row)
    return oracles.aggregate(losses, batch.masks, spec.aggregation, spec.norm_length)


def correction_weights(frozen: Rows, batch: RaggedBatch, spec: PolicyTermsSpec) -> Rows:
    """The weight of each token in the policy term; 1 without a correction."""
    form = spec.off_policy
    if form is None:
        return [[1.0] * len(mask) for mask in batch.masks]
    start = batch.columns["proximal_logprobs"] if spec.weighs_by == "scored" else frozen
    weights = []
    for b, mask in enumerate(batch.masks):
        kept = [t for t, counts in enumerate(mask) if counts]
        logs = {t: start[b][t] - batch.columns["logprobs"][b][t] for t in kept}
        row = [0.0] * len(mask)
        for t in kept:
            of_row = math.exp(min(math.fsum(logs.values()), 20.0))
            if isinstance(form, TokenTruncationSpec):
                row[t] = min(math.exp(min(logs[t], 20.0)), form.cap)
            elif isinstance(form, SequenceTruncationSpec):
                row[t] = min(of_row, form.cap)
            elif isinstance(form, MaskingSpec):
                ratio = math.exp(logs[t]) if form.level == "token" else of_row
                row[t] = ratio if form.low <= ratio <= form.high else 0.0
            else:
                assert isinstance(form, GeometricRejectionSpec)
                mean = math.exp(statistics.fmean(logs.values()))
                row[t] = 1.0 if form.low <= mean <= form.high else 0.0
        weights.append(row)
    total = math.fsum(map(math.fsum, weights))
    if form.normalize is None or total == 0:
        return weights
    mean = total / sum(map(sum, batch.masks))
    return [[weight / mean for weight in row] for row in weights]


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
    # What ratios compare with.
    old = {
        "scored": batch.columns["proximal_logprobs"][b],
        "same_pass": frozen,
    }.get(spec.weighs_by or "", batch.columns["logprobs"][b])
    if isinstance(spec, PpoPolicyLossSpec):
        loss, _ = oracles.policy_token_loss(
            new[t], old[t], advantage, spec.clip_low, spec.clip_high, spec.dual_clip
        )
        return loss
    if isinstance(spec, GspoPolicyLossSpec):
        if spec.level == "sequence":
            ratio = math.exp(statistics.fmean(new[u] - old[u] for u in kept))
        else:
            of_row = math.exp(statistics.fmean(frozen[u] - old[u] for u in kept))
            ratio = of_row * math.exp(new[t]) / math.exp(frozen[t])
        clipped = min(max(ratio, 1 - spec.clip_low), 1 + spec.clip_high)
        return -min(ratio * advantage, clipped * advantage)
    if isinstance(spec, CispoPolicyLossSpec):
        weight = min(math.exp(frozen[t] - old[t]), 1 + spec.clip_high)
        if spec.clip_low is not None:
            weight = max(weight, 1 - spec.clip_low)
        return -weight * advantage * new[t]
    assert isinstance(spec, ReinforcePolicyLossSpec)
    return -advantage * new[t]
