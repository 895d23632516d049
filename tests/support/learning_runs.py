"""Runs that learn: the real coordinator over real services, tiny models, tasks with known optima.

One set of services serves run after run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support import warm_processes
from support.run_results import unexplained
from support.services import wait_for_announcement

from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.run.training_run import TrainingRun
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.store import RunState

ROLES = ("actor", "critic", "reference", "teacher", "reward", "cost")
START_TIMEOUT_S = 300.0
"""Six processes that import torch at once, on a machine that has two cores and other work."""


@dataclass(frozen=True)
class LearnedRun:
    """What a run left behind."""

    records: list[dict[str, float]]
    """One a step."""
    model: Path
    """The exported folder."""

    def curve(self, metric: str) -> list[float]:
        """The metric, step by step."""
        return [record[metric] for record in self.records]

    def last(self, metric: str, number: int) -> float:
        """Mean of the metric over the last steps."""
        return sum(self.curve(metric)[-number:]) / number


class ServiceOfRole:
    """A process that serves a role, and outlives runs."""

    def __init__(self, role: str, directory: Path, *flags: str) -> None:
        """Begins to start it; its log and announcement are in the directory."""
        self._announce = directory / f"{role}.json"
        self._announce.unlink(missing_ok=True)
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", f"rolemesh.services.{role}", "--threads", "1", *flags),
                *("--folder", "/", "--announce", str(self._announce)),
                *("--log-directory", str(directory), "--parent-pid", str(os.getpid())),
            ],
            env={**os.environ, **warm_processes.services(), "OMP_WAIT_POLICY": "PASSIVE"},
            stderr=subprocess.DEVNULL,
        )

    def announced(self) -> dict[str, Any]:
        """Address and pid, once it serves."""
        return wait_for_announcement(self._process, self._announce, timeout_s=START_TIMEOUT_S)

    def kill(self) -> None:
        """Ends the service itself, at once."""
        if self._announce.is_file() and self._process.poll() is None:
            os.kill(self.announced()["pid"], signal.SIGKILL)
        self._process.kill()
        self._process.wait(30)


@contextmanager
def service_processes(
    directory: Path, roles: Sequence[str] = ROLES, *flags: str
) -> Iterator[dict[str, str]]:
    """A process for each role, which outlives runs; gives their addresses.

    One loop for all of them would do without processes, but transformers loads one model at a time:
    two threads of a process that load at once spoil each other's weights.
    """
    started: dict[str, ServiceOfRole] = {}
    try:
        for role in roles:
            started[role] = ServiceOfRole(role, directory, *flags)
        yield {role: str(one.announced()["address"]) for role, one in started.items()}
    finally:
        for one in started.values():
            one.kill()


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


async def learn(
    recipe: Mapping[str, Any], addresses: Mapping[str, str], directory: Path
) -> LearnedRun:
    """Makes the run; fails unless it makes all its steps."""
    used = {role: {"address": address} for role, address in addresses.items()}
    checked = Recipe.model_validate({**recipe, "services": used, "store": {"type": "memory"}})
    run = TrainingRun(checked, directory=directory, addresses=addresses, store=MemoryStateStore())
    summary = await run.execute()
    assert summary.state is RunState.SUCCEEDED
    assert summary.model_directory is not None
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert unexplained(records) == []
    return LearnedRun(records, summary.model_directory)
