"""Estimate of the time that a run, or a call, has left, and how it is told to people."""

from __future__ import annotations

import time
from collections import deque

_STEPS_AVERAGED = 10
"""Newest steps whose mean is the pace: a run's lengths, and so its steps, change as it learns."""


class Pace:
    """How fast a run makes its steps, everything between them included.

    Example: of 20 steps three are made, at 10, 22 and 34 s; at 40 s, 17 steps of 12 s each are
    left, of which one has gone on for 6 s: 198 s.
    """

    def __init__(self, num_steps: int | None) -> None:
        """Prepares; `num_steps` is that of the whole run, None where it is not known."""
        self.num_steps = num_steps
        self.step = 0
        """Steps made."""
        self._seconds: deque[float] = deque(maxlen=_STEPS_AVERAGED)
        self._made_at: float | None = None
        self._expected_s: float | None = None
        """Of a step that is being made, before any has been."""
        self._began_at = 0.0

    def made(self, step: int, seconds: float | None) -> None:
        """A step was made, in so many seconds from its first call to its commit; None: unknown."""
        now = time.monotonic()
        # Evaluations and waits for checkpoints lie between two steps.
        if self._made_at is not None:
            seconds = now - self._made_at
        if seconds is not None:
            self._seconds.append(seconds)
        self.step, self._made_at = step, now

    def expects(self, step: int, seconds: float, gone_s: float) -> bool:
        """The step after those that were made will take so long, of which some seconds are gone.

        Returns:
            Whether that counts: where a step has been made, what it took says more.
        """
        if self._seconds:
            return False
        self.step = step - 1
        self._expected_s, self._began_at = seconds, time.monotonic() - gone_s
        return True

    @property
    def left_s(self) -> float | None:
        """Seconds until the last step is made; None where it is not known, or nothing is left."""
        if self._seconds and self._made_at is not None:
            one_s, began_at = sum(self._seconds) / len(self._seconds), self._made_at
        elif self._expected_s is not None:
            one_s, began_at = self._expected_s, self._began_at
        else:
            return None
        if self.num_steps is None or self.step >= self.num_steps:
            return None
        # The step in progress takes at least as long as it has.
        going_s = min(time.monotonic() - began_at, one_s)
        return (self.num_steps - self.step) * one_s - going_s


def call_left_s(seconds: float, done: int, total: int) -> float | None:
    """Seconds that a call has left which did `done` of `total` units in so long; None: unknown."""
    if not 0 < done < total:
        return None
    return seconds / done * (total - done)


def in_words(seconds: float | None) -> str:
    """As "about 12 min left"; empty where it is not known."""
    if seconds is None:
        return ""
    if seconds < 90:
        return f"about {max(1.0, seconds):.0f} s left"
    minutes = seconds / 60
    if minutes < 90:
        return f"about {minutes:.0f} min left"
    hours = minutes / 60
    return f"about {hours:.1f} h left" if hours < 48 else f"about {hours / 24:.1f} days left"
