"""Contract between a run and the loop that makes its steps, ours or a client's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from rolemesh.coordinator.dataflow.futures import Node
from rolemesh.coordinator.dataflow.graph import StepGraph
from rolemesh.coordinator.run.reporting.wishes import Wishes
from rolemesh.coordinator.run.saving.progress import RunProgress


class RunLoop(ABC):
    """The progress of a run, and its results. Owner: one asyncio loop."""

    def __init__(self, wishes: Wishes, progress: RunProgress | None = None) -> None:
        """Prepares; no step is made yet.

        Args:
            wishes: Wishes of users for the run.
            progress: What the run has reached before; None: it begins.
        """
        self.wishes = wishes
        self.progress = progress or RunProgress()
        self.activity = "initialize"
        """What the run does, for messages to people."""
        self.dataflow: StepGraph | None = None
        """Graph of the newest step or evaluation."""
        self.step_in_progress: StepGraph | None = None
        """Graph of the step that is being made; None between steps."""
        self.model_directory: Path | None = None

    @property
    def step(self) -> int:
        """Steps committed."""
        return self.progress.step

    @abstractmethod
    async def run(self) -> None:
        """Everything between initialised services and the end of the run."""

    @abstractmethod
    def running(self, service: str) -> list[Node]:
        """Calls of a service that are in flight."""
