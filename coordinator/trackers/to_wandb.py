"""Scalars to Weights & Biases. Needs the extra "wandb"."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from rolemesh.coordinator.recipe.trackers import WandbSpec
from rolemesh.coordinator.trackers.tracker import RunFacts


class WandbTracker:
    """One run of wandb."""

    def __init__(self, spec: WandbSpec) -> None:
        self._spec = spec
        self._run: Any = None

    def start(self, run: RunFacts, config: Mapping[str, Any]) -> None:
        """Opens the run; online this asks the server."""
        wandb = importlib.import_module("wandb")
        spec = self._spec
        self._run = wandb.init(
            project=spec.project,
            entity=spec.entity,
            group=spec.group,
            mode=spec.mode,
            id=run.run_id,
            name=run.run_id,
            dir=run.directory,
            config=dict(config),
            # The tracker's process prints nothing that belongs to the run.
            settings=wandb.Settings(console="off"),
        )

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Logs under wandb's own step."""
        self._run.log(dict(scalars), step=step)

    def finish(self, state: str) -> None:
        """Sends what is left."""
        self._run.finish(exit_code=int(state == "failed"))
