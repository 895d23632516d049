"""Brute-force policy losses in plain Python floats: a loop over rows and tokens.

A loss is a function of the log-probs now and of `frozen`, the same numbers where no gradient
passes: its gradient is that of finite differences in the first alone.
"""

from __future__ import annotations

import math
import statistics
import struct
from collections.abc import Callable

from support import oracles
from support.oracles import Rows
from support.ragged_batches import RaggedBatch

from rolemesh.engine.specs import (
    CispoPolicyLossSpec,
    ClipCovPolicyLossSpec,
    CovariancePolicyLossSpec,
    DppoPolicyLossSpec,
    GeometricRejectionSpec,
    GmpoPolicyLossSpec,
    GspoPolicyLossSpec,
    KlCovPolicyLossSpec,
    MaskingSpec,
    PolicyTermsSpec,
    PpoPolicyLossSpec,
    ReinforcePolicyLossSpec,
    SapoPolicyLossSpec,
    SequenceTruncationSpec,
    TokenTruncationSpec,
    ToprPolicyLossSpec,
    VespoPolicyLossSpec,
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
    advantage, sampled = batch.columns["advantages"][b][t], batch.columns["logprobs"][b]
    # What ratios compare with.
    old = {
        "scored": batch.columns["proximal_logprobs"][b],
        "same_pass": frozen,
    }.get(spec.weighs_by or "", sampled)
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
    if isinstance(spec, DppoPolicyLossSpec | SapoPolicyLossSpec | GmpoPolicyLossSpec):
        return _gated_token_loss(
            new, frozen, kept, t, old, sampled, batch.columns["advantages"][b], spec
        )
    if isinstance(spec, CovariancePolicyLossSpec):
        return _covariance_token_loss(new[t], old[t], advantage, (b, t), batch, spec)
    if isinstance(spec, VespoPolicyLossSpec | ToprPolicyLossSpec):
        of_row = math.exp(sum(frozen[u] - sampled[u] for u in kept))
        return -_row_weight(of_row, advantage, spec) * advantage * new[t]
    if isinstance(spec, CispoPolicyLossSpec):
        weight = min(math.exp(frozen[t] - old[t]), 1 + spec.clip_high)
        if spec.clip_low is not None:
            weight = max(weight, 1 - spec.clip_low)
        return -weight * advantage * new[t]
    assert isinstance(spec, ReinforcePolicyLossSpec)
    return -advantage * new[t]


def _gated_token_loss(
    new: oracles.Row,
    frozen: oracles.Row,
    kept: list[int],
    t: int,
    old: oracles.Row,
    sampled: oracles.Row,
    advantages: oracles.Row,
    spec: DppoPolicyLossSpec | SapoPolicyLossSpec | GmpoPolicyLossSpec,
) -> float:
    advantage, ratio = advantages[t], math.exp(new[t] - old[t])
    if isinstance(spec, DppoPolicyLossSpec):
        p, q = math.exp(frozen[t]), math.exp(sampled[t])
        low, high = spec.thresholds
        if spec.divergence == "tv":
            divergence = abs(p - q)
        else:
            divergence = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        goes_up, goes_down = advantage > 0 and p > q, advantage < 0 and p < q
        is_masked = (goes_up and divergence > high) or (goes_down and divergence > low)
        return 0.0 if is_masked else -ratio * advantage
    if isinstance(spec, SapoPolicyLossSpec):
        tau = spec.gate_positive if advantage > 0 else spec.gate_negative
        return -4 / tau / (1 + math.exp(-tau * (ratio - 1))) * advantage
    log_ratios = [
        min(new[u] - old[u], spec.clip_high)
        if advantages[u] > 0
        else max(new[u] - old[u], -spec.clip_low)
        for u in kept
    ]
    return -math.exp(statistics.fmean(log_ratios)) * advantage


def _row_weight(
    ratio: float, advantage: float, spec: VespoPolicyLossSpec | ToprPolicyLossSpec
) -> float:
    if isinstance(spec, ToprPolicyLossSpec):
        return min(ratio, 1.0) if advantage < 0 else 1.0
    if advantage >= 0:
        power, decay = spec.power_positive, spec.decay_positive
    else:
        power, decay = spec.power_negative, spec.decay_negative
    weight: float = ratio**power * math.exp(decay * (1 - ratio))
    return weight


def _covariance_token_loss(
    new: float,
    old: float,
    advantage: float,
    place: tuple[int, int],
    batch: RaggedBatch,
    spec: CovariancePolicyLossSpec,
) -> float:
    ratio = math.exp(new - old)
    is_chosen = place in chosen_tokens(batch, spec)
    if isinstance(spec, KlCovPolicyLossSpec):
        penalty = spec.penalty_coefficient * abs(new - old) if is_chosen else 0.0
        return -ratio * advantage + penalty
    assert isinstance(spec, ClipCovPolicyLossSpec)
    if is_chosen:
        return 0.0
    clipped = min(max(ratio, 1 - spec.clip_low), 1 + spec.clip_high)
    return -min(ratio * advantage, clipped * advantage)


def chosen_tokens(batch: RaggedBatch, spec: CovariancePolicyLossSpec) -> set[tuple[int, int]]:
    """Rows and places of the tokens that Clip-Cov and KL-Cov treat in their own way."""
    columns = batch.columns
    kept = [(b, t) for b, mask in enumerate(batch.masks) for t, counts in enumerate(mask) if counts]
    if not kept:
        return set()
    means = {
        name: math.fsum(columns[name][b][t] for b, t in kept) / len(kept)
        for name in ("logprobs", "advantages")
    }
    scored = {
        (b, t): math.prod(columns[name][b][t] - mean for name, mean in means.items())
        for b, t in kept
    }
    if isinstance(spec, ClipCovPolicyLossSpec):
        scored = {
            (b, t): drawn_by_token(
                columns["logprobs"][b][t], columns["advantages"][b][t], sum(batch.masks[b][:t])
            )
            for (b, t), covariance in scored.items()
            if spec.covariance_low <= covariance <= spec.covariance_high
        }
    else:
        scored = {place: covariance for place, covariance in scored.items() if covariance > 0}
    highest = sorted(scored, key=scored.__getitem__, reverse=True)
    return set(highest[: math.ceil(spec.covariance_share * len(kept))])


def drawn_by_token(logprob: float, advantage: float, place: int) -> float:
    """Clip-Cov's uniform number of a token, by Python's integers; `place` counts in its row."""
    bits = [struct.unpack("<I", struct.pack("<f", number))[0] for number in (logprob, advantage)]
    start = _splitmix(bits[0] << 32 | bits[1])
    return (_splitmix(start + (place + 1) * 0x9E3779B97F4A7C15 & _WORD) >> 11) / 2**53


_WORD = (1 << 64) - 1


def _splitmix(number: int) -> int:
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    number = (number ^ number >> 27) * 0x94D049BB133111EB & _WORD
    return number ^ number >> 31
