"""Scalars to packages whose `init` gives a run: wandb, Trackio, SwanLab.

Each needs the extra of its name.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rolemesh.coordinator.recipe.sections.trackers import SwanlabSpec, TrackioSpec, WandbSpec
from rolemesh.coordinator.trackers.tracker import RunFacts

_SWANLAB_STATES = {"succeeded": "success", "stopped": "aborted", "failed": "crashed"}


class _RunOfPackage:
    """What the runs of these packages have in common."""

    _run: Any = None

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Logs under the package's own step."""
        self._run.log(dict(scalars), step=step)


class WandbTracker(_RunOfPackage):
    """One run of Weights & Biases."""

    def __init__(self, spec: WandbSpec) -> None:
        self._spec = spec

    def start(self, run: RunFacts, config: Mapping[str, Any]) -> None:
        """Opens the run; online this asks the server."""
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            project=self._spec.project,
            entity=self._spec.entity,
            group=self._spec.group,
            mode=self._spec.mode,
            id=run.run_id,
            name=run.run_id,
            dir=run.directory,
            config=dict(config),
            # The tracker's process prints nothing that belongs to the run.
            settings=wandb.Settings(console="off"),
        )

    def finish(self, state: str) -> None:
        """Sends what is left."""
        self._run.finish(exit_code=int(state == "failed"))


class TrackioTracker(_RunOfPackage):
    """One run of Trackio."""

    def __init__(self, spec: TrackioSpec) -> None:
        self._spec = spec

    def start(self, run: RunFacts, config: Mapping[str, Any]) -> None:
        """Opens the run."""
        self._run = importlib.import_module("trackio").init(
            project=self._spec.project,
            name=run.run_id,
            space_id=self._spec.space_id,
            config=dict(config),
            embed=False,
        )

    def finish(self, state: str) -> None:
        """Sends what is left; Trackio knows no state."""
        self._run.finish()


class SwanlabTracker(_RunOfPackage):
    """One run of SwanLab."""

    def __init__(self, spec: SwanlabSpec) -> None:
        self._spec = spec

    def start(self, run: RunFacts, config: Mapping[str, Any]) -> None:
        """Opens the run; online this asks the server."""
        self._run = importlib.import_module("swanlab").init(
            project=self._spec.project,
            workspace=self._spec.workspace,
            mode=self._spec.mode,
            name=run.run_id,
            log_dir=str(Path(run.directory) / "swanlab"),
            config=dict(config),
        )

    def finish(self, state: str) -> None:
        """Sends what is left."""
        error = "the run failed" if state == "failed" else None
        self._run.finish(_SWANLAB_STATES[state], error=error)
