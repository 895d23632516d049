"""Health of learning: which signs of a step that went wrong count, and what is then done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rolemesh.engine.specs import Spec

TrainedRole = Literal["actor", "critic", "reward"]

Action = Literal["stop", "skip", "roll_back"]


class _Reaction(Spec):
    """What is done about a step that a rule strikes."""

    do: Action = "stop"
    """stop: the run ends as failed; what it has made before the step is saved, and it can be
    resumed. skip: the step's updates are undone, and the run goes on with the next prompts.
    roll_back: the run goes back, and samples what follows with other seeds."""
    back: int = Field(default=1, ge=1, le=1_000_000)
    """With roll_back: steps to go back, counted from the struck one; 1 undoes that one alone."""

    @model_validator(mode="after")
    def _check_back(self) -> Self:
        # A saved recipe names every default.
        if self.back != 1 and self.do != "roll_back":
            raise ValueError(
                f"back is {self.back}, but do is {self.do!r}, which goes back no steps: leave back "
                "out, or set do to 'roll_back'"
            )
        return self


class NotFiniteSpec(_Reaction):
    """Strikes when a metric, a loss or a gradient is NaN or infinite."""

    enabled: bool = True
    """Whether metrics that are no numbers count. Where a service refuses to compute on, the run
    ends without this rule, too."""

    @property
    def is_on(self) -> bool:
        """Whether it is switched on."""
        return self.enabled

    @model_validator(mode="after")
    def _check_is_on(self) -> Self:
        if not self.enabled and self.do != "stop":
            raise ValueError(
                f"do is {self.do!r}, but enabled is false, so that the rule never strikes: set "
                "enabled to true, or leave do out"
            )
        return self


class _Rule(_Reaction):
    """A bound on a metric."""

    bounds: ClassVar[tuple[str, ...]]
    """Fields of which one at least switches the rule on."""
    steps: int = Field(default=1, ge=1, le=1000)
    """Steps in a row that must be beyond the bound until the rule strikes."""

    @property
    def is_on(self) -> bool:
        """Whether the rule has a bound."""
        return any(getattr(self, name) is not None for name in self.bounds)

    @model_validator(mode="after")
    def _check_is_on(self) -> Self:
        fields = type(self).model_fields
        values = {name: getattr(self, name) for name in fields}
        given = [f"{name} is {v!r}" for name, v in values.items() if v != fields[name].default]
        if given and not self.is_on:
            raise ValueError(
                f"{', '.join(given)}, but the rule has no bound and never strikes: give "
                f"{' or '.join(self.bounds)}, or leave the rule out"
            )
        return self


class GradNormSpec(_Rule):
    """Strikes when the gradient of a role is too large."""

    bounds = ("above",)
    above: Mapping[TrainedRole, Annotated[float, Field(gt=0)]] | None = Field(
        default=None, min_length=1
    )
    """By role: norm before clipping, mean over the optimizer steps of an update. null: off."""


class KlSpec(_Rule):
    """Strikes when the policy is too far from the reference."""

    bounds = ("above",)
    above: float | None = Field(default=None, gt=0)
    """Nats a token (kl/mean). null: off."""


class EntropySpec(_Rule):
    """Strikes when the policy has hardly any choice left."""

    bounds = ("below",)
    below: float | None = Field(default=None, gt=0)
    """Nats a token (entropy). null: off."""


class LengthSpec(_Rule):
    """Strikes when completions become too long."""

    bounds = ("growth", "truncated")
    growth: float | None = Field(default=None, gt=1)
    """Factor of the mean length (completion_length/mean) over that of the first steps. null:
    off."""
    first_steps: int = Field(default=10, ge=1, le=1000)
    """Steps with whose mean length it is compared."""
    truncated: float | None = Field(default=None, gt=0, lt=1)
    """Share of completions that the length limit ends (1 - finished_fraction). null: off."""


class MismatchSpec(_Rule):
    """Strikes when trainer and sampler disagree about the tokens that were sampled."""

    bounds = ("above",)
    above: float | None = Field(default=None, gt=0)
    """Mean of |logprob of the trainer - logprob of the sampler| in nats a token
    (sampler_logprob_diff_mean). Samples of older weights differ, too. null: off."""


class RewardFallSpec(_Rule):
    """Strikes when the mean reward falls."""

    bounds = ("fall", "below", "of_best")
    fall: float | None = Field(default=None, gt=0)
    """Standard deviations of the mean reward (reward/mean) over the steps before, by which it lies
    below their mean. null: off."""
    over: int = Field(default=20, ge=2, le=1000)
    """Steps before with which fall compares; it waits until there are so many."""
    below: float | None = None
    """Mean reward of a step (reward/mean) that is too low. null: off."""
    of_best: float | None = Field(default=None, gt=0, lt=1)
    """Share of the greatest mean reward of a step before, of which less is too low; looked at where
    that one is above 0. null: off."""


class HealthSpec(Spec):
    """Rules about steps that go wrong. A rule looks at each step before it is committed.

    Where several strike, stop comes before roll_back, and roll_back before skip.
    """

    not_finite: NotFiniteSpec = NotFiniteSpec()
    grad_norm: GradNormSpec = GradNormSpec()
    kl: KlSpec = KlSpec()
    entropy: EntropySpec = EntropySpec()
    length: LengthSpec = LengthSpec()
    mismatch: MismatchSpec = MismatchSpec()
    reward: RewardFallSpec = RewardFallSpec()
    most_skips: int = Field(default=5, ge=1, le=1000)
    """Steps in a row that may be skipped; the next one that would be ends the run."""
    most_roll_backs: int = Field(default=3, ge=1, le=1000)
    """Times that a run may go back in its whole life; the next time ends it."""

    def rules_that(self, action: Action) -> list[str]:
        """Names of the rules that do this about a step."""
        rules = {name: getattr(self, name) for name in RULES}
        return [name for name, rule in rules.items() if rule.is_on and rule.do == action]


RULES = ("not_finite", "grad_norm", "kl", "entropy", "length", "mismatch", "reward")
"""Names of the rules, which are fields of HealthSpec."""
