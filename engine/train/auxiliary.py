"""Losses over rows of their own that are added to an update's main loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rolemesh.engine.experience import Experience
from rolemesh.engine.specs import LossSpec
from rolemesh.engine.train.plan import UpdatePlan

METRIC_PREFIX = "auxiliary"
"""Metrics of an auxiliary loss are called auxiliary/<its type>/<name>."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuxiliaryLoss:
    """A loss that is added to the main one in each optimizer step, e.g. one of pretraining.

    Its rows are dealt out over the optimizer steps, in order; it is normalised by its own counts
    of that step, and its gradient is multiplied by the weight.
    """

    batch: Experience
    """The rows that this rank holds, with the columns that the loss names."""
    loss: LossSpec
    """What to minimise."""
    weight: float
    """Of its gradient, >= 0. Its metrics are not weighted."""
    plan: UpdatePlan
    """Which rows `batch` has, and in which steps, by `UpdatePlan.dealt`."""

    @property
    def prefix(self) -> str:
        """Of its metrics, the last slash included."""
        return f"{METRIC_PREFIX}/{self.loss.type}/"


def check_auxiliary(losses: Sequence[AuxiliaryLoss]) -> None:
    """Raises ValueError for a weight that is none, and for two losses whose metrics would mix."""
    types = [auxiliary.loss.type for auxiliary in losses]
    for auxiliary in losses:
        if not (math.isfinite(auxiliary.weight) and auxiliary.weight >= 0):
            raise ValueError(
                f"weight of auxiliary loss {auxiliary.loss.type!r} is {auxiliary.weight}: give a "
                "finite number of at least 0"
            )
        if types.count(auxiliary.loss.type) > 1:
            raise ValueError(
                f"auxiliary has {types.count(auxiliary.loss.type)} losses of type "
                f"{auxiliary.loss.type!r}: give one of each type, with all of its rows"
            )
