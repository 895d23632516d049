"""Losses that train policy and values from sampled experience."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rolemesh.engine.specs.base import PartSpec
from rolemesh.engine.specs.estimators import KlForm
from rolemesh.engine.specs.preferences import (
    BradleyTerryLossSpec,
    DpoLossSpec,
    KtoLossSpec,
    SftLossSpec,
)

Aggregation = Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_sum_norm"]


class AggregatedLossSpec(PartSpec):
    """What losses over tokens share: how they become one number."""

    aggregation: Aggregation = "token_mean"
    """How token losses become one number."""
    norm_length: int | None = Field(default=None, ge=1)
    """Constant divisor a row for seq_sum_norm, in tokens (arXiv 2503.20783)."""

    @model_validator(mode="after")
    def _check_norm_length(self) -> Self:
        if (self.aggregation == "seq_sum_norm") != (self.norm_length is not None):
            raise ValueError(
                f"norm_length is {self.norm_length} with aggregation {self.aggregation!r}: "
                "give norm_length with seq_sum_norm, and only then"
            )
        return self


class PpoPolicyLossSpec(AggregatedLossSpec):
    """Clipped policy loss (arXiv 1707.06347, eq. 7), asymmetric and dual clip as options."""

    type: Literal["ppo_policy"] = "ppo_policy"
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """Ratio is clipped above at 1 + clip_high."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bound c of arXiv 1912.09729, eq. 5, for negative advantages; None switches it off."""
    entropy_coefficient: float = Field(default=0.0, ge=0)
    """Weight of an entropy bonus."""
    kl_in_loss: float = Field(default=0.0, ge=0)
    """Weight of a KL term to the reference in the loss."""
    kl_form: KlForm = "k3"
    """Estimator of the KL in the loss."""
    temperature: float = Field(default=1.0, gt=0)
    """Softmax temperature at which log-probs are taken: that of sampling."""

    def columns(self) -> tuple[str, ...]:
        """Log-probs of sampling, advantages and mask; the reference's where a KL is wanted."""
        kl = ("reference_logprobs",) if self.kl_in_loss > 0 else ()
        return ("logprobs", "advantages", "loss_mask", *kl)


class PpoValueLossSpec(AggregatedLossSpec):
    """Clipped squared error of values (PPO as in arXiv 2006.05990, section 3.1)."""

    type: Literal["ppo_value"] = "ppo_value"
    clip: float | None = Field(default=0.2, gt=0)
    """Values may move this far from the old ones; None switches clipping off."""

    def columns(self) -> tuple[str, ...]:
        """Values of the estimate, returns and mask."""
        return ("values", "returns", "loss_mask")


LossSpec = Annotated[
    PpoPolicyLossSpec
    | PpoValueLossSpec
    | SftLossSpec
    | DpoLossSpec
    | KtoLossSpec
    | BradleyTerryLossSpec,
    Field(discriminator="type"),
]
