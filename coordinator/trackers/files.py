"""The two trackers that every run has: JSON lines, and TensorBoard's event files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from rolemesh.coordinator.trackers.tensorboard import ScalarWriter
from rolemesh.coordinator.trackers.tracker import RunFacts

METRICS_FILE = "metrics.jsonl"
"""In a run's folder: the record of each step, one a line."""


class JsonLinesTracker:
    """Writes metrics.jsonl.

    Invariant: a line is whole once `log` returns.
    """

    def __init__(self) -> None:
        self._lines: TextIO | None = None

    def start(self, run: RunFacts, config: Mapping[str, Any]) -> None:
        """Opens the file."""
        self._lines = (Path(run.directory) / METRICS_FILE).open("a", encoding="utf-8")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Appends a line."""
        assert self._lines is not None
        self._lines.write(json.dumps({"step": step, **scalars}) + "\n")
        self._lines.flush()

    def finish(self, state: str) -> None:
        """Closes the file."""
        if self._lines is not None:
            self._lines.close()


class TensorBoardTracker:
    """Writes tensorboard/ in the run's folder."""

    def __init__(self) -> None:
        self._board: ScalarWriter | None = None

    def start(self, run: RunFacts, config: Mapping[str, Any]) -> None:
        """Opens the event file."""
        self._board = ScalarWriter(Path(run.directory) / "tensorboard")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Appends an event."""
        assert self._board is not None
        self._board.write(step, scalars)

    def finish(self, state: str) -> None:
        """Closes the event file."""
        if self._board is not None:
            self._board.close()
