"""Metrics of an update from those of its optimizer steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from rolemesh.engine.algorithms.losses.base import add_metrics
from rolemesh.engine.algorithms.losses.off_policy import GAP_METRICS

FIRST_METRICS = frozenset(
    {*GAP_METRICS, "sampler_logprob_diff_mean", "sampler_logprob_diff_max", "entropy"}
)
"""Those that compare with the policy that sampled, or are of it: only the first mini-batch has the
weights that the update begins with. An entropy that no loss needs is computed there alone. Names
by age belong to them."""


class StepMetrics:
    """Means over optimizer steps.

    Example: steps with loss 1.0 and 2.0 and ratio_max 1.1 and 1.3 give loss 1.5, ratio_max 1.3.
    """

    def __init__(self) -> None:
        self._totals: dict[str, float] = {}
        self._counts: Counter[str] = Counter()

    def add(self, metrics: Mapping[str, float]) -> None:
        """Takes those of the next step; FIRST_METRICS of the first one alone."""
        is_first = not self._counts
        taken = {
            name: number
            for name, number in metrics.items()
            if is_first or not (name in FIRST_METRICS or name.startswith("age/"))
        }
        add_metrics(self._totals, taken)
        self._counts.update(taken.keys())

    def result(self) -> dict[str, float]:
        """Means over the steps that had the name; maxima for names that end in "_max"."""
        return {
            name: total if name.endswith("_max") else total / self._counts[name]
            for name, total in self._totals.items()
        }
