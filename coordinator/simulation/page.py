"""One page of a simulation: what each schedule of a recipe comes to, for people and programs."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from rolemesh.coordinator.mapping.report.report import Plan
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.simulation.run import Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    """A schedule: its plan, and what its run came to."""

    name: str
    plan: Plan
    recipe: Recipe
    outcome: Outcome

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        outcome = self.outcome
        recoveries = [one.to_dict() for one in outcome.recoveries]
        for one in recoveries:
            del one["restarted"]
        return {
            "schedule": self.name,
            "predicted_s": self.plan.period,
            "period_s": outcome.period,
            "services": outcome.services,
            "steps": len(outcome.commits),
            "step_ends_s": list(outcome.step_ends),
            "busy": dict(outcome.busy),
            "lost_s": outcome.lost_s,
            "losses": [asdict(loss) for loss in outcome.losses],
            "recoveries": recoveries,
            "staleness_max": outcome.staleness,
            "calls": outcome.calls,
        }


def _busy(role: str, one: Simulated) -> str:
    return f"{one.outcome.busy[role]:.0%}" if role in one.outcome.busy else "-"


def rows(simulated: Sequence[Simulated]) -> Iterator[tuple[str, ...]]:
    """The table: a heading with the schedules, then a row for each quantity."""
    yield ("", *(one.name for one in simulated))

    def row(name: str, told: Callable[[Simulated], str]) -> tuple[str, ...]:
        return (name, *(told(one) for one in simulated))

    yield row("services", lambda one: str(one.outcome.services))
    yield row("seconds a step, simulated", lambda one: f"{one.outcome.period:.4g}")
    yield row("seconds of all steps", lambda one: f"{one.outcome.step_ends[-1]:.4g}")
    yield row("of the longest step", lambda one: f"{max(one.outcome.step_seconds):.4g}")
    yield row("predicted by the plan", lambda one: f"{one.plan.period:.4g}")
    for role in dict.fromkeys(role for one in simulated for role in one.outcome.busy):
        yield row(f"{role} at work", partial(_busy, role))
    yield row("most steps behind", lambda one: f"{one.outcome.staleness:g}")
    if any(one.outcome.losses for one in simulated):
        yield row("processes lost", lambda one: str(len(one.outcome.losses)))
        yield row("recoveries", lambda one: str(len(one.outcome.recoveries)))
        yield row("seconds of a recovery", _recovery)
        yield row("seconds of work lost", lambda one: f"{one.outcome.lost_s:.4g}")


def _recovery(one: Simulated) -> str:
    seconds = [found.seconds for found in one.outcome.recoveries]
    return f"{statistics.fmean(seconds):.4g}, at most {max(seconds):.4g}" if seconds else "-"


def notes(simulated: Sequence[Simulated]) -> Iterator[str]:
    """What the table does not say."""
    yield f"for {simulated[0].plan.rows}"
    yield f"seconds of calls are predicted: {simulated[0].plan.basis}"
    for one in simulated:
        lost = Counter(loss.service.partition("-")[0] for loss in one.outcome.losses)
        if lost:
            told = ", ".join(f"{number} of {role}" for role, number in sorted(lost.items()))
            again = sum(found.lost_steps for found in one.outcome.recoveries)
            yield (
                f"{one.name}: processes lost: {told}; recoveries: "
                f"{len(one.outcome.recoveries)}; steps that were committed and made again: {again}"
            )
    if any(one.outcome.staleness for one in simulated):
        yield "Schedules that are ahead train on older weights, which changes what is learnt."
