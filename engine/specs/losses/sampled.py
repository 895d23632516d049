"""Losses that train policy and values from sampled experience."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rolemesh.engine.layout.payload import MAX_WIDTH
from rolemesh.engine.specs.base import PartSpec
from rolemesh.engine.specs.columns import (
    PROXIMAL_LOGPROBS,
    teacher_voices,
    top_column,
    top_ids_column,
    weights_column,
)
from rolemesh.engine.specs.losses.off_policy import OffPolicySpec
from rolemesh.engine.specs.own_functions import OwnFunctionSpec
from rolemesh.engine.specs.scores.teacher_routes import MOST_TEACHERS
from rolemesh.engine.specs.shaped_rewards import KlForm

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
    """What policy losses share: entropy and KL beside the policy term, aggregated as it is.

    And how the policy term is corrected for samples of another policy.
    """

    corrects_itself: ClassVar[bool] = False
    """Whether the loss weighs tokens by their ratio to the weights that sampled, or a function of
    the user decides on that: then neither a recipe nor fast numerics ask for a correction."""
    compares_with_sampler: ClassVar[bool] = False
    """Whether its own weights always are ratios to the weights that sampled: a correction would
    count them twice, and is refused."""
    weighs_now: ClassVar[bool] = False
    """Whether a correction weighs by the policy of each pass: that of a loss without ratios."""

    entropy_coefficient: float = Field(default=0.0, ge=0)
    """Weight of an entropy bonus."""
    kl_in_loss: float = Field(default=0.0, ge=0)
    """Weight of a KL term to the reference in the loss."""
    kl_form: KlForm = "k3"
    """Estimator of the KL in the loss."""
    off_policy: OffPolicySpec | None = None
    """How the policy term is corrected for samples of another policy; None: not at all. A recipe
    says it in algorithm.off_policy."""

    @property
    def weighs_by(self) -> Literal["scored", "same_pass", "now"] | None:
        """Whose log-probs the weights of a correction are made of; None without a correction.

        A scoring pass at the start of the update; the pass that trains, which begins with the same
        weights; or each pass, whatever it begins with.
        """
        if self.off_policy is None or self.off_policy.proximal is not None:
            return None if self.off_policy is None else self.off_policy.proximal
        return "now" if self.weighs_now and self.off_policy.normalize is None else "scored"

    def columns(self) -> tuple[str, ...]:
        """Log-probs of sampling, advantages and mask; others where a KL or a correction asks."""
        kl = ("reference_logprobs",) if self.kl_in_loss > 0 else ()
        start = (PROXIMAL_LOGPROBS,) if self.weighs_by == "scored" else ()
        return ("logprobs", "advantages", "loss_mask", *kl, *start)

    def optional_columns(self) -> tuple[str, ...]:
        """Versions of the weights that sampled, by which metrics are told apart."""
        return ("policy_versions",)

    @model_validator(mode="before")
    @classmethod
    def _refuse_old_places(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        given = {name: data[name] for name in ("importance_cap", "proximal") if name in data}
        if given:
            fields = {
                "type": "token_truncation",
                "cap": given.get("importance_cap", 2.0),
                **({"proximal": given["proximal"]} if "proximal" in given else {}),
            }
            written = ", ".join(f"{name}: {value}" for name, value in fields.items())
            remedy = "null" if fields["cap"] is None else f"{{{written}}}"
            raise ValueError(
                f"{' and '.join(f'{name} is {value!r}' for name, value in given.items())}, but "
                "corrections of all losses have a section of their own: take it out, and give "
                f"algorithm.off_policy: {remedy}"
            )
        return data


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

    corrects_itself: ClassVar[bool] = True

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

    weighs_now: ClassVar[bool] = True

    type: Literal["reinforce"] = "reinforce"
    aggregation: Aggregation = "seq_mean_token_sum"
    """How token losses become one number."""


class PythonPolicyLossSpec(OwnFunctionSpec, PolicyTermsSpec):
    """A policy loss of your own: a function that gives the loss of each token.

    Entropy, KL to the reference, a correction and aggregation are added as for the losses here.
    """

    corrects_itself: ClassVar[bool] = True

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
    mixture: float | None = Field(default=None, gt=0, lt=1)
    """The teacher's share m of the mixture of jensen_shannon, which alone takes one; None: half."""
    top_k: int = Field(default=32, ge=1, le=MAX_WIDTH)
    """Tokens at each place that the teacher tells apart."""
    teachers: int = Field(default=1, ge=1, le=MOST_TEACHERS)
    """Teachers that score a row, at most. A run says it of its section teacher; leave it out of a
    recipe. The loss of a token is then the mean of the divergences to each, by weight."""

    @model_validator(mode="after")
    def _check_mixture(self) -> Self:
        if self.mixture is not None and self.divergence != "jensen_shannon":
            raise ValueError(
                f"mixture is {self.mixture} with divergence {self.divergence!r}, which mixes "
                "nothing: leave it out, or take divergence 'jensen_shannon'"
            )
        return self

    def columns(self) -> tuple[str, ...]:
        """What each teacher finds likeliest, the weights of several, and the mask."""
        voices = teacher_voices(self.teachers)
        found = [name(one) for one in voices for name in (top_ids_column, top_column)]
        weights = [weights_column(one) for one in voices] if self.teachers > 1 else ()
        return (*found, *weights, "loss_mask")


class PpoValueLossSpec(AggregatedLossSpec):
    """Clipped squared error of values (PPO as in arXiv 2006.05990, section 3.1)."""

    type: Literal["ppo_value"] = "ppo_value"
    clip: float | None = Field(default=0.2, gt=0)
    """Values may move this far from the old ones; None switches clipping off."""

    def columns(self) -> tuple[str, ...]:
        """Values of the estimate, returns and mask."""
        return ("values", "returns", "loss_mask")
