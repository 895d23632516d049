"""Which steps' cuts are saved: as many as a run's time can pay for."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable

from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.recipe.sections.schedule import OneStepAheadSpec

LEAST_SECONDS = 1.0
"""A cut that takes no longer is saved after each step, whatever its share of the time."""

NUM_MEASURED = 3
"""Cuts that are measured before anything is decided, and of which the median counts. What comes
before them counts not: a first cut takes its memory and locks it."""

MOST_STEPS = 100
"""Steps from one cut to the next, at most."""

_MARGIN = 1.25


class CutPace:
    """Decides after which steps the trained roles save a cut. Owner: the coordinator's loop.

    A failure costs the steps since the newest cut, and each cut costs time of every run. So where
    cuts take a larger share of a run's time than they may, only every k-th step has one.

    Example: with a share of 0.05, steps of 20 s and cuts of 3 s, every third step has a cut:
    3 s of 60.
    """

    def __init__(self, share: float | None, tell: Callable[[str], None]) -> None:
        """Begins with a cut after each step.

        Args:
            share: Of a run's time that cuts may take; None: whatever they take.
            tell: Is told of a decision and its reason.
        """
        self.every = 1
        """Steps from one cut to the next."""
        self._share = share
        self._tell = tell
        self._last: int | None = None
        self._is_first = True
        self._cuts_s: deque[float] = deque(maxlen=NUM_MEASURED)
        self._steps_s: deque[float] = deque(maxlen=NUM_MEASURED)

    @classmethod
    def of(cls, recipe: Recipe, tell: Callable[[str], None]) -> CutPace:
        """The pace of a run: none but "each step" where something else takes each step's cut.

        That is a sampler that is one step ahead, whose rows are drawn again with the weights before
        the newest ones, a health rule that skips steps, and settings that the run tunes.
        """
        run = recipe.run
        takes_each = (
            isinstance(recipe.schedule.sampler, OneStepAheadSpec)
            or bool(run.health.rules_that("skip"))
            or run.tuning is not None
        )
        return cls(None if takes_each else run.recovery.cut_share, tell)

    def is_due(self, step: int) -> bool:
        """Whether the cut of a step is to be saved."""
        return self._last is None or step - self._last >= self.every

    def saved(self, step: int) -> None:
        """Told that the newest cut is that of a step."""
        self._last = step

    def made(self, step_seconds: float, cut_seconds: float | None) -> None:
        """Told what a step took.

        Args:
            step_seconds: Without its cut.
            cut_seconds: For which its cut has held the run up; None: it has none.
        """
        if self._share is None:
            return
        self._steps_s.append(step_seconds)
        if cut_seconds is None:
            return
        if self._is_first:
            self._is_first = False
            return
        self._cuts_s.append(cut_seconds)
        if len(self._cuts_s) == NUM_MEASURED:
            self._decide(self._share)

    def _decide(self, share: float) -> None:
        cut_s, step_s = statistics.median(self._cuts_s), statistics.median(self._steps_s)
        needed = 0.0 if cut_s <= LEAST_SECONDS else cut_s / (share * step_s)
        wanted = max(1, math.ceil(needed))
        if wanted <= self.every:
            # Back only by a margin: not to and fro for a step that takes a little longer.
            wanted = max(1, math.ceil(_MARGIN * needed))
            if wanted >= self.every:
                return
        if min(wanted, MOST_STEPS) == self.every:
            return
        self.every = wanted = min(wanted, MOST_STEPS)
        steps = "each step" if wanted == 1 else f"one step of {wanted}"
        self._tell(
            f"from here on the state of {steps} is kept in shared memory: that takes {cut_s:.1f} s "
            f"beside a step of {step_s:.1f} s, and run.recovery.cut_share gives it "
            f"{100 * share:.3g} % of the time"
        )
