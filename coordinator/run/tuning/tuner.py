"""Tuner: says after each step which settings the run goes on with.

A bandit over the settings of a declared space, whose prior is the recorded graph: what a setting is
expected to take is what the graph, rearranged, takes, corrected by how far such expectations were
off for each value that was tried (a linear model of the logarithms, as LinUCB, arXiv 1003.0146).
The settings with the least expectation are tried next; those with one change from the best count as
better by the deviation of what is expected, so that no value stays untried for a wrong expectation.
All of it is a pure function of the turns and steps before: a run that is resumed decides as one
that was left alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from rolemesh.coordinator.api.reads.plans import WARMUP_STEPS
from rolemesh.coordinator.recipe.sections.tuning import Settings, TuningSpec, candidates, key_of
from rolemesh.coordinator.run.saving.turns import Turn, Verdict

_OFF = 0.15
"""How far the expectation of one value may be off, as a deviation of its logarithm; more where
those that were tried were off by more."""

_NOISE = 0.05
"""The same of a measured step."""

Expect = Callable[[Settings], float | None]
"""Seconds of a step with settings; None: the recipe refuses them."""

ExpectAfter = Callable[[Settings], Expect]
"""The same, as the graph of a step with the settings that it is given has it."""


class Tuner:
    """Decides. Owner: the coordinator's loop.

    Invariant: settings are kept only where they measured better than the best before.

    Example: of a step of 6 s with `block_rows: 0` in one pool, with blocks and a pool for each role
    expected at 4.2 s: after four steps these are tried; the first step does not count, the next two
    take 4.4 and 4.3 s: they are kept.
    """

    def __init__(self, spec: TuningSpec, space: Mapping[str, Sequence[object]]) -> None:
        """Prepares.

        Args:
            spec: The recipe's section.
            space: Values of each key, the recipe's own first.
        """
        self._spec = spec
        self._candidates = list(candidates(space))  # type: ignore[arg-type]

    @property
    def own(self) -> Settings:
        """Those of the recipe."""
        return self._candidates[0]

    def knows(self, settings: Settings) -> bool:
        """Whether they are of the space."""
        return settings in self._candidates

    def next_turn(
        self,
        step: int,
        turns: Sequence[Turn],
        seconds: Mapping[int, float],
        expect: ExpectAfter,
        failed: Collection[str] = (),
    ) -> Turn | None:
        """What the run goes on with after a step; None: with what it has.

        Args:
            step: Steps made.
            turns: So far, oldest first.
            seconds: Of each step that may count.
            expect: Says what settings would take, by a step with the best ones.
            failed: Settings that are not tried again, as `key_of` names them.
        """
        if turns and turns[-1].is_last:
            return None
        counted = self._seconds(turns, seconds)
        now, best = (turns[-1].settings, turns[-1].best) if turns else (self.own, self.own)
        own, is_over = counted.get(key_of(now), []), step >= self._spec.steps
        verdict = None
        if now != best:
            verdict = self._verdict(turns[-1], own, counted[key_of(best)], is_over=is_over)
            if verdict is None:
                return None
            best = now if verdict.is_kept else best
        elif len(own) < self._spec.steps_per_trial and not is_over:
            return None
        # A trial takes a step that does not count, and one that does.
        chosen = None
        if own and step + 2 <= self._spec.steps:
            chosen = self._chosen(best, counted, expect(best), failed)
        if chosen is None:
            return Turn(step=step, settings=best, best=best, verdict=verdict, is_last=True)
        settings, expected_s = chosen
        return Turn(step=step, settings=settings, best=best, expected_s=expected_s, verdict=verdict)

    def given_up(
        self, step: int, turns: Sequence[Turn], seconds: Mapping[int, float], why: str
    ) -> Turn | None:
        """Back to the best settings after a failure in a trial; None where there is no trial."""
        if not turns or not turns[-1].is_trial:
            return None
        turn = turns[-1]
        counted = self._seconds(turns, seconds)
        own = counted.get(key_of(turn.settings), [])
        verdict = Verdict(
            settings=turn.settings,
            is_kept=False,
            why=f"something failed: {why}",
            expected_s=turn.expected_s or 0.0,
            measured_s=statistics.median(own) if own else None,
            before_s=statistics.median(counted[key_of(turn.best)]),
            has_failed=True,
        )
        return Turn(step=step, settings=turn.best, best=turn.best, verdict=verdict)

    def counted(
        self, turns: Sequence[Turn], seconds: Mapping[int, float]
    ) -> dict[str, dict[int, float]]:
        """Seconds of the steps that count, by settings as `key_of` names them, and by step."""
        found: dict[str, dict[int, float]] = {}
        starts = [(0, self.own, WARMUP_STEPS)]
        # Of two turns after one step, the later one holds.
        starts += [(turn.step, turn.settings, 1) for turn in turns]
        ends = [start for start, _, _ in starts[1:]] + [max(seconds, default=0)]
        for (start, settings, skipped), end in zip(starts, ends, strict=True):
            steps = range(start + 1 + skipped, end + 1)
            found.setdefault(key_of(settings), {}).update(
                {one: seconds[one] for one in steps if one in seconds}
            )
        return found

    def _seconds(
        self, turns: Sequence[Turn], seconds: Mapping[int, float]
    ) -> dict[str, list[float]]:
        return {key: list(one.values()) for key, one in self.counted(turns, seconds).items()}

    def _verdict(
        self, turn: Turn, own: Sequence[float], before: Sequence[float], *, is_over: bool
    ) -> Verdict | None:
        """Of the settings that are being tried; None while more steps are to be counted."""
        if not own and not is_over:
            return None
        before_s = statistics.median(before)
        needed = max(self._spec.least_gain, _spread(before), _spread(own))
        measured_s = statistics.median(own) if own else None
        is_better = measured_s is not None and measured_s < before_s * (1 - needed)
        if is_better and len(own) < self._spec.steps_per_trial and not is_over:
            return None
        if measured_s is None:
            why = "no step of it could be counted"
        elif is_better:
            why = "it measured better"
        else:
            why = f"it is not shorter by {100 * needed:.1f} %"
        return Verdict(
            settings=turn.settings,
            is_kept=is_better,
            why=why,
            expected_s=turn.expected_s or 0.0,
            measured_s=measured_s,
            before_s=before_s,
        )

    def _chosen(
        self,
        best: Settings,
        counted: Mapping[str, Sequence[float]],
        expect: Expect,
        failed: Collection[str],
    ) -> tuple[Settings, float] | None:
        """The settings to try, and what a step is expected to take; None: nothing is worth it."""
        expected = {
            key_of(one): seconds for one in self._candidates if (seconds := expect(one)) is not None
        }
        errors = [
            (one, math.log(statistics.median(measured) / expected[key_of(one)]))
            for one in self._candidates
            if one != best and key_of(one) in expected and (measured := counted.get(key_of(one)))
        ]
        known = _Corrections(best, self._candidates, errors)
        best_s = statistics.median(counted[key_of(best)])
        most, found = best_s * (1 - self._spec.least_gain), None
        for one in self._candidates:
            key = key_of(one)
            if counted.get(key) or key in failed or key not in expected:
                continue
            mean, deviation = known.of(one)
            if sum(value != best[name] for name, value in one.items()) > 1:
                # Little is known of many changes at once: of several, the expectation counts.
                deviation = 0.0
            optimistic = expected[key] * math.exp(mean - deviation)
            if optimistic < most:
                most, found = optimistic, (one, expected[key] * math.exp(mean))
        return found


class _Corrections:
    """How far expectations are off: a sum over values that differ from the best settings'.

    Gaussian, with a prior around 0. Example: two changes, each of which may be off by 15 %, may
    together be off by 21 %.
    """

    def __init__(
        self,
        best: Settings,
        known: Sequence[Settings],
        errors: Sequence[tuple[Settings, float]],
    ) -> None:
        """Learns.

        Args:
            best: What expectations stand on.
            known: All settings.
            errors: Of those that were tried: log(measured / expected).
        """
        self._best = best
        names = {(name, key_of({name: v})) for one in known for name, v in one.items()}
        self._places = {name: place for place, name in enumerate(sorted(names))}
        self._mean = np.zeros(len(names))
        each = [error**2 / self._changes(one).sum() for one, error in errors]
        self._covariance = np.eye(len(names)) * max(_OFF**2, *each, 0.0)
        for one, error in errors:
            self._learn(one, error)

    def _changes(self, settings: Settings) -> npt.NDArray[np.float64]:
        changes = np.zeros(len(self._places))
        for name, value in settings.items():
            if value != self._best[name]:
                changes[self._places[name, key_of({name: value})]] = 1.0
        return changes

    def _learn(self, settings: Settings, error: float) -> None:
        changes = self._changes(settings)
        spread = self._covariance @ changes
        gain = spread / (changes @ spread + _NOISE**2)
        self._mean = self._mean + gain * (error - changes @ self._mean)
        self._covariance = self._covariance - np.outer(gain, spread)

    def of(self, settings: Settings) -> tuple[float, float]:
        """What to add to the logarithm of an expectation, and its deviation."""
        changes = self._changes(settings)
        variance = float(changes @ self._covariance @ changes)
        return float(changes @ self._mean), math.sqrt(max(0.0, variance))


def _spread(seconds: Sequence[float]) -> float:
    """How far steps of the same settings are from their median in the mean, as a share of it."""
    if not seconds:
        return 0.0
    median = statistics.median(seconds)
    return statistics.fmean(abs(one - median) for one in seconds) / median
