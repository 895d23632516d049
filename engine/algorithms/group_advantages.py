"""Estimators that compare a row with the other rows of its prompt: GRPO, Dr. GRPO, RLOO.

A row's score is its reward (shaped, if the spec says so) less the KL penalties of its tokens; all
its unmasked tokens get one advantage. Rows without unmasked tokens are members of no group.

Shape letters: B rows, N packed completion tokens.
"""

from __future__ import annotations

import torch

from rolemesh.engine.algorithms.advantages import whiten
from rolemesh.engine.algorithms.estimation import EstimatorInput, estimator_for
from rolemesh.engine.algorithms.groups import Groups, trajectories_of
from rolemesh.engine.algorithms.token_rewards import (
    BatchTokens,
    advantage_metrics,
    estimate,
    shaped_rewards,
    token_rewards,
)
from rolemesh.engine.experience import Experience
from rolemesh.engine.specs import (
    DrGrpoSpec,
    GroupEstimatorSpec,
    GrpoSpec,
    ReinforcePlusPlusBaselineSpec,
    RlooSpec,
)

STD_EPS = 1e-6
"""Added to a group's standard deviation, so that equal scores become zeros and not NaN. verl
takes the same; TRL takes 1e-4."""


@estimator_for(GrpoSpec)
def grpo_advantages(given: EstimatorInput, spec: GrpoSpec) -> tuple[Experience, dict[str, float]]:
    """GRPO (arXiv 2402.03300, section 4.1.2): (score - mean) / (std + 1e-6) within the group.

    Without `normalize_std` only the mean is subtracted. Equal scores, and a group of one, give 0.

    Example: scores (1, 0, 0, 1) have mean 0.5 and standard deviation 0.577: advantages are
    (0.866, -0.866, -0.866, 0.866).
    """
    compared = _Compared(given, spec)
    advantages_B = compared.centred_B
    if spec.normalize_std:
        stds_B = compared.to_rows(compared.groups.stds(compared.trajectory_scores_B))
        advantages_B = advantages_B / (stds_B + STD_EPS)
    return compared.result(advantages_B)


@estimator_for(DrGrpoSpec)
def dr_grpo_advantages(
    given: EstimatorInput, spec: DrGrpoSpec
) -> tuple[Experience, dict[str, float]]:
    """Dr. GRPO (arXiv 2503.20783, section 3.2): score - mean of the group."""
    compared = _Compared(given, spec)
    return compared.result(compared.centred_B)


@estimator_for(RlooSpec)
def rloo_advantages(given: EstimatorInput, spec: RlooSpec) -> tuple[Experience, dict[str, float]]:
    """RLOO (arXiv 2402.14740): score - mean of the other members' scores.

    With n members that is n / (n - 1) * (score - mean of the group). A group of one gives 0.

    Example: scores (1, 0, 0, 1) give (2/3, -2/3, -2/3, 2/3).
    """
    compared = _Compared(given, spec)
    sizes_G = compared.groups.sizes_G
    factors_G = sizes_G / (sizes_G - 1).clamp_min(1).double()
    return compared.result(compared.centred_B * compared.to_rows(factors_G))


@estimator_for(ReinforcePlusPlusBaselineSpec)
def reinforce_plus_plus_baseline_advantages(
    given: EstimatorInput, spec: ReinforcePlusPlusBaselineSpec
) -> tuple[Experience, dict[str, float]]:
    """REINFORCE++ with baseline (arXiv 2501.03262): score - mean of the group, then whitened.

    Whitening is over all unmasked tokens of the batch; see `whiten`.
    """
    compared = _Compared(given, spec)
    return compared.result(compared.centred_B, whitens=True)


class _Compared:
    """Scores of rows beside those of their groups; float64, on the CPU.

    The members of a group are trajectories. Where one has several rows, as an agent's session has
    that went several ways, it counts once, with the mean of its rows' scores; each of its rows is
    then compared with the group by its own score.
    """

    def __init__(self, given: EstimatorInput, spec: GroupEstimatorSpec) -> None:
        self._given = given
        self._tokens = tokens = BatchTokens.of(given.experience)
        rewards_B, metrics = shaped_rewards(given.experience, spec, tokens)
        self._earned = token_rewards(given, spec, tokens, rewards_B, metrics)
        self._rows = rows = Groups.of(given.experience, tokens.takes_part_B)
        scores_B = self._earned.scores_B.cpu()
        leads_B, self.trajectory_scores_B = trajectories_of(given.experience, rows, scores_B)
        self.groups = rows if leads_B is None else Groups.of(given.experience, leads_B)
        """Of trajectories; each stands at its first row."""
        means_G = self.groups.means(self.trajectory_scores_B)
        self.centred_B = scores_B - self.to_rows(means_G)

    def to_rows(self, numbers_G: torch.Tensor) -> torch.Tensor:
        """[B], the number of each row's group; 0 for a row that takes no part."""
        return self._rows.to_rows(numbers_G)

    def result(
        self, advantages_B: torch.Tensor, *, whitens: bool = False
    ) -> tuple[Experience, dict[str, float]]:
        """Columns and metrics; moves the KL controller."""
        tokens = self._tokens
        advantages_N = tokens.to_each_token(advantages_B.to(tokens.mask_N.device))
        metrics = advantage_metrics(advantages_N, tokens) | self._group_metrics()
        if whitens:
            advantages_N = whiten(advantages_N, tokens.mask_N)
        columns_N = {"advantages": advantages_N}
        return estimate(self._given, tokens, self._earned, columns_N, metrics)

    def _group_metrics(self) -> dict[str, float]:
        is_single_G = self.groups.sizes_G < 2
        smallest_G, largest_G = self.groups.extremes(self.trajectory_scores_B)
        stds_G = self.groups.stds(self.trajectory_scores_B)[~is_single_G]
        return {
            "groups/count": float(len(self.groups)),
            "groups/of_one": float(is_single_G.sum()),
            "groups/all_equal": float(((smallest_G == largest_G) & ~is_single_G).sum()),
            "groups/std": float(stds_G.mean()) if len(stds_G) else 0.0,
        }
