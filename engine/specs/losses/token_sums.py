"""Losses whose weights the caller gives token by token, and that are summed."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rolemesh.engine.specs.columns import RATIO_MASK, TOKEN_WEIGHTS
from rolemesh.engine.specs.losses.target_losses import TargetLossSpec

TokenSumForm = Literal["cross_entropy", "importance_sampling", "ppo", "cispo", "gspo", "dro"]

_CLIPS: dict[str, tuple[float, float]] = {
    "ppo": (0.8, 1.2),
    "cispo": (0.0, 4.0),
    # arXiv 2507.18071, section 5.1.
    "gspo": (1 - 3e-4, 1 + 4e-4),
}
"""Bounds of the ratio where the caller gives none."""


class TokenSumLossSpec(TargetLossSpec):
    """A sum over tokens by weights, or advantages, of the caller.

    With p the policy's log-prob, q the sampler's, A the advantage, r = exp(p - q), and [..] a
    number without gradient:

        cross_entropy        -w p
        importance_sampling  -r A
        ppo                  -min(r A, clip(r) A)
        cispo                -[clip(r)] A p                  (arXiv 2506.13585, eq. 4)
        gspo                 -min(s A, clip(s) A)            (arXiv 2507.18071, eq. 14)
                             s = [R] exp(p - [p]), R = exp of the mean of p - q over the row
        dro                  -p A + beta / 2 (p - q)^2

    Above 1, targets are for cross_entropy alone, whose weights are then as many.

    The gradient of dro is that of direct reward optimisation by the policy (arXiv 2405.19107), with
    the value in the advantage, and both over the policy's factor.
    """

    type: Literal["token_sum"] = "token_sum"
    form: TokenSumForm = "cross_entropy"
    """Which one; see above."""
    clip_low: float | None = Field(default=None, ge=0)
    """Least ratio; None: 0.8 for ppo, 0 for cispo, 0.9997 for gspo."""
    clip_high: float | None = Field(default=None, gt=0)
    """Largest ratio; None: 1.2 for ppo, 4 for cispo, 1.0004 for gspo."""
    beta: float = Field(default=0.05, gt=0)
    """Weight of dro's square."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.targets > 1 and self.form != "cross_entropy":
            raise ValueError(
                f"targets is {self.targets} with form {self.form!r}, which has one token a place: "
                "give 0 or 1, or take cross_entropy"
            )
        given = [name for name in ("clip_low", "clip_high") if getattr(self, name) is not None]
        if given and self.form not in _CLIPS:
            raise ValueError(
                f"{given[0]} is given with form {self.form!r}, which clips nothing: leave it out"
            )
        if self.form in _CLIPS and self.clips[0] >= self.clips[1]:
            raise ValueError(
                f"clip_low is {self.clips[0]} and clip_high {self.clips[1]}: give a lower one below"
            )
        return self

    @property
    def clips(self) -> tuple[float, float]:
        """Bounds of the ratio; raises KeyError for a form without."""
        low, high = _CLIPS[self.form]
        return (
            low if self.clip_low is None else self.clip_low,
            high if self.clip_high is None else self.clip_high,
        )

    def columns(self) -> tuple[str, ...]:
        """Weights, or log-probs of the sampler and advantages; given targets; and the mask."""
        targets = self.target_columns()
        if self.form == "cross_entropy":
            return (TOKEN_WEIGHTS, *targets, "loss_mask")
        ratios = (RATIO_MASK,) if self.form == "gspo" else ()
        return ("logprobs", "advantages", *ratios, *targets, "loss_mask")
