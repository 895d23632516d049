"""Contract between a run and the loop that makes its steps, ours or a client's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from rolemesh.coordinator.dataflow.futures import Node
from rolemesh.coordinator.dataflow.graph import StepGraph
from rolemesh.coordinator.run.evaluation import Evaluation
from rolemesh.coordinator.run.wishes import Wishes


class RunLoop(ABC):
    """The progress of a run, and its results. Owner: one asyncio loop."""

    def __init__(self, wishes: Wishes) -> None:
        """Prepares; no step is made yet."""
        self.wishes = wishes
        self.step = 0
        """Steps committed."""
        self.activity = "initialize"
        """What the run does, for messages to people."""
        self.dataflow: StepGraph | None = None
        """Graph of the newest step or evaluation."""
        self.step_in_progress: StepGraph | None = None
        """Graph of the step that is being made; None between steps."""
        self.records: list[Mapping[str, float]] = []
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """Seconds by phase, over the whole run."""
        self.before: Evaluation | None = None
        self.after: Evaluation | None = None
        self.model_directory: Path | None = None

    @abstractmethod
    async def run(self) -> None:
        """Everything between initialised services and the end of the run."""

    @abstractmethod
    def running(self, service: str) -> list[Node]:
        """Calls of a service that are in flight."""
