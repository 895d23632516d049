"""Updates by a trainer that holds its whole batch and makes the plan for itself."""

from __future__ import annotations

from typing import Any

from rolemesh.engine.experience import Experience
from rolemesh.engine.specs import LossSpec
from rolemesh.engine.train.trainer import Trainer


def update_whole(
    trainer: Trainer, batch: Experience, loss: LossSpec, *, auxiliary: Any = (), **numbers: Any
) -> dict[str, float]:
    """Trains on all rows; `numbers` are those of `Trainer.plan`, and may have `progress`."""
    progress = numbers.pop("progress", None)
    plan = trainer.plan(batch, **numbers)
    return trainer.update(batch, loss, plan, progress=progress, auxiliary=auxiliary)
