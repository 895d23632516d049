"""Rules of `run.health`: pure functions that find in records what a step is to be undone for."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rolemesh.coordinator.recipe.sections.health import (
    RULES,
    Action,
    GradNormSpec,
    HealthSpec,
    LengthSpec,
    RewardFallSpec,
)

SKIPPED = "health/skipped"
"""Metric of a step whose updates were undone: 1."""

Record = Mapping[str, float]

_LENGTH, _FINISHED = "completion_length/mean", "finished_fraction"
_REWARD = "reward/mean"


@dataclass(frozen=True, slots=True)
class Strike:
    """A rule that struck."""

    rule: str
    """Name of its section in `run.health`."""
    action: Action
    back: int
    """Steps to go back, where that is the action."""
    text: str
    """Value and bound, for people."""


def strikes_of(
    spec: HealthSpec, records: Sequence[Record], not_finite: str, updated: Collection[str]
) -> list[Strike]:
    """Returns which rules strike about the newest step.

    Args:
        spec: The rules.
        records: Of all steps, oldest first, the judged one last.
        not_finite: What of the newest step is no number; "" where all is.
        updated: Roles that were trained in it.
    """
    rule = spec.not_finite
    strikes = [Strike("not_finite", rule.do, rule.back, not_finite)] if not_finite else []
    for name, find in _FINDERS.items():
        rule = getattr(spec, name)
        if not rule.is_on or len(records) < rule.steps:
            continue
        newest = records[len(records) - rule.steps :]
        # A step that was undone is no measure for others.
        before = [one for one in records[: len(records) - rule.steps] if SKIPPED not in one]
        texts = [find(rule, record, before, updated) for record in newest]
        if all(texts):
            times = f", {rule.steps} steps in a row" if rule.steps > 1 else ""
            strikes.append(Strike(name, rule.do, rule.back, f"{texts[-1]}{times}"))
    return strikes


def unjudged(spec: HealthSpec, record: Record) -> Iterator[str]:
    """Names rules that cannot strike, with the metric that a step does not report."""
    for name in RULES:
        rule = getattr(spec, name)
        missing = [metric for metric in _METRICS.get(name, ()) if metric not in record]
        if rule.is_on and missing:
            yield f"run.health.{name} cannot strike: the steps report no {', '.join(missing)}"


_Find = Callable[[Any, Record, Sequence[Record], Collection[str]], str]
"""Gets its rule, a record, those before the row of steps that is judged, and the trained roles.
Says value and bound; "" where the record is within the bound, or cannot be judged."""


def _above(metric: str) -> _Find:
    def find(rule: Any, record: Record, _: Sequence[Record], __: Collection[str]) -> str:
        value = record.get(metric, -math.inf)
        return f"{metric} is {value:.4g}, above {rule.above:g}" if value > rule.above else ""

    return find


def _grad_norm(
    rule: GradNormSpec, record: Record, _: Sequence[Record], updated: Collection[str]
) -> str:
    assert rule.above is not None
    for role, bound in rule.above.items():
        # The name alone is that of the one role that reports it.
        names = [f"{role}/grad_norm", *(["grad_norm"] if list(updated) == [role] else [])]
        for name in names:
            if record.get(name, -math.inf) > bound:
                return f"the gradient norm of the {role} is {record[name]:.4g}, above {bound:g}"
    return ""


def _entropy(rule: Any, record: Record, _: Sequence[Record], __: Collection[str]) -> str:
    value = record.get("entropy", math.inf)
    return f"entropy is {value:.4g}, below {rule.below:g}" if value < rule.below else ""


def _length(rule: LengthSpec, record: Record, before: Sequence[Record], _: Collection[str]) -> str:
    length, finished = record.get(_LENGTH), record.get(_FINISHED)
    first = [one[_LENGTH] for one in before if _LENGTH in one][: rule.first_steps]
    if rule.growth is not None and length is not None and len(first) == rule.first_steps:
        usual = statistics.fmean(first)
        if length > rule.growth * usual:
            return (
                f"{_LENGTH} is {length:.4g}, above {rule.growth:g} times the {usual:.4g} of the "
                "first steps"
            )
    if rule.truncated is not None and finished is not None and 1 - finished > rule.truncated:
        return f"a share of {1 - finished:.4g} of completions is cut, above {rule.truncated:g}"
    return ""


def _reward(
    rule: RewardFallSpec, record: Record, before: Sequence[Record], _: Collection[str]
) -> str:
    if _REWARD not in record:
        return ""
    reward, rewards = record[_REWARD], [one[_REWARD] for one in before if _REWARD in one]
    if rule.below is not None and reward < rule.below:
        return f"{_REWARD} is {reward:.4g}, below {rule.below:g}"
    best = max(rewards, default=0.0)
    if rule.of_best is not None and best > 0 and reward < rule.of_best * best:
        return f"{_REWARD} is {reward:.4g}, below {rule.of_best:g} of the best, {best:.4g}"
    return "" if rule.fall is None else _fall(rule.fall, reward, rewards[-rule.over :], rule.over)


def _fall(fall: float, reward: float, rewards: Sequence[float], over: int) -> str:
    if len(rewards) < over:
        return ""
    mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards)
    if mean - reward <= max(0.0, fall * deviation):
        return ""
    return (
        f"{_REWARD} is {reward:.4g}, more than {fall:g} standard deviations of {deviation:.4g} "
        f"below the {mean:.4g} of {over} steps before"
    )


_METRICS: Mapping[str, tuple[str, ...]] = {
    "kl": ("kl/mean",),
    "entropy": ("entropy",),
    "mismatch": ("sampler_logprob_diff_mean",),
    "reward": (_REWARD,),
}
"""Metrics that a rule looks at, by its name."""

_FINDERS: Mapping[str, _Find] = {
    "grad_norm": _grad_norm,
    "kl": _above("kl/mean"),
    "entropy": _entropy,
    "length": _length,
    "mismatch": _above("sampler_logprob_diff_mean"),
    "reward": _reward,
}
"""By name of the rule."""
