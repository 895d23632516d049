"""Brute-force oracles of the estimators without a critic, in plain Python floats.

Groups are dictionaries of rows, sums are `math.fsum`, means and deviations those of `statistics`,
which are exact. They share no code with the engine and use no torch.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from support import oracles
from support.oracles import MaskRows, Rows
from support.ragged_batches import RaggedBatch

from rolemesh.engine.experience import Column, ColumnKind, Experience

STD_EPS = 1e-6


@dataclass
class GroupedBatch:
    """A ragged batch with the prompt of each row."""

    batch: RaggedBatch
    prompt_ids: list[int]

    def experience(self) -> Experience:
        """All columns, numbers in float32."""
        ids = Column(ColumnKind.ROW, torch.tensor(self.prompt_ids, dtype=torch.int64))
        return self.batch.experience(torch.float32) | Experience({"prompt_ids": ids})

    def reordered(self, order: Sequence[int]) -> GroupedBatch:
        """The same rows in another order."""
        batch = RaggedBatch(
            [self.batch.masks[b] for b in order],
            {name: [rows[b] for b in order] for name, rows in self.batch.columns.items()},
            {name: [rows[b] for b in order] for name, rows in self.batch.row_columns.items()},
        )
        return GroupedBatch(batch, [self.prompt_ids[b] for b in order])


def groups(prompt_ids: Sequence[int], masks: MaskRows) -> dict[int, list[int]]:
    """Rows with unmasked tokens by prompt."""
    found: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompt_ids):
        if any(masks[row]):
            found.setdefault(prompt, []).append(row)
    return found


def token_rewards(
    rewards: Sequence[float],
    masks: MaskRows,
    penalties: Rows | None = None,
) -> list[list[float]]:
    """Each row's reward on its last unmasked token, less each unmasked token's penalty."""
    earned = []
    for row, mask in enumerate(masks):
        tokens = [0.0] * len(mask)
        kept = [t for t, counts in enumerate(mask) if counts]
        if kept:
            tokens[kept[-1]] = rewards[row]
        if penalties is not None:
            for t in kept:
                tokens[t] -= penalties[row][t]
        earned.append(tokens)
    return earned


def kl_penalties(batch: RaggedBatch, coefficient: float, form: str) -> list[list[float]]:
    """KL of each token times the coefficient."""
    pairs = zip(batch.columns["logprobs"], batch.columns["reference_logprobs"], strict=True)
    return [
        [coefficient * oracles.kl(form, p, q) for p, q in zip(*pair, strict=True)] for pair in pairs
    ]


def returns(rows: Rows, masks: MaskRows, gamma: float) -> list[list[float]]:
    """Discounted sums over each token and the unmasked ones after it, as the series."""
    result = []
    for row, mask in zip(rows, masks, strict=True):
        kept = [t for t, counts in enumerate(mask) if counts]
        sums = [0.0] * len(mask)
        for position, t in enumerate(kept):
            sums[t] = math.fsum(gamma**later * row[u] for later, u in enumerate(kept[position:]))
        result.append(sums)
    return result


def compare_in_groups(
    scores: Sequence[float],
    prompt_ids: Sequence[int],
    masks: MaskRows,
    advantage: Callable[[float, list[float]], float],
) -> list[list[float]]:
    """advantage(score, scores of the row's whole group) at each unmasked token."""
    result = [[0.0] * len(mask) for mask in masks]
    for rows in groups(prompt_ids, masks).values():
        members = [scores[row] for row in rows]
        for row in rows:
            number = advantage(scores[row], members)
            result[row] = [number if counts else 0.0 for counts in masks[row]]
    return result


def grpo(score: float, members: list[float]) -> float:
    """(score - mean) / (std + 1e-6); 0 alone."""
    if len(members) == 1:
        return 0.0
    return (score - statistics.fmean(members)) / (statistics.stdev(members) + STD_EPS)


def centred(score: float, members: list[float]) -> float:
    """The score less the mean."""
    return score - statistics.fmean(members)


def rloo(score: float, members: list[float]) -> float:
    """The score less the mean of the others; 0 alone."""
    others = list(members)
    others.remove(score)
    return score - statistics.fmean(others) if others else 0.0


def pass_at_k(k: int) -> Callable[[float, list[float]], float]:
    """Set by set: k * (mean best of sets of k with the score - mean best of those without)."""

    def advantage(score: float, members: list[float]) -> float:
        others = list(members)
        others.remove(score)
        if len(others) < k:
            return 0.0
        with_it = [max(score, *rest) for rest in itertools.combinations(others, k - 1)]
        without_it = [max(best) for best in itertools.combinations(others, k)]
        return k * (statistics.fmean(with_it) - statistics.fmean(without_it))

    return advantage


def maxrl(score: float, members: list[float]) -> float:
    """The score over the mean, less 1; 0 where nothing is right."""
    mean = statistics.fmean(members)
    return score / mean - 1 if mean else 0.0


def gdpo(
    parts: Mapping[str, Sequence[float]],
    weights: Mapping[str, float],
    prompt_ids: Sequence[int],
    masks: MaskRows,
) -> list[float]:
    """One advantage a row: each part normalised in its groups, summed, normalised over the batch.

    NaN: the part does not apply to the row.
    """
    sums = [0.0] * len(masks)
    for name, weight in weights.items():
        values = parts[name]
        for rows in groups(prompt_ids, masks).values():
            applies = [row for row in rows if not math.isnan(values[row])]
            members = [values[row] for row in applies]
            for row in applies:
                sums[row] += weight * grpo(values[row], members)
    counted = [row for rows in groups(prompt_ids, masks).values() for row in rows]
    mean = statistics.fmean(sums[row] for row in counted)
    std = statistics.stdev(sums[row] for row in counted) if len(counted) > 1 else 0.0
    return [
        (number - mean) / (std + STD_EPS) if row in counted else 0.0
        for row, number in enumerate(sums)
    ]


def overlong(length: int, max_length: int, buffer: int, penalty: float) -> float:
    """The three cases of arXiv 2503.14476, eq. 13."""
    if length <= max_length - buffer:
        return 0.0
    if length <= max_length:
        return penalty * ((max_length - buffer) - length) / buffer
    return -penalty
