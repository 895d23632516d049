"""Losses that train policy and values from sampled experience."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rolemesh.engine.layout.payload import MAX_WIDTH
from rolemesh.engine.specs.base import PartSpec
from rolemesh.engine.specs.columns import (
    KL_COLUMNS,
    PROXIMAL_LOGPROBS,
    TEACHER_TOP,
    TEACHER_TOP_IDS,
    KlTarget,
)
from rolemesh.engine.specs.estimators import KlForm
from rolemesh.engine.specs.own_functions import OwnFunctionSpec
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


class TemperedLossSpec(AggregatedLossSpec):
    """What losses over a policy's distribution share: the temperature at which it is taken."""

    temperature: float = Field(default=1.0, gt=0)
    """Softmax temperature at which log-probs are taken. An algorithm that samples takes that of
    sampling where a recipe leaves it out."""

    @property
    def logprob_temperature(self) -> float:
        """What `temperature` says."""
        return self.temperature


class PolicyTermsSpec(TemperedLossSpec):
    """What policy losses share: entropy and KL beside the policy term, aggregated as it is."""

    entropy_coefficient: float = Field(default=0.0, ge=0)
    """Weight of an entropy bonus."""
    kl_in_loss: float = Field(default=0.0, ge=0)
    """Weight of a KL term in the loss."""
    kl_to: KlTarget = "reference"
    """Whom the KL in the loss is taken to: the reference keeps the policy near, a teacher pulls."""
    kl_form: KlForm = "k3"
    """Estimator of the KL in the loss."""

    def columns(self) -> tuple[str, ...]:
        """Log-probs of sampling, advantages and mask; those of `kl_to` where a KL is wanted."""
        kl = (KL_COLUMNS[self.kl_to],) if self.kl_in_loss > 0 else ()
        return ("logprobs", "advantages", "loss_mask", *kl)


class PpoPolicyLossSpec(PolicyTermsSpec):
    """Clipped policy loss (arXiv 1707.06347, eq. 7), asymmetric and dual clip as options.

    It is also the loss of GRPO (arXiv 2402.03300, eq. 3; aggregation "seq_mean_token_mean"), DAPO
    (arXiv 2503.14476, eq. 8; clip_high above clip_low, "token_mean") and Dr. GRPO (arXiv
    2503.20783; "seq_sum_norm").
    """

    type: Literal["ppo_policy"] = "ppo_policy"
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """Ratio is clipped above at 1 + clip_high."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bound c of arXiv 1912.09729, eq. 5, for negative advantages; None switches it off."""
    importance_cap: float | None = Field(default=None, gt=0)
    """Decoupled PPO (AReaL, arXiv 2505.24298, section 5.2): the ratio is that to the weights at
    the start of the update, and each token's policy loss is weighted by their ratio to the weights
    that sampled, truncated at this. None compares with the weights that sampled; with
    run.numerics "fast", a cap that is left out is 2."""
    proximal: Literal["scored", "same_pass"] = "scored"
    """Where log-probs at the start of the update come from, with importance_cap: from a scoring
    pass, or from the pass that trains, where a step makes one optimizer step: it begins with these
    weights, and the scoring pass is spared."""

    @model_validator(mode="after")
    def _check_proximal(self) -> Self:
        if self.proximal == "same_pass" and self.importance_cap is None:
            raise ValueError(
                "proximal is 'same_pass' without importance_cap, which alone reads log-probs at "
                "the start of the update: give importance_cap, or leave proximal out"
            )
        return self

    def columns(self) -> tuple[str, ...]:
        """Those of a policy loss; log-probs at the start of the update where they are scored."""
        is_scored = self.importance_cap is not None and self.proximal == "scored"
        return (*super().columns(), *((PROXIMAL_LOGPROBS,) if is_scored else ()))


class GspoPolicyLossSpec(PolicyTermsSpec):
    """Group sequence policy optimisation (arXiv 2507.18071, eq. 5): one ratio for a whole row.

    The ratio is exp(mean log-ratio of the row's unmasked tokens). The paper averages over rows,
    which is the default aggregation here; libraries that average over all tokens let a long row
    weigh more, which "token_mean" gives.
    """

    type: Literal["gspo"] = "gspo"
    level: Literal["sequence", "token"] = "sequence"
    """"token" is GSPO-token (eq. 13): the same ratio, but each token's gradient goes through its
    own log-prob, so that advantages may differ within a row."""
    aggregation: Aggregation = "seq_mean_token_mean"
    """How token losses become one number."""
    clip_low: float = Field(default=3e-4, gt=0, lt=1)
    """Ratio is clipped below at 1 - clip_low (section 5.1)."""
    clip_high: float = Field(default=4e-4, gt=0)
    """Ratio is clipped above at 1 + clip_high (section 5.1)."""


class CispoPolicyLossSpec(PolicyTermsSpec):
    """Clipped importance weights (CISPO, arXiv 2506.13585, eq. 4): no token loses its gradient.

    A token's loss is -weight * advantage * logprob, where the weight is the clipped ratio, without
    a gradient of its own.
    """

    type: Literal["cispo"] = "cispo"
    clip_low: float | None = Field(default=None, gt=0, lt=1)
    """The weight is at least 1 - clip_low; None sets no lower bound, as in the paper."""
    clip_high: float = Field(default=4.0, gt=0)
    """The weight is at most 1 + clip_high. The paper gives no number; arXiv 2510.13786 finds
    bounds from 4 to 8 alike."""


class ReinforcePolicyLossSpec(PolicyTermsSpec):
    """Plain policy gradient: -advantage * logprob (RLOO, arXiv 2402.14740; ReMax, 2310.10505).

    Both papers sum over the tokens of a row, which is the default aggregation here.
    """

    type: Literal["reinforce"] = "reinforce"
    aggregation: Aggregation = "seq_mean_token_sum"
    """How token losses become one number."""
    importance_cap: float | None = Field(default=None, gt=0)
    """Weigh each token by the ratio of the policy to the one that sampled, at most this and
    without a gradient of its own; None weighs all by 1, which only holds on-policy. With
    run.numerics "fast", a cap that is left out is 2."""


class PythonPolicyLossSpec(OwnFunctionSpec, PolicyTermsSpec):
    """A policy loss of your own: a function that gives the loss of each token.

    Entropy, KL to the reference and aggregation are added as for the losses here.
    """

    type: Literal["python"] = "python"
    reads: tuple[str, ...] = ()
    """Further columns of completion tokens that the function reads, e.g. values. With
    proximal_logprobs the log-probs to compare with are those at the start of the update."""

    def columns(self) -> tuple[str, ...]:
        """Those of a policy loss, and those that it names."""
        return (*super().columns(), *self.reads)


class DistillationLossSpec(TemperedLossSpec):
    """How far the policy's distribution is from the teacher's, at each token that was sampled.

    Over the `top_k` tokens that the teacher finds likeliest, and all others together as one more
    outcome; with P the teacher's distribution over these K + 1 outcomes and Q the policy's

        forward_kl       KL(P || Q)           covers all that the teacher says
        reverse_kl       KL(Q || P)           keeps to what the teacher says (arXiv 2306.08543)
        jensen_shannon   m KL(P || M) + (1 - m) KL(Q || M) with M = m P + (1 - m) Q
                                              (GKD, arXiv 2306.13649, section 3.1)

    The gradient goes through Q at given tokens, as in GKD; that the policy chose them is left out.
    """

    type: Literal["distillation"] = "distillation"
    divergence: Literal["forward_kl", "reverse_kl", "jensen_shannon"] = "reverse_kl"
    """Which one; see above."""
    mixture: float = Field(default=0.5, gt=0, lt=1)
    """The teacher's share m of the mixture; read by jensen_shannon alone."""
    top_k: int = Field(default=32, ge=1, le=MAX_WIDTH)
    """Tokens at each place that the teacher tells apart."""

    @model_validator(mode="after")
    def _check_mixture(self) -> Self:
        if "mixture" in self.model_fields_set and self.divergence != "jensen_shannon":
            raise ValueError(
                f"mixture is {self.mixture} with divergence {self.divergence!r}, which mixes "
                "nothing: leave it out, or take divergence 'jensen_shannon'"
            )
        return self

    def columns(self) -> tuple[str, ...]:
        """What the teacher finds likeliest, and the mask."""
        return (TEACHER_TOP_IDS, TEACHER_TOP, "loss_mask")


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
    | GspoPolicyLossSpec
    | CispoPolicyLossSpec
    | ReinforcePolicyLossSpec
    | PythonPolicyLossSpec
    | DistillationLossSpec
    | PpoValueLossSpec
    | SftLossSpec
    | DpoLossSpec
    | KtoLossSpec
    | BradleyTerryLossSpec,
    Field(discriminator="type"),
]
"""Every loss: those above, and those on given data (`specs.preferences`)."""
