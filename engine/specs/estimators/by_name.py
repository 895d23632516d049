"""Estimators: what makes advantages, or pairs, from rewards.

Those that compare a row with its group stand in `specs.group_estimators`.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rolemesh.engine.specs.base import EstimatorPartSpec
from rolemesh.engine.specs.columns import PAIR_COLUMNS, teacher_voices, weights_column
from rolemesh.engine.specs.estimators.group_estimators import (
    DrGrpoSpec,
    GdpoSpec,
    GroupEstimatorSpec,
    GrpoSpec,
    MaxRlSpec,
    PassAtKSpec,
    ReinforcePlusPlusBaselineSpec,
    RlooSpec,
)
from rolemesh.engine.specs.losses.preferences import KtoPointSpec
from rolemesh.engine.specs.own_functions import OwnFunctionSpec
from rolemesh.engine.specs.scores.teacher_routes import TeacherRouteSpec
from rolemesh.engine.specs.shaped_rewards import KlPenaltySpec, ShapedRewardSpec


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
    route: TeacherRouteSpec | None = None
    """Which of several teachers score a row. A run says it of its section teacher; leave it out of
    a recipe. Where several do, the teacher's log-prob is the mean of theirs by weight, so that the
    advantage is the mean of those of each."""

    def columns(self) -> tuple[str, ...]:
        """Log-probs of sampler and teachers, the mask, and what says who scores a row."""
        voices = teacher_voices(1 if self.route is None else self.route.most_teachers)
        weights = [weights_column(one) for one in voices] if len(voices) > 1 else ()
        by = ("metadata",) if self.route is not None and self.route.field else ()
        return ("logprobs", *voices, *weights, "loss_mask", *by)

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


class RunningBaselineSpec(ShapedRewardSpec):
    """REINFORCE with the mean score of the steps before as the baseline (Williams 1992).

        advantage = score - baseline
        baseline = decay * baseline + (1 - decay) * mean score of the batch, after the step

    The baseline does not know the batch, so the estimate is unbiased. The first batch has none
    before it: each of its rows is compared with the mean score of the others, and its mean is the
    first baseline. It needs no groups: one completion a prompt will do.
    """

    type: Literal["running_baseline"] = "running_baseline"
    decay: float = Field(default=0.9, ge=0, lt=1)
    """Share of the baseline that a step leaves; 0.9 averages over about ten steps."""


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
    | PassAtKSpec
    | MaxRlSpec
    | GdpoSpec
    | RemaxSpec
    | RunningBaselineSpec
    | ReinforcePlusPlusSpec
    | ReinforcePlusPlusBaselineSpec
    | PythonEstimatorSpec
    | OnlineDpoSpec
    | ReverseKlSpec
    | KtoPointSpec,
    Field(discriminator="type"),
]
