"""Contract between a run and the loop that makes its steps, ours or a client's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from rolemesh.coordinator.dataflow.futures import Node
from rolemesh.coordinator.dataflow.graph import StepGraph
from rolemesh.coordinator.run.parts import RunParts


class RunLoop(ABC):
    """The progress of a run, and its results. Owner: one asyncio loop."""

    def __init__(self, parts: RunParts) -> None:
        """Prepares; no step is made yet."""
        self.parts = parts
        self.wishes = parts.wishes
        self.progress = parts.progress
        """What the run has reached."""
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
