"""Gradients and updates of a trainer whose ranks all hold the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rolemesh.engine.experience import Experience
from rolemesh.engine.models.scoring import Progress
from rolemesh.engine.packing.balance import balanced_partition
from rolemesh.engine.packing.batching import unit_lengths, unit_rows
from rolemesh.engine.parallel.mesh import RankGroup
from rolemesh.engine.specs import LossSpec
from rolemesh.engine.train.auxiliary import AuxiliaryLoss
from rolemesh.engine.train.plan import UpdatePlan
from rolemesh.engine.train.trainer import Trainer

ALONE = RankGroup((0,), 0, None)


def for_whole_batch(plan: UpdatePlan) -> UpdatePlan:
    """The same steps for a rank that holds the whole batch, in order."""
    steps = [[plan.rows[place] for place in places] for places in plan.steps]
    return replace(plan, rows=range(len(plan.lengths)), steps=steps)


def plan_whole(trainer: Trainer, batch: Experience, rows_per_unit: int = 1) -> UpdatePlan:
    """A plan of one step, of which each data-parallel replica takes a part of about equal work."""
    lengths, all_parts = batch["tokens"].lengths().tolist(), trainer.mesh.parts
    parts = balanced_partition(unit_lengths(lengths, rows_per_unit), all_parts.size)
    own = unit_rows(parts[all_parts.index], rows_per_unit)
    return for_whole_batch(UpdatePlan.of_mini_batch(lengths, own, rows_per_unit))


def forward_backward(
    trainer: Trainer,
    batch: Experience,
    loss: LossSpec,
    progress: Progress | None = None,
    *,
    rows_per_unit: int = 1,
    without_gradients: bool = False,
) -> dict[str, float]:
    """The metrics of `Trainer.forward_backward` over all rows."""
    plan = plan_whole(trainer, batch, rows_per_unit)
    metrics, _ = trainer.forward_backward(
        batch, loss, plan, progress, without_gradients=without_gradients
    )
    return metrics


def auxiliary_whole(
    batch: Experience, loss: LossSpec, weight: float, *, num_steps: int, parts: RankGroup = ALONE
) -> AuxiliaryLoss:
    """A further loss, the rows of which are dealt out over so many optimizer steps."""
    plan = UpdatePlan.dealt(batch["tokens"].lengths().tolist(), parts, num_steps=num_steps)
    return AuxiliaryLoss(batch=batch, loss=loss, weight=weight, plan=for_whole_batch(plan))


def update_whole(
    trainer: Trainer,
    batch: Experience,
    loss: LossSpec,
    *,
    auxiliary: Sequence[AuxiliaryLoss] = (),
    **numbers: Any,
) -> dict[str, float]:
    """Trains on all rows; `numbers`: those of `UpdatePlan.of_update`, and perhaps `progress`."""
    progress = numbers.pop("progress", None)
    lengths = batch["tokens"].lengths().tolist()
    plan = for_whole_batch(UpdatePlan.of_update(lengths, trainer.mesh.parts, **numbers))
    return trainer.update(batch, loss, plan, progress=progress, auxiliary=auxiliary)
