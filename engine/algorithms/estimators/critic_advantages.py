"""Estimators with a critic: GAE, and Safe RLHF, which is GAE on rewards less weighted costs."""

from __future__ import annotations

import torch

from rolemesh.engine.algorithms.estimators.advantages import gae, whiten
from rolemesh.engine.algorithms.estimators.estimation import EstimatorInput, estimator_for
from rolemesh.engine.algorithms.estimators.token_rewards import (
    BatchTokens,
    advantage_metrics,
    estimate,
    mean_and_std,
    read_rows,
    reward_metrics,
    token_rewards,
)
from rolemesh.engine.experience import Experience
from rolemesh.engine.kernels.choice import device_of_columns
from rolemesh.engine.specs import CriticEstimatorSpec, GaeSpec, SafeRlhfSpec


@estimator_for(GaeSpec)
def gae_advantages(given: EstimatorInput, spec: GaeSpec) -> tuple[Experience, dict[str, float]]:
    """GAE (arXiv 1506.02438, eq. 16) on rewards after the KL penalty; see `gae`."""
    tokens = BatchTokens.of(given.experience)
    rewards_B = read_rows(given.experience, "rewards", tokens)
    return _with_critic(given, spec, tokens, rewards_B, reward_metrics(rewards_B, tokens))


@estimator_for(SafeRlhfSpec)
def safe_rlhf_advantages(
    given: EstimatorInput, spec: SafeRlhfSpec
) -> tuple[Experience, dict[str, float]]:
    """Safe RLHF (arXiv 2310.12773, eq. 30): GAE on (reward - lambda cost) / (1 + lambda).

    lambda is that of before, and then moves once by the mean cost of the rows that take part
    (eq. 31); a batch without any leaves it where it is. One critic learns the returns of the
    combination, where the paper has one for rewards and one for costs.

    "cost/mean" and "/std" are taken over the rows that take part.
    """
    multiplier = given.controllers.multiplier
    assert multiplier is not None  # estimate_advantages refuses controllers that do not fit
    tokens = BatchTokens.of(given.experience)
    rewards_B = read_rows(given.experience, "rewards", tokens)
    costs_B = read_rows(given.experience, "costs", tokens)
    weight = multiplier.value
    mean_cost, cost_std = mean_and_std(costs_B[tokens.takes_part_B])
    metrics = {
        **reward_metrics(rewards_B, tokens),
        "cost/mean": mean_cost,
        "cost/std": cost_std,
        "cost/multiplier": weight,
    }
    combined_B = (rewards_B - weight * costs_B) / (1 + weight)
    estimated = _with_critic(given, spec, tokens, combined_B, metrics)
    if tokens.num_rows:
        multiplier.update(mean_cost)
    return estimated


def _with_critic(
    given: EstimatorInput,
    spec: CriticEstimatorSpec,
    tokens: BatchTokens,
    rewards_B: torch.Tensor,
    metrics: dict[str, float],
) -> tuple[Experience, dict[str, float]]:
    earned = token_rewards(given, spec, tokens, rewards_B, metrics)
    values_N = tokens.read(given.experience, "values")
    device = device_of_columns()
    estimated = gae(
        earned.rewards_N.to(device),
        values_N.to(device),
        tokens.mask_N.to(device),
        tokens.offsets,
        gamma=spec.gamma,
        lam=spec.lam,
    )
    advantages_N, returns_N = (column_N.to(values_N.device) for column_N in estimated)
    of_advantages = advantage_metrics(advantages_N, tokens.mask_N)
    returns_mean, returns_std = mean_and_std(returns_N[tokens.mask_N])
    # Raw advantages are the residuals returns - values.
    residual = of_advantages["advantages/std"]
    explained = 1 - (residual / returns_std) ** 2 if returns_std > 0 else 0.0
    if spec.whiten:
        advantages_N = whiten(advantages_N, tokens.mask_N)
    of_critic = {
        "returns/mean": returns_mean,
        "returns/std": returns_std,
        "values/mean": float(values_N.sum()) / max(tokens.num_unmasked, 1),
        "values/explained_variance": explained,
    }
    columns_N = {"advantages": advantages_N, "returns": returns_N}
    return estimate(given, tokens, earned, columns_N, of_advantages | of_critic)
