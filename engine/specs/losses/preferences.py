"""Losses on data that is given: demonstrations, pairs of completions, judged completions."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rolemesh.engine.specs.base import EstimatorPartSpec, PartSpec
from rolemesh.engine.specs.columns import PAIR_COLUMNS, PROXIMAL_LOGPROBS


class SftLossSpec(PartSpec):
    """Negative log-likelihood of given completions."""

    type: Literal["sft"] = "sft"
    aggregation: Literal["token_mean", "seq_mean_token_mean"] = "token_mean"
    """Mean over tokens, or over rows of their means over tokens."""

    def columns(self) -> tuple[str, ...]:
        """The mask: the tokens are given."""
        return ("loss_mask",)


class DpoLossSpec(PartSpec):
    """Direct preference optimisation on pairs (arXiv 2305.18290, eq. 7), and its relatives."""

    type: Literal["dpo"] = "dpo"
    beta: float = Field(default=0.1, gt=0)
    """Weight of the KL to the reference that the implied reward has; tau of IPO."""
    variant: Literal["sigmoid", "ipo"] = "sigmoid"
    """Logistic loss of the margin, or its squared distance from 1 / (2 beta)
    (IPO, arXiv 2310.12036, eq. 17)."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Assumed share of pairs that are the wrong way round (cDPO); with "sigmoid" only."""
    log_ratio: Literal["sum", "mean"] = "sum"
    """Log-ratio of a completion: the sum over its tokens, which both papers have, or their mean,
    which does not grow with length. TRL sums for the one variant and averages for the other."""

    @model_validator(mode="after")
    def _check_smoothing(self) -> Self:
        if self.variant == "ipo" and self.label_smoothing > 0:
            raise ValueError(
                f"label_smoothing is {self.label_smoothing} with variant 'ipo', which bounds the "
                "margin by itself: set it to 0, or variant to 'sigmoid'"
            )
        return self

    def columns(self) -> tuple[str, ...]:
        """The reference's log-probs, the mask, and which rows make pairs."""
        return ("reference_logprobs", "loss_mask", *PAIR_COLUMNS)


class KtoLossSpec(PartSpec):
    """Kahneman-Tversky optimisation on judged completions (arXiv 2402.01306, eq. 8)."""

    type: Literal["kto"] = "kto"
    beta: float = Field(default=0.1, gt=0)
    """How fast value saturates with the log-ratio."""
    wanted_weight: float = Field(default=1.0, gt=0)
    """lambda_D, the weight of wanted completions."""
    unwanted_weight: float = Field(default=1.0, gt=0)
    """lambda_U, the weight of unwanted completions."""

    def columns(self) -> tuple[str, ...]:
        """The reference's log-probs, the mask, the judgement, and z_0 of `KtoPointSpec`."""
        return ("reference_logprobs", "loss_mask", "preference", "kl_reference_point")


class KtoPointSpec(EstimatorPartSpec):
    """The reference point z_0 of KTO: how far the policy is from the reference.

    It is estimated once a batch, with the weights that the batch begins with, and not anew for
    each mini-batch: so it is the same for every mini-batch, rank and micro-batch.
    """

    type: Literal["kto"] = "kto"

    def columns(self) -> tuple[str, ...]:
        """Log-probs of policy and reference, the mask, and which rows are there for the KL."""
        return (PROXIMAL_LOGPROBS, "reference_logprobs", "loss_mask", "preference")

    def makes(self) -> tuple[str, ...]:
        """The point, the same in each row."""
        return ("kl_reference_point",)


class BradleyTerryLossSpec(PartSpec):
    """Loss of a reward model on pairs (Bradley-Terry, as in arXiv 2203.02155, eq. 1)."""

    type: Literal["bradley_terry"] = "bradley_terry"
    margin: float = Field(default=0.0, ge=0)
    """Scores of a pair are to differ by more than this (arXiv 2307.09288, eq. 2)."""
    centering: float = Field(default=0.0, ge=0)
    """Weight of the squared sum of a pair's scores, which keeps scores around 0
    (arXiv 2312.09244)."""

    def columns(self) -> tuple[str, ...]:
        """The mask, and which rows make pairs."""
        return ("loss_mask", *PAIR_COLUMNS)
