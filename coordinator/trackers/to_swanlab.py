"""Scalars to SwanLab. Needs the extra "swanlab"."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rolemesh.coordinator.recipe.trackers import SwanlabSpec
from rolemesh.coordinator.trackers.tracker import RunFacts

_STATE = {"succeeded": "success", "stopped": "aborted", "failed": "crashed"}


class SwanlabTracker:
    """One run of SwanLab."""

    def __init__(self, spec: SwanlabSpec) -> None:
        self._spec = spec
        self._run: Any = None

    def start(self, run: RunFacts, config: Mapping[str, Any]) -> None:
        """Opens the run; online this asks the server."""
        swanlab = importlib.import_module("swanlab")
        self._run = swanlab.init(
            project=self._spec.project,
            workspace=self._spec.workspace,
            mode=self._spec.mode,
            name=run.run_id,
            log_dir=str(Path(run.directory) / "swanlab"),
            config=dict(config),
        )

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Logs a step."""
        self._run.log(dict(scalars), step=step)

    def finish(self, state: str) -> None:
        """Sends what is left."""
        error = "the run failed" if state == "failed" else None
        self._run.finish(_STATE[state], error=error)
