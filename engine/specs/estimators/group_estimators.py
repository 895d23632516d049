"""Estimators that compare a row with the other rows of its prompt.

Rows with equal `prompt_ids` form one group, wherever they stand in the batch. A row without
unmasked tokens takes no part: it is no member of its group, and no mean or deviation counts it.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rolemesh.engine.specs.columns import source_column
from rolemesh.engine.specs.shaped_rewards import ShapedRewardSpec


class GroupEstimatorSpec(ShapedRewardSpec):
    """What estimators share that compare a row with its group.

    A row's score is its reward less the KL penalties of its tokens, and all its unmasked tokens
    have the same advantage.
    """

    def columns(self) -> tuple[str, ...]:
        """Those of rewards, and which rows form a group."""
        return (*super().columns(), "prompt_ids")

    def used_columns(self) -> tuple[str, ...]:
        """Which rows of a prompt are of one trajectory."""
        return ("sample_indexes",)


class GroupAdvantageSpec(GroupEstimatorSpec):
    """What the estimators here share: what becomes of a group that has nothing to teach."""

    zero_variance: Literal["counted", "left_out"] = "counted"
    """Groups whose scores are all equal, groups of one among them: nothing tells their rows apart.
    "counted": their tokens and rows stay in the counts that the loss divides by, and have their
    entropy bonus and their KL in the loss. "left_out": their loss_mask becomes False, so that the
    loss, its divisors and its metrics are those of a batch without them."""

    def makes(self) -> tuple[str, ...]:
        """Advantages; the mask where groups are left out."""
        mask = ("loss_mask",) if self.zero_variance == "left_out" else ()
        return (*super().makes(), *mask)


class GrpoSpec(GroupAdvantageSpec):
    """Group-relative advantages (GRPO, arXiv 2402.03300, section 4.1.2).

        advantage = (score - mean of the group) / (std of the group + 1e-6)

    The paper does not define its standard deviation: this one has n - 1 in the denominator, as in
    verl and TRL. In a group of one there is nothing to compare with: its advantage is 0.
    """

    type: Literal["grpo"] = "grpo"
    normalize_std: bool = True
    """Divide by the group's standard deviation; false only subtracts the mean."""


class DrGrpoSpec(GroupAdvantageSpec):
    """Dr. GRPO (arXiv 2503.20783, section 3.2): score less the mean of the group, no division.

    Its loss divides by a constant instead of lengths: aggregation "seq_sum_norm".
    """

    type: Literal["dr_grpo"] = "dr_grpo"


class RlooSpec(GroupAdvantageSpec):
    """REINFORCE leave-one-out (RLOO, arXiv 2402.14740).

        advantage = score - mean score of the group's other members

    In a group of one there are no others: its advantage is 0 (verl takes the bare score, TRL
    refuses such groups).
    """

    type: Literal["rloo"] = "rloo"


class ReinforcePlusPlusBaselineSpec(GroupAdvantageSpec):
    """REINFORCE++ with baseline (arXiv 2501.03262): less the group's mean, normalised over all.

    Normalised as in `ReinforcePlusPlusSpec`: over all unmasked tokens, so that a long row weighs
    more than a short one. A group of one is its own mean (verl takes 0 for the mean there).
    """

    type: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"


class PassAtKSpec(GroupAdvantageSpec):
    """Pass@k: the best of k completions counts (arXiv 2505.15201 and 2508.10751).

        advantage = k * (mean over sets of k members with the row of their best score
                         - mean over sets of k members without it of their best score)

    With rewards of 0 and 1 the best score says whether one of k is right, and the mean over rows
    of advantage * grad log pi is an unbiased estimate of the gradient of pass@k; with other
    scores, of the expected best of k. The first mean times k / n is the transformed reward of
    2505.15201 (eq. 19), with n members. The second is a baseline that does not know the row: with
    k = 1 all of this is RLOO. The advantages of a group sum to 0, unlike those of eq. 33 there, of
    which none is negative. What 2508.10751 has before it divides by a deviation is this times
    (n - k) / (n k).

    A group of k members or fewer has no set without the row: its advantages are 0.
    """

    type: Literal["pass_at_k"] = "pass_at_k"
    k: int = Field(default=4, ge=2)
    """Completions of which the best one counts: fewer than sampling.samples_per_prompt. For 1 take
    "rloo"."""


class PlainRewardSpec(GroupAdvantageSpec):
    """What estimators share that take rewards as they came: nothing may be taken off before."""

    @model_validator(mode="after")
    def _check_plain(self) -> Self:
        if self.kl_in_reward is not None:
            raise ValueError(
                f"kl_in_reward is given, but {type(self).model_fields['type'].default} takes "
                "rewards as they came: give policy_loss.kl_in_loss in its place"
            )
        if self.overlong is not None:
            raise ValueError(
                f"overlong is given, but {type(self).model_fields['type'].default} takes rewards "
                "as they came: make the length a part of the reward, or a source of its own"
            )
        return self


class MaxRlSpec(PlainRewardSpec):
    """Maximum likelihood RL (MaxRL, arXiv 2602.02710): the weight of a prompt is 1 / its pass rate.

        advantage = (reward - mean of the group) / mean of the group, or 0 where the mean is 0

    With rewards of 0 and 1 and n completions the mean over rows of advantage * grad log pi has the
    expectation of the gradient of sum over k < n of pass@k / k, the first terms of the series of
    log(probability to be right), which is the likelihood that gives the method its name. Rewards
    between are taken, too: then it is the log of the expected reward. None may be negative.
    """

    type: Literal["maxrl"] = "maxrl"


class GdpoSpec(PlainRewardSpec):
    """Several rewards, normalised apart (GDPO, arXiv 2601.05242).

        part = (reward of the source - mean of the group) / (std of the group + 1e-6)
        sum = weight * part + weight * part + ...
        advantage = sum / (std of the sums over the batch + 1e-6)

    The paper also subtracts the mean of the sums over the batch. That is 0, as it is in each group,
    and is left out, since its rounding would make a group of equal rewards teach something. A
    source that does not apply to a row adds nothing to it, and the row is no member of that
    source's group. Deviations have n - 1 in the denominator, and that of the batch is over
    completions (verl whitens over tokens, so that a long one weighs more).
    """

    type: Literal["gdpo"] = "gdpo"
    weights: dict[str, float] = Field(default_factory=dict)
    """Weight of each source, by its name. Left out: those of reward.source."""

    def columns(self) -> tuple[str, ...]:
        """Those of rewards, and the rewards of each source."""
        return (*super().columns(), *(source_column(name) for name in self.weights))
