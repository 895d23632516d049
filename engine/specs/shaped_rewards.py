"""What estimators of advantages share: a KL in the reward, and a punishment of long rows."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rolemesh.engine.specs.base import EstimatorPartSpec, Spec


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
