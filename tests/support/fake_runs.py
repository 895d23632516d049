"""Runs of the coordinator against the fake roles, and what they tell."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from support.fake_roles import FakeMesh, hold_call

from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.run.folders.summary import RunSummary
from rolemesh.coordinator.run.services.watcher import WatchSettings
from rolemesh.coordinator.run.training_run import TrainingRun
from rolemesh.coordinator.state.store import StateStore

SPLIT_POOLS = {role: {"roles": [role]} for role in ("actor", "critic", "reference", "reward")}
# A twentieth of the usual pause, so that tests of losses take less than a second or two.
QUICK_WATCH = WatchSettings(interval_s=0.05)


class Recorder:
    def __init__(self) -> None:
        self.phases: list[tuple[str, str, int, int]] = []
        self.records: list[dict[str, float]] = []
        self.events: list[str] = []
        self.estimates: list[tuple[int, float, float]] = []

    def on_phase(self, role: str, stage: str, done: int, total: int) -> None:
        self.phases.append((role, stage, done, total))

    def on_estimate(self, step: int, seconds: float, gone_s: float) -> None:
        self.estimates.append((step, seconds, gone_s))

    def on_step(self, record: Any) -> None:
        self.records.append(dict(record))

    def on_event(self, text: str) -> None:
        self.events.append(text)


def make_run(
    mesh: FakeMesh, directory: Path, recipe: Recipe, store: StateStore, **settings: Any
) -> TrainingRun:
    return TrainingRun(
        recipe,
        directory=directory,
        addresses=mesh.addresses,
        store=store,
        watch=QUICK_WATCH,
        **{"start_deadline_s": 30, **settings},
    )


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def kill_during(
    run: TrainingRun, mesh: FakeMesh, service: str, method: str, victim: str, step: int
) -> RunSummary:
    """Makes the run; the victim is killed while the service answers the method in the step."""
    task = asyncio.create_task(run.execute())
    gate = await hold_call(mesh, service, method, step, task.done)
    await mesh.roles[victim].stop()
    # After the watcher's, the same news would be those of another loss.
    if victim not in run._lost.names and victim not in mesh.restarted:
        run.service_lost(victim, f"{victim} was killed by signal 9")
    gate.set()
    mesh.roles[service].gates.clear()
    return await task
