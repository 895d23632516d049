"""Policy losses of 2025 and 2026 that replace the clip of ratios by a rule of their own."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from rolemesh.engine.specs.losses.sampled import Aggregation, PolicyTermsSpec


class DppoPolicyLossSpec(PolicyTermsSpec):
    """Divergence PPO (arXiv 2602.04879, eq. 12): masks tokens by a divergence, not by their ratio.

    A token loses its gradient where the update would take it further from the policy that sampled,
    and the two policies already differ by more than a threshold there. They are compared as two
    outcomes, this token or another one (section 4.4).
    """

    type: Literal["dppo"] = "dppo"
    divergence: Literal["tv", "kl"] = "tv"
    """"tv" is |p - q| of the token's probabilities (eq. 13), "kl" KL(q || p) of the two outcomes in
    nats (eq. 14), where q is the probability when sampled."""
    divergence_low: float | None = Field(default=None, gt=0)
    """Threshold where the advantage is negative and the probability has fallen. None: 0.15 for "tv"
    and 0.05 for "kl" (appendix C.1; the larger runs of section 7 take 0.2 for "tv")."""
    divergence_high: float | None = Field(default=None, gt=0)
    """The same where the advantage is positive and the probability has risen."""

    @property
    def thresholds(self) -> tuple[float, float]:
        """The lower and the upper one, with the defaults of the divergence."""
        default = 0.15 if self.divergence == "tv" else 0.05
        low, high = self.divergence_low, self.divergence_high
        return (default if low is None else low, default if high is None else high)

    @model_validator(mode="after")
    def _check_thresholds(self) -> Self:
        largest = max(self.thresholds)
        if self.divergence == "tv" and largest >= 1:
            raise ValueError(
                f"divergence_low and divergence_high are {self.thresholds}, but a divergence 'tv' "
                "is a difference of two probabilities, and never above 1: give numbers below 1"
            )
        return self


class SapoPolicyLossSpec(PolicyTermsSpec):
    """Soft adaptive policy optimisation (arXiv 2511.20347, eq. 5 and 6): a sigmoid for the clip.

    The further a token's ratio is from 1, the less it counts, without a bound at which it stops to
    count. The paper averages over the tokens of a row, then over rows.
    """

    type: Literal["sapo"] = "sapo"
    aggregation: Aggregation = "seq_mean_token_mean"
    """How token losses become one number."""
    gate_positive: float = Field(default=1.0, gt=0)
    """Steepness of the gate (tau) where the advantage is positive: the larger, the sooner a token
    stops to count."""
    gate_negative: float = Field(default=1.05, gt=0)
    """The same where it is not; larger, since pushing one token down raises all others."""


class GmpoPolicyLossSpec(PolicyTermsSpec):
    """Geometric-mean policy optimisation (arXiv 2507.20673, eq. 4): clips tokens, weighs rows.

    A row's ratio is the geometric mean of its tokens' clipped ratios. The paper averages over rows.
    """

    type: Literal["gmpo"] = "gmpo"
    aggregation: Aggregation = "seq_mean_token_mean"
    """How token losses become one number."""
    clip_low: float = Field(default=0.4, gt=0)
    """Log-ratios are clipped below at -clip_low where the advantage is negative (section 3)."""
    clip_high: float = Field(default=0.4, gt=0)
    """Log-ratios are clipped above at clip_high where the advantage is positive."""


class VespoPolicyLossSpec(PolicyTermsSpec):
    """Variational sequence-level soft policy optimisation (arXiv 2602.10693, eq. 20).

    A token's loss is -kernel(w) * advantage * logprob, where w is the ratio of the whole row, not
    divided by its length, and kernel(w) = w^power * exp(decay * (1 - w)) has no gradient of its
    own. It is 1 at w = 1. A mean over all tokens is the paper's mean over rows up to one factor for
    the whole mini-batch.
    """

    corrects_itself: ClassVar[bool] = True
    compares_with_sampler: ClassVar[bool] = True

    type: Literal["vespo"] = "vespo"
    power_positive: float = Field(default=2.0, ge=0)
    """c1 where the advantage is not negative: how fast rows with w < 1 stop to count. From 1 on the
    variance is bounded (proposition 3.1)."""
    decay_positive: float = Field(default=3.0, gt=0)
    """c2 there: how fast rows with w > 1 stop to count."""
    power_negative: float = Field(default=3.0, ge=0)
    """c1 where the advantage is negative."""
    decay_negative: float = Field(default=2.0, gt=0)
    """c2 where the advantage is negative."""


class ToprPolicyLossSpec(PolicyTermsSpec):
    """Tapered off-policy REINFORCE (TOPR, arXiv 2503.14286, eq. 8).

    A row with a positive advantage counts in full, however unlikely it has become. One with a
    negative advantage is weighted by the ratio of the whole row, at most 1: what the policy has
    unlearned is not pushed down any further. The paper's runs divide by the length of a row.
    """

    corrects_itself: ClassVar[bool] = True
    compares_with_sampler: ClassVar[bool] = True

    type: Literal["topr"] = "topr"
    aggregation: Aggregation = "seq_mean_token_mean"
    """How token losses become one number."""


class CovariancePolicyLossSpec(PolicyTermsSpec):
    """What Clip-Cov and KL-Cov share: some tokens, that drive the entropy down, are held back.

    They are told by their covariance, (logprob - mean) * (advantage - mean) (arXiv 2505.22617, eq.
    10), with log-probs when sampled and means over the mini-batch.
    """

    covariance_share: float = Field(default=2e-4, gt=0, le=1)
    """Tokens that are held back, as a share of the mini-batch's; at least one token."""


class ClipCovPolicyLossSpec(CovariancePolicyLossSpec):
    """Clip-Cov (arXiv 2505.22617, eq. 11 and 12): PPO, but some tokens lose their gradient.

    They are drawn from those whose covariance lies in a range far above the mean.
    """

    type: Literal["clip_cov"] = "clip_cov"
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """Ratio is clipped above at 1 + clip_high."""
    covariance_low: float = 1.0
    """Covariances from here on are drawn from (section 4.3)."""
    covariance_high: float = 5.0
    """The largest covariance that is drawn from."""

    @model_validator(mode="after")
    def _check_range(self) -> Self:
        if self.covariance_low >= self.covariance_high:
            raise ValueError(
                f"covariance_low is {self.covariance_low} and covariance_high is "
                f"{self.covariance_high}: no token lies between; give a smaller covariance_low"
            )
        return self


class KlCovPolicyLossSpec(CovariancePolicyLossSpec):
    """KL-Cov (arXiv 2505.22617, eq. 13 and 14): plain ratios, and a penalty on some tokens.

    Those with the highest covariance are held near the policy that sampled. No ratio is clipped.
    The paper takes a covariance_share of 2e-3 for a model of 7 billion parameters, and of 2e-4 for
    one of 32 (section 4.3).
    """

    type: Literal["kl_cov"] = "kl_cov"
    penalty_coefficient: float = Field(default=1.0, gt=0)
    """Weight of the penalty |logprob - logprob when sampled| of such a token."""
