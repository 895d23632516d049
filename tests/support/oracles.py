"""Brute-force oracles of the engine's formulas, in plain Python floats (float64).

They share no code with the engine and use no torch: rows are lists, sums are `math.fsum`, and
recursions are written out as the series that defines them. Slow on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Row = Sequence[float]
Rows = Sequence[Row]
MaskRows = Sequence[Sequence[bool]]


def gae(
    rewards: Rows, values: Rows, masks: MaskRows, gamma: float, lam: float
) -> tuple[list[list[float]], list[list[float]]]:
    """Advantages as the series sum_l (gamma lam)^l delta[t + l], over unmasked tokens only."""
    advantages, returns = [], []
    for row_rewards, row_values, mask in zip(rewards, values, masks, strict=True):
        kept = [t for t, counts in enumerate(mask) if counts]
        deltas = []
        for position, t in enumerate(kept):
            is_last = position == len(kept) - 1
            next_value = 0.0 if is_last else row_values[kept[position + 1]]
            deltas.append(row_rewards[t] + gamma * next_value - row_values[t])
        row_advantages, row_returns = [0.0] * len(mask), [0.0] * len(mask)
        for position, t in enumerate(kept):
            row_advantages[t] = math.fsum(
                (gamma * lam) ** later * delta for later, delta in enumerate(deltas[position:])
            )
            row_returns[t] = row_advantages[t] + row_values[t]
        advantages.append(row_advantages)
        returns.append(row_returns)
    return advantages, returns


def whiten(rows: Rows, masks: MaskRows, eps: float = 1e-8) -> list[list[float]]:
    """Mean 0 and variance 1 (n - 1) over unmasked tokens; a single one becomes 0."""
    kept = unmasked(rows, masks)
    if len(kept) < 2:
        return [[0.0] * len(row) for row in rows]
    mean = math.fsum(kept) / len(kept)
    variance = math.fsum((x - mean) ** 2 for x in kept) / (len(kept) - 1)
    return [
        [(x - mean) / math.sqrt(variance + eps) if counts else 0.0 for x, counts in pairs]
        for pairs in map(list, map(zip, rows, masks))
    ]


def unmasked(rows: Rows, masks: MaskRows) -> list[float]:
    """The unmasked numbers of all rows, in order."""
    return [
        x
        for row, mask in zip(rows, masks, strict=True)
        for x, counts in zip(row, mask, strict=True)
        if counts
    ]


def kl(form: str, logprob: float, reference: float) -> float:
    """Estimator of KL(policy || reference) from one sampled token."""
    if form == "k1":
        return logprob - reference
    if form == "k2":
        return (logprob - reference) ** 2 / 2
    return math.exp(reference - logprob) - 1 - (reference - logprob)


def kl_slope(form: str, logprob: float, reference: float) -> float:
    """Closed-form derivative by logprob of the KL in a loss; k1 takes that of k2."""
    if form == "k3":
        return 1 - math.exp(reference - logprob)
    return logprob - reference


def policy_token_loss(
    logprob: float,
    old: float,
    advantage: float,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> tuple[float, float]:
    """Loss of one token and its derivative by logprob, case by case."""
    ratio = math.exp(logprob - old)
    if advantage >= 0:
        if ratio > 1 + clip_high:
            return -(1 + clip_high) * advantage, 0.0
        return -ratio * advantage, -ratio * advantage
    if ratio < 1 - clip_low:
        return -(1 - clip_low) * advantage, 0.0
    if dual_clip is not None and ratio > dual_clip:
        return -dual_clip * advantage, 0.0
    return -ratio * advantage, -ratio * advantage


def value_token_loss(
    value: float, old: float, target: float, clip: float | None
) -> tuple[float, float]:
    """Loss of one token and its derivative by value."""
    plain = 0.5 * (value - target) ** 2
    if clip is None or abs(value - old) <= clip:
        return plain, value - target
    clipped_value = old + clip if value > old else old - clip
    clipped = 0.5 * (clipped_value - target) ** 2
    return (clipped, 0.0) if clipped > plain else (plain, value - target)


def aggregate(
    rows: Rows, masks: MaskRows, aggregation: str, norm_length: int | None = None
) -> float:
    """The losses of a whole mini-batch as one number, from the definition of the mode."""
    kept_rows = [unmasked([row], [mask]) for row, mask in zip(rows, masks, strict=True)]
    kept_rows = [row for row in kept_rows if row]
    if not kept_rows:
        return 0.0
    if aggregation == "token_mean":
        every = [x for row in kept_rows for x in row]
        return math.fsum(every) / len(every)
    if aggregation == "seq_mean_token_sum":
        of_rows = [math.fsum(row) for row in kept_rows]
    elif aggregation == "seq_mean_token_mean":
        of_rows = [math.fsum(row) / len(row) for row in kept_rows]
    else:
        assert aggregation == "seq_sum_norm"
        assert norm_length is not None
        of_rows = [math.fsum(row) / norm_length for row in kept_rows]
    return math.fsum(of_rows) / len(of_rows)


def aggregate_gradient(
    slopes: Rows, masks: MaskRows, aggregation: str, norm_length: int | None = None
) -> list[list[float]]:
    """Gradient of `aggregate` by each token, given each token's own derivative.

    The aggregate is linear in the token losses: its derivative by one is what it makes of a
    batch in which only that one is not zero.
    """
    gradient = [[0.0] * len(row) for row in slopes]
    for b, row in enumerate(slopes):
        for t, slope in enumerate(row):
            alone = [[0.0] * len(other) for other in slopes]
            alone[b][t] = slope
            gradient[b][t] = aggregate(alone, masks, aggregation, norm_length)
    return gradient


def central_difference(function: Callable[[float], float], at: float, step: float) -> float:
    """Derivative of a function of one number, with an error of order step^2."""
    return (function(at + step) - function(at - step)) / (2 * step)
