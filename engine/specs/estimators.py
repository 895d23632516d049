"""Estimators: what makes advantages, or pairs, from rewards, and the KL in the reward.

Rows with equal `prompt_ids` form one group, wherever they stand in the batch. A row without
unmasked tokens takes no part: it is no member of its group, and no mean or deviation counts it.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rolemesh.engine.specs.base import EstimatorPartSpec, Spec
from rolemesh.engine.specs.columns import PAIR_COLUMNS, TEACHER_LOGPROBS
from rolemesh.engine.specs.own_functions import OwnFunctionSpec
from rolemesh.engine.specs.preferences import KtoPointSpec


class FixedKlSpec(Spec):
    """A constant KL coefficient."""

    type: Literal["fixed"] = "fixed"
    coefficient: float = Field(default=0.05, ge=0)
    """Weight of the KL in the reward."""


class AdaptiveKlSpec(Spec):
    """The proportional controller of Ziegler et al. (arXiv 1909.08593, section 2.2)."""

    type: Literal["adaptive"] = "adaptive"
    coefficient: float = Field(default=0.05, gt=0)
    """Weight of the KL in the reward at the start."""
    target: float = Field(default=6.0, gt=0)
    """KL per trajectory to hold, in nats."""
    horizon: int = Field(default=10_000, ge=1)
    """Trajectories over which the coefficient may change by a fifth."""


KlControllerSpec = Annotated[FixedKlSpec | AdaptiveKlSpec, Field(discriminator="type")]
KlForm = Literal["k1", "k2", "k3"]


class KlPenaltySpec(EstimatorPartSpec):
    """What estimators of advantages share: a KL to the reference that may be part of the reward."""

    kl_in_reward: KlControllerSpec | None = None
    """Penalise the reward of each token by coefficient * KL; None leaves rewards alone."""
    kl_form: KlForm = "k1"
    """Estimator of the KL in the reward."""

    def columns(self) -> tuple[str, ...]:
        """Rewards and mask; both log-probs where KL is part of the reward."""
        kl = () if self.kl_in_reward is None else ("logprobs", "reference_logprobs")
        return ("rewards", "loss_mask", *kl)

    def optional_columns(self) -> tuple[str, ...]:
        """Both log-probs: KL is reported wherever they are there."""
        return ("logprobs", "reference_logprobs")

    def makes(self) -> tuple[str, ...]:
        """Columns that it gives."""
        return ("advantages", "token_rewards")


class ReverseKlSpec(EstimatorPartSpec):
    """The teacher as a dense reward: minus the KL of each token to it (on-policy distillation).

        A[t] = d[t] + gamma * A[t + 1],  d[t] = coefficient * (teacher logprob - sampler logprob)

    whose mean over what the policy samples is -coefficient * KL(policy || teacher). With gamma 0
    each token answers for itself alone, as in "On-Policy Distillation" (K. Lu and Thinking Machines
    Lab, 2025); with gamma 1 for all that follows it as well, which is the whole gradient of the
    sequence's KL (MiniLLM, arXiv 2306.08543, eq. 2).
    """

    type: Literal["reverse_kl"] = "reverse_kl"
    coefficient: float = Field(default=1.0, gt=0)
    """Weight of the KL."""
    gamma: float = Field(default=0.0, ge=0, le=1)
    """Factor by which what follows counts for a token."""

    def columns(self) -> tuple[str, ...]:
        """Log-probs of sampler and teacher, and the mask."""
        return ("logprobs", TEACHER_LOGPROBS, "loss_mask")

    def optional_columns(self) -> tuple[str, ...]:
        """Rewards are reported where there are any; they train nothing."""
        return ("rewards",)

    def makes(self) -> tuple[str, ...]:
        """Advantages."""
        return ("advantages",)


class CriticEstimatorSpec(KlPenaltySpec):
    """What estimators with a critic share: generalised advantage estimation."""

    gamma: float = Field(default=1.0, ge=0, le=1)
    """Factor by which a reward counts less for each token before it; 1 discounts nothing."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """Lambda of GAE: 0 trusts the critic alone, 1 the rewards alone."""
    whiten: bool = True
    """Shift and scale advantages to mean 0 and variance 1 over all unmasked tokens."""

    def columns(self) -> tuple[str, ...]:
        """Those of rewards, and values."""
        return (*super().columns(), "values")

    def makes(self) -> tuple[str, ...]:
        """Advantages, and returns for the critic."""
        return (*super().makes(), "returns")


class GaeSpec(CriticEstimatorSpec):
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16) over completion tokens."""

    type: Literal["gae"] = "gae"


class SafeRlhfSpec(CriticEstimatorSpec):
    """Safe RLHF (arXiv 2310.12773, eq. 30 and 31): rewards under a limit on the mean cost.

    With the Lagrange multiplier lambda, a row earns

        (reward - lambda * cost) / (1 + lambda)

    and after each call ln lambda grows by multiplier_rate * lambda * (mean cost - cost_limit).
    The paper trains one critic for rewards and one for costs; advantages are linear in both, so
    here one critic learns the combination. `kl_in_reward` weighs the KL of that combination: its
    coefficient is the paper's beta / 2.
    """

    type: Literal["safe_rlhf"] = "safe_rlhf"
    whiten: bool = False
    """Shift and scale advantages to mean 0 and variance 1. Off, unlike in PPO: whitened, they are
    as large near the limit as far from it, and the cost swings around the limit."""
    cost_limit: float = 0.0
    """Mean cost a row to hold; the paper's -d."""
    initial_multiplier: float = Field(default=1.0, gt=0)
    """Lambda, the weight of the cost, at the start."""
    multiplier_rate: float = Field(default=0.1, gt=0)
    """Learning rate of ln lambda."""
    max_multiplier: float = Field(default=5.0, gt=0)
    """lambda grows no further: its growth feeds on itself, and a limit that cannot be kept would
    let it run away within a few steps."""

    @model_validator(mode="after")
    def _check_multiplier(self) -> Self:
        if self.initial_multiplier > self.max_multiplier:
            raise ValueError(
                f"initial_multiplier is {self.initial_multiplier} and max_multiplier is "
                f"{self.max_multiplier}: begin at or below the largest one"
            )
        return self

    def columns(self) -> tuple[str, ...]:
        """Those of GAE, and costs."""
        return (*super().columns(), "costs")


class OverlongSpec(Spec):
    """Soft punishment of long completions (DAPO, arXiv 2503.14476, eq. 13).

    With L completion tokens (those between the policy's own, e.g. of tools, count too), a row's
    reward changes by penalty times

        0                                   for L <= max_length - buffer
        (max_length - buffer - L) / buffer  up to max_length
        -1                                  beyond
    """

    max_length: int = Field(ge=1)
    """Completion tokens from which on the punishment is whole."""
    buffer: int = Field(ge=1)
    """Tokens before max_length over which it grows."""
    penalty: float = Field(default=1.0, gt=0)
    """The whole punishment, on the scale of rewards; 1 in the paper, whose rewards are 1 and -1."""

    @model_validator(mode="after")
    def _check_buffer(self) -> Self:
        if self.buffer > self.max_length:
            raise ValueError(
                f"buffer is {self.buffer} and max_length is {self.max_length}: "
                "the buffer is the last part of max_length"
            )
        return self


class ShapedRewardSpec(KlPenaltySpec):
    """What estimators without a critic share: a punishment of long completions."""

    overlong: OverlongSpec | None = None
    """Punish long completions before anything else; None leaves rewards alone."""


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


class GrpoSpec(GroupEstimatorSpec):
    """Group-relative advantages (GRPO, arXiv 2402.03300, section 4.1.2).

        advantage = (score - mean of the group) / (std of the group + 1e-6)

    The paper does not define its standard deviation: this one has n - 1 in the denominator, as in
    verl and TRL. In a group of one there is nothing to compare with: its advantage is 0.
    """

    type: Literal["grpo"] = "grpo"
    normalize_std: bool = True
    """Divide by the group's standard deviation; false only subtracts the mean."""


class DrGrpoSpec(GroupEstimatorSpec):
    """Dr. GRPO (arXiv 2503.20783, section 3.2): score less the mean of the group, no division.

    Its loss divides by a constant instead of lengths: aggregation "seq_sum_norm".
    """

    type: Literal["dr_grpo"] = "dr_grpo"


class RlooSpec(GroupEstimatorSpec):
    """REINFORCE leave-one-out (RLOO, arXiv 2402.14740).

        advantage = score - mean score of the group's other members

    In a group of one there are no others: its advantage is 0 (verl takes the bare score, TRL
    refuses such groups).
    """

    type: Literal["rloo"] = "rloo"


class RemaxSpec(KlPenaltySpec):
    """ReMax (arXiv 2310.10505, algorithm 1): the reward of the greedy completion is the baseline.

        advantage[t] = rewards of token t and later ones, after the KL penalty, - greedy reward

    The baseline is a second experience with one greedy row for each prompt of the batch.
    """

    type: Literal["remax"] = "remax"

    def columns(self) -> tuple[str, ...]:
        """Those of rewards, and which prompt a row is of."""
        return (*super().columns(), "prompt_ids")

    def baseline_columns(self) -> tuple[str, ...]:
        """Rewards of the greedy rows, and their prompts."""
        return ("rewards", "prompt_ids")


class ReinforcePlusPlusSpec(ShapedRewardSpec):
    """REINFORCE++ (arXiv 2501.03262): returns of tokens, normalised over the batch.

        advantage[t] = token reward[t] + gamma * advantage[t + 1]

    then shifted and scaled to mean 0 and variance 1 over all unmasked tokens of the batch. The
    token reward is that after the KL penalty, for which the paper takes k1.
    """

    type: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Factor by which a reward counts less for each token before it; 1 discounts nothing."""


class ReinforcePlusPlusBaselineSpec(GroupEstimatorSpec):
    """REINFORCE++ with baseline (arXiv 2501.03262): less the group's mean, normalised over all.

    Normalised as in `ReinforcePlusPlusSpec`: over all unmasked tokens, so that a long row weighs
    more than a short one. A group of one is its own mean (verl takes 0 for the mean there).
    """

    type: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"


class PythonEstimatorSpec(OwnFunctionSpec, GroupEstimatorSpec):
    """An estimator of your own: a function that gives the advantages of a batch.

    The punishment of long completions and the KL in the reward are taken off before it.
    """

    type: Literal["python"] = "python"
    reads: tuple[str, ...] = ()
    """Further columns that the function reads, e.g. values, costs, completion_text."""
    makes_returns: bool = False
    """Whether it also gives returns, which a critic learns."""

    def columns(self) -> tuple[str, ...]:
        """Those of an estimator that compares rows, and those that it names."""
        return (*super().columns(), *self.reads)

    def makes(self) -> tuple[str, ...]:
        """Advantages; returns if it says so."""
        return (*super().makes(), *(("returns",) if self.makes_returns else ()))


class OnlineDpoSpec(EstimatorPartSpec):
    """Pairs from sampled completions (online DPO, arXiv 2402.04792, algorithm 1).

    The best and the worst row of a group by reward make a pair; of equals the first in the batch.
    A group whose rewards are all equal makes none. The paper samples two completions a prompt and
    asks a judge; here rewards judge, of any number.
    """

    type: Literal["online_dpo"] = "online_dpo"

    def columns(self) -> tuple[str, ...]:
        """Rewards, mask, and which rows form a group."""
        return ("rewards", "loss_mask", "prompt_ids")

    def makes(self) -> tuple[str, ...]:
        """pair_ids (int64 row, -1: none) and preference (float32 row, 1, -1, or 0: neither)."""
        return PAIR_COLUMNS


EstimatorSpec = Annotated[
    GaeSpec
    | SafeRlhfSpec
    | GrpoSpec
    | DrGrpoSpec
    | RlooSpec
    | RemaxSpec
    | ReinforcePlusPlusSpec
    | ReinforcePlusPlusBaselineSpec
    | PythonEstimatorSpec
    | OnlineDpoSpec
    | ReverseKlSpec
    | KtoPointSpec,
    Field(discriminator="type"),
]
