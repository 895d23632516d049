"""Corrections of a policy loss for samples that another policy drew.

Weights may be older than those that train (asynchronous schedules), or a sampler may round
otherwise than the trainer. With the ratio

    rho = pi(token), at the start of the update / pi(token), where it was sampled

each form gives the policy term of a token a weight w, a number without gradient. A weight of 0
masks the token: it gives no gradient, but it stays in what the loss is divided by, as in the
formulas of their papers. Entropy and the KL to the reference are not weighted.

Ratios of a row are taken over its unmasked tokens. A log-ratio counts as at most 20 and at least
-20, so that no weight overflows.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rolemesh.engine.specs.base import Spec


class CorrectionSpec(Spec):
    """What all forms of a correction share."""

    proximal: Literal["scored", "same_pass"] | None = None
    """Where log-probs at the start of the update come from: from a scoring pass, or from the pass
    that trains, where a step makes one optimizer step: it begins with these weights, and the
    scoring pass is spared. Losses of ratios compare with these weights then, so that their clip is
    around them. None takes a scoring pass; with the loss reinforce each pass, whatever it begins
    with, which weighs by the policy now."""
    normalize: Literal["batch"] | None = None
    """"batch" divides the weights by their mean over all unmasked tokens of the mini-batch, masked
    ones with their 0 (self-normalised importance sampling): masked tokens then leave the divisor of
    a token mean. It needs scored log-probs, since the mean must be known before the first pass."""

    @model_validator(mode="after")
    def _check_normalize(self) -> Self:
        if self.normalize is not None and self.proximal == "same_pass":
            raise ValueError(
                f"normalize is {self.normalize!r} and proximal is 'same_pass', but the mean of the "
                "weights must be known before the pass that trains: set proximal to 'scored', or "
                "leave normalize out"
            )
        return self


class BoundsSpec(CorrectionSpec):
    """A correction with two bounds."""

    low: float
    high: float

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.low > 1 or self.high < 1:
            raise ValueError(
                f"low is {self.low:g} and high is {self.high:g}, which leaves out the ratio 1 of "
                "samples of the same policy: give low of at most 1 and high of at least 1"
            )
        return self


class TokenTruncationSpec(CorrectionSpec):
    """Truncated importance sampling of tokens: w = min(rho, cap).

    That of decoupled PPO (AReaL, arXiv 2505.24298, section 5.2, which has no cap) and of
    fengyao.notion.site/off-policy-rl (TIS, with cap C); truncated as in arXiv 1802.01561,
    section 4.1.
    """

    type: Literal["token_truncation"] = "token_truncation"
    cap: float = Field(default=2.0, gt=0)
    """The largest weight. The default is that of the note and of verl."""


class SequenceTruncationSpec(CorrectionSpec):
    """One truncated weight for a row: w = min(product of the row's rho, cap).

    Without a cap it has no bias for the objective of whole rows; its variance grows with their
    length ("When speed kills stability", richardli.xyz/rl-collapse, 2025).
    """

    type: Literal["sequence_truncation"] = "sequence_truncation"
    cap: float = Field(default=2.0, gt=0)
    """The largest weight."""


class MaskingSpec(BoundsSpec):
    """Masked importance sampling: w = rho if low <= rho <= high, else 0.

    Of tokens it is IcePop (Ring-1T, arXiv 2510.18855; also INTELLECT-3, arXiv 2512.16144, eq. 1);
    of rows, by the product of their rho, the sequence-level form of richardli.xyz/rl-collapse.
    """

    type: Literal["masking"] = "masking"
    low: float = Field(default=0.5, ge=0)
    """Smallest ratio that counts; 0: no bound. The default is IcePop's for tokens."""
    high: float = Field(default=5.0, gt=0)
    """Largest ratio that counts."""
    level: Literal["token", "sequence"] = "token"
    """Whose ratio is looked at, and is the weight: each token's, or one of the whole row."""


class GeometricRejectionSpec(BoundsSpec):
    """Leaves out rows that are far from the policy, whatever their length.

    w = 1 for all tokens of a row whose geometric mean of rho, exp(mean log rho), lies between the
    bounds, else 0 ("Geo-RS" of richardli.xyz/rl-collapse, and of verl). Rows that stay are not
    weighted.
    """

    type: Literal["geometric_rejection"] = "geometric_rejection"
    low: float = Field(default=0.999, ge=0)
    """Smallest mean ratio of a row that stays. The defaults are verl's; a sampler of older weights
    needs wider ones."""
    high: float = Field(default=1.001, gt=0)
    """Largest mean ratio of a row that stays."""


OffPolicySpec = Annotated[
    TokenTruncationSpec | SequenceTruncationSpec | MaskingSpec | GeometricRejectionSpec,
    Field(discriminator="type"),
]
"""Every form."""
