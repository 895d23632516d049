"""Runs of the coordinator against the fake roles, and what they tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.fake_roles import FakeMesh

from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.run.training_run import TrainingRun
from rolemesh.coordinator.run.watcher import WatchSettings
from rolemesh.coordinator.state.store import StateStore

SPLIT_POOLS = {role: {"roles": [role]} for role in ("actor", "critic", "reference", "reward")}
# A twentieth of the usual pause, so that tests of losses take less than a second or two.
QUICK_WATCH = WatchSettings(interval_s=0.05)


class Recorder:
    def __init__(self) -> None:
        self.phases: list[tuple[str, str, int, int]] = []
        self.records: list[dict[str, float]] = []
        self.events: list[str] = []

    def on_phase(self, role: str, stage: str, done: int, total: int) -> None:
        self.phases.append((role, stage, done, total))

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
        start_deadline_s=30,
        **settings,
    )


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
