"""An exponential moving mean of scores, which checkpoints keep."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rolemesh.engine.specs import RunningBaselineSpec


class MovingMean:
    """The mean score of the steps so far, of which older ones count less and less.

        value = decay * value + (1 - decay) * mean score of the step

    The first step's mean is the first value. Owned by the compute thread.

    Example: decay 0.9 and steps with means 1 and 0: None, then 1, then 0.9.
    """

    def __init__(self, spec: RunningBaselineSpec) -> None:
        self._decay = spec.decay
        self._value: float | None = None

    @property
    def value(self) -> float | None:
        """The mean now; None before the first step."""
        return self._value

    def update(self, mean_score: float) -> None:
        """Moves the mean after a step with this mean score."""
        if not math.isfinite(mean_score):
            raise ValueError(f"mean score is {mean_score}: check the reward and the KL to it")
        if self._value is None:
            self._value = mean_score
        else:
            self._value = self._decay * self._value + (1 - self._decay) * mean_score

    def state_dict(self) -> dict[str, Any]:
        """Its value, exact in JSON."""
        return {"value": self._value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores it; the decay stays that of the recipe.

        Raises:
            ValueError: The state is not one of a moving mean.
        """
        value = state.get("value")
        is_number = isinstance(value, int | float) and math.isfinite(value)
        if set(state) != {"value"} or not (value is None or is_number):
            raise ValueError(
                f"state of the running baseline is {dict(state)}: it must have value alone, a "
                "finite number or null; take an older checkpoint"
            )
        self._value = None if value is None else float(value)
