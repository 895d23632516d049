"""The Lagrange multiplier of Safe RLHF: the weight of the cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rolemesh.engine.specs import SafeRlhfSpec


class LagrangeMultiplier:
    """Weight of the cost, raised while the mean cost is above its limit and lowered below.

        ln lambda = min(ln lambda + rate * lambda * (mean cost - limit), ln max)

    (arXiv 2310.12773, eq. 31: a gradient step on lambda * (mean cost - limit) by ln lambda, which
    keeps lambda positive.) The bound is ours. Owned by the compute thread. The order within a
    step is that of eq. 30 and 31: weigh with `value`, then `update` once with the cost measured.

    Example: lambda 1, rate 0.1, limit 2; a mean cost of 3 gives lambda exp(0.1) = 1.105.
    """

    def __init__(self, spec: SafeRlhfSpec) -> None:
        self._rate = spec.multiplier_rate
        self._limit = spec.cost_limit
        self._largest = math.log(spec.max_multiplier)
        self._log_value = math.log(spec.initial_multiplier)

    @property
    def value(self) -> float:
        """The multiplier now, above 0."""
        return math.exp(self._log_value)

    def update(self, mean_cost: float) -> None:
        """Moves the multiplier after a step with the mean cost a row."""
        if not math.isfinite(mean_cost):
            raise ValueError(f"mean cost is {mean_cost}: check the role that gives costs")
        moved = self._log_value + self._rate * self.value * (mean_cost - self._limit)
        self._log_value = min(moved, self._largest)

    def state_dict(self) -> dict[str, Any]:
        """Its logarithm."""
        return {"log_multiplier": self._log_value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores it; limit, rate and bound stay those of the recipe.

        Raises:
            ValueError: The state is not one of a Lagrange multiplier.
        """
        log_value = state.get("log_multiplier")
        if set(state) != {"log_multiplier"} or not isinstance(log_value, int | float):
            raise ValueError(
                f"state of the Lagrange multiplier is {dict(state)}: it must have the number "
                "log_multiplier alone; take an older checkpoint"
            )
        if not math.isfinite(log_value):
            raise ValueError(
                f"log_multiplier of the Lagrange multiplier's state is {log_value}: it must be "
                "finite; take an older checkpoint"
            )
        self._log_value = min(float(log_value), self._largest)
