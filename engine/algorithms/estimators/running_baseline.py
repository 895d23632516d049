"""REINFORCE whose baseline is the mean score of the steps before.

Shape letters: B rows, N packed completion tokens.
"""

from __future__ import annotations

from rolemesh.engine.algorithms.estimators.estimation import EstimatorInput, estimator_for
from rolemesh.engine.algorithms.estimators.token_rewards import (
    BatchTokens,
    advantage_metrics,
    estimate,
    mean_and_std,
    shaped_rewards,
    token_rewards,
)
from rolemesh.engine.experience import Experience
from rolemesh.engine.specs import RunningBaselineSpec


@estimator_for(RunningBaselineSpec)
def running_baseline_advantages(
    given: EstimatorInput, spec: RunningBaselineSpec
) -> tuple[Experience, dict[str, float]]:
    """REINFORCE (Williams 1992): score - mean score of the steps before; see the spec.

    A row without unmasked tokens moves nothing.

    Example: decay 0.9; a first batch scores (1, 0, 0), and its advantages are (1, -0.5, -0.5). A
    second batch that scores (1, 1, 0) has (2/3, 2/3, -1/3), and leaves 0.9 / 3 + 0.1 * 2/3 = 0.367.
    """
    baseline = given.controllers.baseline
    assert baseline is not None  # Controllers.check_fit refuses a spec without its own
    tokens = BatchTokens.of(given.experience)
    rewards_B, metrics = shaped_rewards(given.experience, spec, tokens)
    earned = token_rewards(given, spec, tokens, rewards_B, metrics)
    mean, _ = mean_and_std(earned.scores_B[tokens.takes_part_B])
    compared_with, factor = baseline.value, 1.0
    if compared_with is None:
        # n / (n - 1) * (score - mean) is the score less the mean of the others.
        compared_with, factor = mean, tokens.num_rows / max(tokens.num_rows - 1, 1)
    advantages_N = tokens.to_each_token(factor * (earned.scores_B - compared_with))
    metrics = advantage_metrics(advantages_N, tokens.mask_N)
    metrics["reward/baseline_mean"] = compared_with
    result = estimate(given, tokens, earned, {"advantages": advantages_N}, metrics)
    if tokens.num_rows:
        baseline.update(mean)
    return result
