"""Advantage estimators and the KL that they may put into the reward."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rolemesh.engine.specs.base import PartSpec, Spec


class FixedKlSpec(Spec):
    """A constant KL coefficient."""

    type: Literal["fixed"] = "fixed"
    coefficient: float = Field(default=0.05, ge=0)
    """Weight of the KL term."""


class AdaptiveKlSpec(Spec):
    """The proportional controller of Ziegler et al. (arXiv 1909.08593, section 2.2)."""

    type: Literal["adaptive"] = "adaptive"
    coefficient: float = Field(default=0.05, gt=0)
    """Weight of the KL term at the start."""
    target: float = Field(default=6.0, gt=0)
    """KL per trajectory to hold, in nats."""
    horizon: int = Field(default=10_000, ge=1)
    """Trajectories over which the coefficient may change by a fifth."""


KlControllerSpec = Annotated[FixedKlSpec | AdaptiveKlSpec, Field(discriminator="type")]
KlForm = Literal["k1", "k2", "k3"]


class KlPenaltySpec(PartSpec):
    """What estimators share: a KL to the reference that may be part of the reward."""

    kl_in_reward: KlControllerSpec | None = None
    """Penalise the reward of each token by coefficient * KL; None leaves rewards alone."""
    kl_form: KlForm = "k1"
    """Estimator of the KL in the reward."""

    def columns(self) -> tuple[str, ...]:
        """Rewards and mask; both log-probs where KL is part of the reward."""
        kl = () if self.kl_in_reward is None else ("logprobs", "reference_logprobs")
        return ("rewards", "loss_mask", *kl)

    def makes(self) -> tuple[str, ...]:
        """Columns that it gives."""
        return ("advantages", "token_rewards")


class GaeSpec(KlPenaltySpec):
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16) over completion tokens."""

    type: Literal["gae"] = "gae"
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount a token."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """Trace decay a token."""
    whiten: bool = True
    """Shift and scale advantages to mean 0 and variance 1 over all unmasked tokens."""

    def columns(self) -> tuple[str, ...]:
        """Those of rewards, and values."""
        return (*super().columns(), "values")

    def makes(self) -> tuple[str, ...]:
        """Advantages, and returns for the critic."""
        return (*super().makes(), "returns")


EstimatorSpec = GaeSpec
