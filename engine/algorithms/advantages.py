"""Advantages and returns from rewards and values. No model takes part.

Shape letters: B rows, N packed completion tokens, M those of them that count (loss mask 1).
`values[t]` is the state before completion token t. Tokens with loss mask 0 (tool output, also
in the middle of a row) are skipped: the recursion runs from one unmasked token to the next.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rolemesh.engine.algorithms.kl import KlController, kl_penalty
from rolemesh.engine.algorithms.ragged import (
    completion_values,
    decayed_sums,
    loss_mask_of,
    unmasked_per_row,
)
from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.specs import EstimatorSpec, GaeSpec

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
        gamma: discount a token, 0 to 1.
        lam: trace decay a token, 0 to 1.

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


def estimate_advantages(
    experience: Experience, spec: EstimatorSpec, controller: KlController | None
) -> tuple[Experience, dict[str, float]]:
    """Computes everything that an update needs from rewards, values and log-probs.

    A row's reward falls on its last unmasked token. Where the spec sets `kl_in_reward`, each
    unmasked token loses coefficient * KL(policy || reference), and the controller then moves
    once, with the mean KL per row. A row without unmasked tokens has no place for its reward and
    takes no part; "advantages/rows_without_tokens" counts such rows.

    Args:
        experience: columns rewards (row), values and loss_mask (completion); with
            `kl_in_reward` also logprobs and reference_logprobs. These two, where present, also
            give KL metrics without a penalty.
        spec: the estimator.
        controller: weight of the KL in the reward; None exactly if `kl_in_reward` is None.

    Returns:
        The completion columns advantages, returns and token_rewards (after the penalty), all
        float32 and 0 at masked tokens; and metrics. "kl/mean" is a token's, "kl/per_row" a
        row's; "advantages/mean" and "/std" are taken before whitening; a standard deviation of
        fewer than two numbers, and the explained variance of returns that do not vary, are 0.

    Raises:
        ColumnMissingError: a column is missing; names it.
        ValueError: a number that counts is NaN or infinite (names column and row), or
            controller and spec do not fit.
    """
    if (controller is None) != (spec.kl_in_reward is None):
        have = "no controller" if controller is None else "a controller"
        raise ValueError(
            f"kl_in_reward is {spec.kl_in_reward!r}, but there is {have}: make it with "
            "KlController.from_spec(kl_in_reward)"
        )
    tokens = _Tokens.of(experience)
    token_rewards_N, metrics = _rewards_of_tokens(experience, tokens)
    kl_N = _kl_of_tokens(experience, tokens, spec, required=controller is not None)
    if kl_N is not None:
        kl_sum = float(kl_N.sum())
        metrics["kl/mean"] = kl_sum / max(tokens.num_unmasked, 1)
        metrics["kl/per_row"] = kl_sum / max(tokens.num_rows, 1)
    if controller is not None and kl_N is not None:
        token_rewards_N -= controller.coefficient * kl_N
        metrics["kl/coefficient"] = controller.coefficient

    advantages_N, returns_N, estimator_metrics = _gae_advantages(
        experience, tokens, token_rewards_N, spec
    )
    metrics |= estimator_metrics
    # Last, so that an error above leaves the controller where it was and a retry moves it once.
    if controller is not None:
        controller.update(metrics["kl/per_row"], tokens.num_rows)
    result = {
        "advantages": advantages_N,
        "returns": returns_N,
        "token_rewards": token_rewards_N,
    }
    return Experience({name: tokens.column(values) for name, values in result.items()}), metrics


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Which tokens count, and whose they are."""

    mask_N: torch.Tensor
    offsets: torch.Tensor
    counts: torch.Tensor
    """int64 [B], unmasked tokens of each row."""
    num_unmasked: int
    num_rows: int
    """Rows with at least one unmasked token."""

    @staticmethod
    def of(experience: Experience) -> _Tokens:
        mask_N, offsets = loss_mask_of(experience)
        counts = unmasked_per_row(mask_N, offsets)
        return _Tokens(mask_N, offsets, counts, int(counts.sum()), int((counts > 0).sum()))

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
        return index_M[self.counts[self.counts > 0].cumsum(0) - 1]

    def column(self, values_N: torch.Tensor) -> Column:
        return Column(ColumnKind.COMPLETION, values_N.float(), self.offsets)


def _rewards_of_tokens(
    experience: Experience, tokens: _Tokens
) -> tuple[torch.Tensor, dict[str, float]]:
    """float64 [N] with each row's reward on its last unmasked token."""
    column = experience["rewards"]
    if column.kind is not ColumnKind.ROW:
        raise ValueError(f"column 'rewards' is a {column.kind.value} column: give one value a row")
    rewards = column.values.to(device=tokens.mask_N.device, dtype=torch.float64)
    bad = (~rewards.isfinite()).nonzero().flatten()
    if len(bad):
        row = int(bad[0])
        raise ValueError(
            f"column 'rewards' is {float(rewards[row])} at row {row} ({len(bad)} of "
            f"{len(rewards)} rows are not finite): the reward must give a finite number"
        )
    token_rewards_N = torch.zeros(
        len(tokens.mask_N), dtype=torch.float64, device=tokens.mask_N.device
    )
    token_rewards_N[tokens.last_unmasked()] = rewards[tokens.counts > 0]
    mean, std = _mean_and_std(rewards)
    return token_rewards_N, {
        "reward/mean": mean,
        "reward/std": std,
        "advantages/rows_without_tokens": float(experience.num_rows - tokens.num_rows),
    }


def _kl_of_tokens(
    experience: Experience, tokens: _Tokens, spec: EstimatorSpec, *, required: bool
) -> torch.Tensor | None:
    """float64 [N], 0 at masked tokens; None if it is not required and columns are missing."""
    names = ("logprobs", "reference_logprobs")
    if not required and any(name not in experience for name in names):
        return None
    logprobs_N, reference_logprobs_N = (tokens.read(experience, name) for name in names)
    return kl_penalty(logprobs_N, reference_logprobs_N, spec.kl_form)


def _gae_advantages(
    experience: Experience, tokens: _Tokens, token_rewards_N: torch.Tensor, spec: GaeSpec
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    values_N = tokens.read(experience, "values")
    advantages_N, returns_N = gae(
        token_rewards_N, values_N, tokens.mask_N, tokens.offsets, gamma=spec.gamma, lam=spec.lam
    )
    advantages_M, returns_M = advantages_N[tokens.mask_N], returns_N[tokens.mask_N]
    advantages_mean, advantages_std = _mean_and_std(advantages_M)
    returns_mean, returns_std = _mean_and_std(returns_M)
    # Raw advantages are the residuals returns - values.
    explained = 1 - (advantages_std / returns_std) ** 2 if returns_std > 0 else 0.0
    metrics = {
        "advantages/mean": advantages_mean,
        "advantages/std": advantages_std,
        "returns/mean": returns_mean,
        "returns/std": returns_std,
        "values/mean": float(values_N.sum()) / max(tokens.num_unmasked, 1),
        "values/explained_variance": explained,
    }
    if spec.whiten:
        advantages_N = whiten(advantages_N, tokens.mask_N)
    return advantages_N, returns_N, metrics


def _mean_and_std(numbers: torch.Tensor) -> tuple[float, float]:
    """Mean, 0 of nothing, and standard deviation, 0 of fewer than two numbers."""
    mean = float(numbers.mean()) if len(numbers) else 0.0
    std = float(numbers.std(correction=1)) if len(numbers) > 1 else 0.0
    return mean, std
