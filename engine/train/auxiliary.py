"""Losses over rows of their own that are added to an update's main loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rolemesh.engine.experience import Experience
from rolemesh.engine.packing.batching import balanced_partition
from rolemesh.engine.parallel.mesh import RankGroup
from rolemesh.engine.specs import LossSpec
from rolemesh.engine.train.rows import HeldRows

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
    rows: Sequence[int] | None = None
    """Which rows of the whole batch those of `batch` are; None: all, in order."""
    lengths: Sequence[int] | None = None
    """Tokens in each row of the whole batch, where `rows` is given."""

    def places(self, dp: RankGroup, num_steps: int) -> list[list[int]]:
        """Places in `batch` of this rank's part of each optimizer step.

        Raises:
            ValueError: rows and lengths do not fit the batch, or a row of a part is not held.
        """
        held = HeldRows(self.batch, self.rows, self.lengths)
        return held.places([parts[dp.index] for parts in _dealt(held.lengths, num_steps, dp.size)])

    def has_rows(self, step: int, num_steps: int) -> bool:
        """Whether any rank has rows of this loss in an optimizer step; equal on all ranks."""
        num_rows = self.batch.num_rows if self.lengths is None else len(self.lengths)
        first, stop = _range(num_rows, step, num_steps)
        return first < stop

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


def rows_of_auxiliary(
    lengths: Sequence[int], *, num_steps: int, num_parts: int, part: int
) -> list[int]:
    """Rows of an auxiliary loss that one data-parallel rank needs in any step, ascending.

    Args:
        lengths: tokens in each row.
        num_steps: optimizer steps of the update.
        num_parts: data-parallel ranks.
        part: this one of them.
    """
    return sorted(row for parts in _dealt(lengths, num_steps, num_parts) for row in parts[part])


def _dealt(lengths: Sequence[int], num_steps: int, num_parts: int) -> list[list[list[int]]]:
    """Rows by optimizer step and data-parallel rank; with fewer rows than steps, some have none."""
    dealt = []
    for step in range(num_steps):
        first, stop = _range(len(lengths), step, num_steps)
        parts = balanced_partition(lengths[first:stop], num_parts)
        dealt.append([[first + place for place in part] for part in parts])
    return dealt


def _range(num_rows: int, step: int, num_steps: int) -> tuple[int, int]:
    return step * num_rows // num_steps, (step + 1) * num_rows // num_steps
