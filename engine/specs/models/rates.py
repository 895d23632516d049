"""Schedules of the learning rate: how it falls after the warm-up.

A schedule is a function of the count of optimizer steps alone. That count is saved with the
weights, so a rate has no state of its own.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Annotated, Literal

from pydantic import Field

from rolemesh.engine.specs.base import Spec


class ConstantRateSpec(Spec):
    """The rate stays as it is."""

    type: Literal["constant"] = "constant"


class DecaySpec(Spec):
    """The base of schedules that fall to a minimum, and stay there."""

    min_learning_rate: float = Field(default=0.0, ge=0)
    """Learning rate at the end."""
    optimizer_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps of the run after which the rate is at its minimum, warm-up included. None:
    run.steps, times the optimizer steps of one step."""

    @abstractmethod
    def left(self, share: float) -> float:
        """Part of the way from minimum to peak that is left.

        Args:
            share: Share of the decay that lies behind, 0 to 1.
        """


class LinearRateSpec(DecaySpec):
    """The rate falls in a straight line."""

    type: Literal["linear"] = "linear"

    def left(self, share: float) -> float:
        """Falls evenly."""
        return 1.0 - share


class CosineRateSpec(DecaySpec):
    """The rate falls along half a cosine (arXiv 1608.03983, eq. 5, without restarts)."""

    type: Literal["cosine"] = "cosine"

    def left(self, share: float) -> float:
        """Falls slowly, then fast, then slowly."""
        return 0.5 * (1.0 + math.cos(math.pi * share))


RateScheduleSpec = Annotated[
    ConstantRateSpec | LinearRateSpec | CosineRateSpec, Field(discriminator="type")
]
