"""Estimators that compare a row with the other rows of its prompt, by one score a row.

A row's score is its reward (shaped, if the spec says so) less the KL penalties of its tokens; all
its unmasked tokens get one advantage. Rows without unmasked tokens are members of no group.

Shape letters: B rows, N packed completion tokens, G groups.
"""

from __future__ import annotations

import torch

from rolemesh.engine.algorithms.estimators.advantages import whiten
from rolemesh.engine.algorithms.estimators.estimation import EstimatorInput, estimator_for
from rolemesh.engine.algorithms.estimators.pass_at_k import pass_at_k_advantages
from rolemesh.engine.algorithms.estimators.token_rewards import (
    BatchTokens,
    advantage_metrics,
    estimate,
    shaped_rewards,
    token_rewards,
)
from rolemesh.engine.algorithms.groups import ComparedScores, Groups
from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.specs import (
    DrGrpoSpec,
    GroupAdvantageSpec,
    GrpoSpec,
    MaxRlSpec,
    PassAtKSpec,
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
    batch = ComparedBatch(given, spec)
    compared = batch.compared
    if not spec.normalize_std:
        return batch.result(compared.centred_B)
    return batch.result(compared.centred_B / (compared.rows.to_rows(compared.stds_G) + STD_EPS))


@estimator_for(DrGrpoSpec)
def dr_grpo_advantages(
    given: EstimatorInput, spec: DrGrpoSpec
) -> tuple[Experience, dict[str, float]]:
    """Dr. GRPO (arXiv 2503.20783, section 3.2): score - mean of the group."""
    batch = ComparedBatch(given, spec)
    return batch.result(batch.compared.centred_B)


@estimator_for(RlooSpec)
def rloo_advantages(given: EstimatorInput, spec: RlooSpec) -> tuple[Experience, dict[str, float]]:
    """RLOO (arXiv 2402.14740): score - mean of the other members' scores.

    With n members that is n / (n - 1) * (score - mean of the group). A group of one gives 0.

    Example: scores (1, 0, 0, 1) give (2/3, -2/3, -2/3, 2/3).
    """
    batch = ComparedBatch(given, spec)
    compared = batch.compared
    sizes_G = compared.groups.sizes_G
    factors_G = sizes_G / (sizes_G - 1).clamp_min(1).double()
    return batch.result(compared.centred_B * compared.rows.to_rows(factors_G))


@estimator_for(PassAtKSpec)
def best_of_k_advantages(
    given: EstimatorInput, spec: PassAtKSpec
) -> tuple[Experience, dict[str, float]]:
    """Pass@k (arXiv 2505.15201, eq. 19, with a leave-one-out baseline); see `PassAtKSpec`.

    Example: k = 2 and scores (1, 0, 0, 0) give (2, -2/3, -2/3, -2/3): with the first row every
    pair has a right one, without it none. For another row two of three pairs are wrong with it,
    and two of three pairs are right without it.

    Raises:
        ValueError: No group has more than k rows, those without unmasked tokens among them.
    """
    batch = ComparedBatch(given, spec)
    sizes_G = Groups.of(given.experience).sizes_G
    if len(sizes_G) and int(sizes_G.max()) <= spec.k:
        raise ValueError(
            f"k is {spec.k}, but the largest group has {int(sizes_G.max())} completions: pass@k "
            "needs more than k; raise sampling.samples_per_prompt, or lower advantages.k"
        )
    advantages_B, is_too_small_G = pass_at_k_advantages(batch.compared, spec.k)
    metrics = {"groups/too_small": float(is_too_small_G.sum())}
    return batch.result(advantages_B, metrics=metrics)


@estimator_for(MaxRlSpec)
def maxrl_advantages(given: EstimatorInput, spec: MaxRlSpec) -> tuple[Experience, dict[str, float]]:
    """MaxRL (arXiv 2602.02710): (reward - mean) / mean of the group; 0 where the mean is 0.

    Example: rewards (1, 0, 0, 0) give (3, -1, -1, -1); rewards (1, 1, 1, 0) give (1/3, 1/3, 1/3,
    -1).

    Raises:
        ValueError: A reward is negative.
    """
    batch = ComparedBatch(given, spec)
    compared = batch.compared
    is_bad_B = (compared.scores_B < 0) & compared.rows.is_member_B
    if bool(is_bad_B.any()):
        row = int(is_bad_B.nonzero()[0])
        raise ValueError(
            f"column 'rewards' is {float(compared.scores_B[row])} at row {row} "
            f"({int(is_bad_B.sum())} rows are negative): maxrl divides by the mean reward of a "
            "group; give rewards of 0 and above, e.g. 1 for right and 0 for wrong"
        )
    means_B = compared.rows.to_rows(compared.groups.means(compared.trajectory_scores_B))
    # Where the mean is 0, all rewards are 0.
    return batch.result(compared.centred_B / means_B.masked_fill(means_B == 0, 1))


@estimator_for(ReinforcePlusPlusBaselineSpec)
def reinforce_plus_plus_baseline_advantages(
    given: EstimatorInput, spec: ReinforcePlusPlusBaselineSpec
) -> tuple[Experience, dict[str, float]]:
    """REINFORCE++ with baseline (arXiv 2501.03262): score - mean of the group, then whitened.

    Whitening is over all unmasked tokens of the batch; see `whiten`.
    """
    batch = ComparedBatch(given, spec)
    return batch.result(batch.compared.centred_B, whitens=True)


class ComparedBatch:
    """A batch whose rows are compared within groups: what an estimator works with.

    Example: `batch = ComparedBatch(given, spec)`, advantages of `batch.compared`, and
    `return batch.result(advantages_B)`.
    """

    def __init__(self, given: EstimatorInput, spec: GroupAdvantageSpec) -> None:
        self._given, self._spec = given, spec
        self._tokens = tokens = BatchTokens.of(given.experience)
        rewards_B, metrics = shaped_rewards(given.experience, spec, tokens)
        self._earned = token_rewards(given, spec, tokens, rewards_B, metrics)
        self.compared = ComparedScores.of(
            given.experience, tokens.takes_part_B, self._earned.scores_B
        )
        """Scores of rows beside those of their groups."""

    def counts_B(self, differs_B: torch.Tensor) -> torch.Tensor:
        """The rows that count in the loss, bool [B], by the spec's choice of zero_variance.

        Args:
            differs_B: bool [B]; a group has something to teach where it is True for a row.
        """
        rows = self.compared.rows
        if self._spec.zero_variance == "counted":
            return rows.is_member_B
        return rows.to_rows(rows.any_of(differs_B))

    def result(
        self,
        advantages_B: torch.Tensor,
        *,
        whitens: bool = False,
        divisor: float = 1.0,
        differs_B: torch.Tensor | None = None,
        metrics: dict[str, float] | None = None,
    ) -> tuple[Experience, dict[str, float]]:
        """Columns and metrics; moves the KL controller.

        Args:
            advantages_B: float64 [B], on the CPU.
            whitens: Shift and scale them over all tokens that stay.
            divisor: Of all of them, after the metrics of advantages were taken.
            differs_B: bool [B]; a group has something to teach where it is True for a row. None:
                where its scores are not all equal.
            metrics: Further ones.
        """
        tokens, compared = self._tokens, self.compared
        differs_B = compared.differs_B if differs_B is None else differs_B
        differs_G = compared.rows.any_of(differs_B)
        found = _group_metrics(compared, differs_G) | (metrics or {})
        mask_N = tokens.to_each_token(self.counts_B(differs_B).to(tokens.mask_N.device))
        advantages_N = tokens.to_each_token(advantages_B.to(mask_N.device))
        found |= advantage_metrics(advantages_N, mask_N)
        advantages_N = whiten(advantages_N, mask_N) if whitens else advantages_N / divisor
        estimated, found = estimate(
            self._given, tokens, self._earned, {"advantages": advantages_N}, found
        )
        if self._spec.zero_variance == "left_out":
            mask = Column(ColumnKind.COMPLETION, mask_N, tokens.offsets)
            estimated = estimated | Experience({"loss_mask": mask})
            found["groups/left_out"] = float((~differs_G).sum())
        return estimated, found


def _group_metrics(compared: ComparedScores, differs_G: torch.Tensor) -> dict[str, float]:
    is_single_G = compared.groups.sizes_G < 2
    stds_G = compared.stds_G[~is_single_G]
    return {
        "groups/count": float(len(compared.groups)),
        "groups/of_one": float(is_single_G.sum()),
        "groups/all_equal": float((~differs_G & ~is_single_G).sum()),
        "groups/std": float(stds_G.mean()) if len(stds_G) else 0.0,
    }
