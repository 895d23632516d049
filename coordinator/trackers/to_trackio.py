"""Scalars to Trackio. Needs the extra "trackio"."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from rolemesh.coordinator.recipe.trackers import TrackioSpec
from rolemesh.coordinator.trackers.tracker import RunFacts


class TrackioTracker:
    """One run of Trackio."""

    def __init__(self, spec: TrackioSpec) -> None:
        self._spec = spec
        self._run: Any = None

    def start(self, run: RunFacts, config: Mapping[str, Any]) -> None:
        """Opens the run."""
        trackio = importlib.import_module("trackio")
        self._run = trackio.init(
            project=self._spec.project,
            name=run.run_id,
            space_id=self._spec.space_id,
            config=dict(config),
            embed=False,
        )

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Logs a step."""
        self._run.log(dict(scalars), step=step)

    def finish(self, state: str) -> None:
        """Sends what is left; Trackio knows no state."""
        self._run.finish()
