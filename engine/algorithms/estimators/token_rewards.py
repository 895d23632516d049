"""Rewards of tokens, for estimators of advantages: which tokens count, and what each earns.

Long completions may be punished softly (DAPO, arXiv 2503.14476, eq. 13).

Shape letters: B rows, N packed completion tokens, R rows with unmasked tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rolemesh.engine.algorithms.estimators.estimation import EstimatorInput
from rolemesh.engine.algorithms.kl import kl_penalty
from rolemesh.engine.algorithms.ragged import (
    completion_values,
    loss_mask_of,
    row_sums,
    row_values,
    unmasked_per_row,
)
from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.specs import KlPenaltySpec, ShapedRewardSpec


@dataclass(frozen=True, slots=True)
class BatchTokens:
    """The tokens of a batch: which of them count, and which row each belongs to."""

    mask_N: torch.Tensor
    """bool, 1 = sampled token that counts."""
    offsets: torch.Tensor
    """int64 [B + 1], rows of completion tokens."""
    counts_B: torch.Tensor
    """int64, unmasked tokens of each row."""
    num_unmasked: int
    """Unmasked tokens."""
    num_rows: int
    """Rows with at least one unmasked token: those that take part."""

    @staticmethod
    def of(experience: Experience) -> BatchTokens:
        """Reads the column loss_mask."""
        mask_N, offsets = loss_mask_of(experience)
        counts_B = unmasked_per_row(mask_N, offsets)
        return BatchTokens(
            mask_N, offsets, counts_B, int(counts_B.sum()), int((counts_B > 0).sum())
        )

    @property
    def takes_part_B(self) -> torch.Tensor:
        """The rows with an unmasked token, bool [B]."""
        return self.counts_B > 0

    def lengths_B(self) -> torch.Tensor:
        """int64 [B], completion tokens of each row, masked ones too."""
        return self.offsets.diff().to(self.mask_N.device)

    def read(self, experience: Experience, name: str) -> torch.Tensor:
        """float64 [N], a completion column with 0 at masked tokens; unmasked ones are finite."""
        values_N = completion_values(experience, name).double().masked_fill(~self.mask_N, 0)
        bad = (~values_N.isfinite()).nonzero().flatten()
        if len(bad):
            at = int(bad[0])
            row = int((self.offsets <= at).sum()) - 1
            raise ValueError(
                f"column {name!r} is {float(values_N[at])} at completion token "
                f"{at - int(self.offsets[row])} of row {row}: check the model that made it"
            )
        return values_N

    def last_unmasked(self) -> torch.Tensor:
        """int64 [R], packed index of the last unmasked token of each row that has one."""
        index_M = self.mask_N.nonzero().flatten()
        return index_M[self.counts_B[self.takes_part_B].cumsum(0) - 1]

    def to_each_token(self, numbers_B: torch.Tensor) -> torch.Tensor:
        """[N], each row's number at its unmasked tokens, 0 at masked ones."""
        return numbers_B.repeat_interleave(self.lengths_B()).masked_fill(~self.mask_N, 0)

    def column(self, values_N: torch.Tensor) -> Column:
        """A completion column, float32, of one number a token: values_N is floating [N]."""
        return Column(ColumnKind.COMPLETION, values_N.float(), self.offsets)


@dataclass(frozen=True, slots=True)
class TokenRewards:
    """What rows and tokens earn after the KL penalty; float64."""

    rewards_N: torch.Tensor
    """[N], a row's reward at its last unmasked token, less each token's penalty."""
    scores_B: torch.Tensor
    """[B], their sum over each row."""
    kl_per_row: float
    """Mean KL of the rows that take part, 0 where it was not measured."""
    metrics: dict[str, float]
    """Of rewards and KL."""


def read_rows(experience: Experience, name: str, tokens: BatchTokens) -> torch.Tensor:
    """float64 [B], a row column of finite numbers, on the device of the mask."""
    return finite_rows(experience, name).to(tokens.mask_N.device)


def finite_rows(experience: Experience, name: str) -> torch.Tensor:
    """float64 [B], a row column whose numbers must all be finite."""
    numbers_B = row_values(experience, name).double()
    bad = (~numbers_B.isfinite()).nonzero().flatten()
    if len(bad):
        row = int(bad[0])
        raise ValueError(
            f"column {name!r} is {float(numbers_B[row])} at row {row} ({len(bad)} of "
            f"{len(numbers_B)} rows are not finite): {_FINITE_REMEDY.get(name, _ANY_REMEDY)}"
        )
    return numbers_B


_FINITE_REMEDY = {
    "rewards": "the reward must give a finite number",
    "costs": "the cost must give a finite number",
}
_ANY_REMEDY = "give finite numbers"


def reward_metrics(rewards_B: torch.Tensor, tokens: BatchTokens) -> dict[str, float]:
    """Mean and deviation of the rewards as they came, float64 [B], over all rows."""
    mean, std = mean_and_std(rewards_B)
    return {
        "reward/mean": mean,
        "reward/std": std,
        "advantages/rows_without_tokens": float(len(rewards_B) - tokens.num_rows),
    }


def shaped_rewards(
    experience: Experience, spec: ShapedRewardSpec, tokens: BatchTokens
) -> tuple[torch.Tensor, dict[str, float]]:
    """Rewards with the punishment of their length, if the spec wants one, and metrics of both.

        penalty * clip((max_length - buffer - length) / buffer, -1, 0)

    "reward/mean" and "/std" are those of the rewards as they came.

    Example: max_length 20, buffer 4, penalty 1: lengths (16, 17, 20, 30) add (0, -0.25, -1, -1).

    Returns:
        float64 [B] and metrics.
    """
    rewards_B = read_rows(experience, "rewards", tokens)
    metrics = reward_metrics(rewards_B, tokens)
    overlong = spec.overlong
    if overlong is None:
        return rewards_B, metrics
    room_B = (overlong.max_length - overlong.buffer - tokens.lengths_B()).double()
    punishments_B = overlong.penalty * (room_B / overlong.buffer).clamp(-1, 0)
    num_rows = max(len(punishments_B), 1)
    metrics["overlong/fraction"] = float((punishments_B < 0).sum()) / num_rows
    metrics["overlong/punishment"] = float(punishments_B.sum()) / num_rows
    return rewards_B + punishments_B, metrics


def token_rewards(
    given: EstimatorInput,
    spec: KlPenaltySpec,
    tokens: BatchTokens,
    rewards_B: torch.Tensor,
    metrics: Mapping[str, float],
) -> TokenRewards:
    """Puts each row's reward on its last unmasked token and takes the KL penalty off.

    Args:
        given: Logprobs and reference_logprobs are read with a penalty, and where present.
        spec: The KL's form.
        tokens: Of the batch.
        rewards_B: float64 [B].
        metrics: Of the rewards; those of the KL join them.
    """
    rewards_N = torch.zeros(len(tokens.mask_N), dtype=torch.float64, device=tokens.mask_N.device)
    rewards_N[tokens.last_unmasked()] = rewards_B[tokens.takes_part_B]
    scores_B, kl_per_row, metrics = rewards_B, 0.0, dict(metrics)
    controller = given.controllers.kl
    names = ("logprobs", "reference_logprobs")
    if controller is not None or all(name in given.experience for name in names):
        logprobs_N, reference_N = (tokens.read(given.experience, name) for name in names)
        kl_N = kl_penalty(logprobs_N, reference_N, spec.kl_form)
        kl_sum = float(kl_N.sum())
        kl_per_row = kl_sum / max(tokens.num_rows, 1)
        metrics["kl/mean"] = kl_sum / max(tokens.num_unmasked, 1)
        metrics["kl/per_row"] = kl_per_row
        if controller is not None:
            rewards_N -= controller.coefficient * kl_N
            scores_B = rewards_B - controller.coefficient * row_sums(kl_N, tokens.lengths_B())
            metrics["kl/coefficient"] = controller.coefficient
    return TokenRewards(rewards_N, scores_B, kl_per_row, metrics)


def estimate(
    given: EstimatorInput,
    tokens: BatchTokens,
    earned: TokenRewards,
    columns_N: Mapping[str, torch.Tensor],
    metrics: Mapping[str, float],
) -> tuple[Experience, dict[str, float]]:
    """What an estimator of advantages gives; moves the KL controller, if there is one.

    It is called last, so that an error before leaves the controller where it was, and a retry
    moves it once.

    Args:
        given: The estimator's input.
        tokens: Of the batch.
        earned: What advantages were made of; token_rewards are another column.
        columns_N: Floating [N] by name.
        metrics: Besides those of rewards and KL.
    """
    columns_N = {**columns_N, "token_rewards": earned.rewards_N}
    columns = {name: tokens.column(values_N) for name, values_N in columns_N.items()}
    if given.controllers.kl is not None:
        given.controllers.kl.update(earned.kl_per_row, tokens.num_rows)
    return Experience(columns), {**earned.metrics, **metrics}


def advantage_metrics(advantages_N: torch.Tensor, mask_N: torch.Tensor) -> dict[str, float]:
    """Mean and deviation of advantages, floating [N], over the tokens of a mask, bool [N]."""
    mean, std = mean_and_std(advantages_N[mask_N])
    return {"advantages/mean": mean, "advantages/std": std}


def mean_and_std(numbers: torch.Tensor) -> tuple[float, float]:
    """Mean and standard deviation (n - 1) of floating [n]; each is 0 where it is not defined."""
    mean = float(numbers.mean()) if len(numbers) else 0.0
    std = float(numbers.std(correction=1)) if len(numbers) > 1 else 0.0
    return mean, std
