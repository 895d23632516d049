"""Runs of fake roles that recover, and what they would have learnt undisturbed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.fake_recipes import split_pools
from support.fake_roles import FakeMesh, fake_mesh, fake_recipe
from support.fake_runs import make_run, read_lines
from support.run_results import with_loads

from rolemesh.coordinator.run.training_run import TrainingRun
from rolemesh.coordinator.state.memory import MemoryStateStore

STEPS = 3
ROLES = ("actor", "critic", "reference", "reward")
RECOVERY: dict[str, Any] = {"attempts": 3, "pause_s": 0.01}


def recipe(**run: Any) -> Any:
    """Three steps, each role in a pool of its own."""
    settings = {"steps": STEPS, "evaluation": {"num_prompts": 4, "every_steps": 2}, **run}
    return fake_recipe(**{"recovery": RECOVERY, **settings}, pools=split_pools(ROLES))


def learnt(directory: Path) -> list[dict[str, Any]]:
    """What the records say of learning, without times and traffic, and the loads of experts."""
    records = [
        {
            name: value
            for name, value in record.items()
            if not name.startswith(("time/", "coordinator/", "dataflow/"))
            and name != "tokens_per_second"
        }
        for record in read_lines(directory / "metrics.jsonl")
    ]
    return with_loads(records, directory)


_undisturbed: list[dict[str, Any]] = []
"""Of the run that nothing happens to, which is the same each time."""


async def undisturbed(directory: Path) -> list[dict[str, Any]]:
    """What such a run learns; made once a process."""
    if not _undisturbed:
        async with fake_mesh(has_cuts=True) as mesh:
            await make_run(mesh, directory, recipe(), MemoryStateStore()).execute()
            _undisturbed.extend(learnt(directory))
    return _undisturbed


def recovering_run(
    mesh: FakeMesh, directory: Path, store: MemoryStateStore, **settings: Any
) -> TrainingRun:
    """A run that starts lost services again, and waits little for word of a loss."""
    run = make_run(mesh, directory, recipe(), store, restart=mesh.restart, **settings)
    run._loss_grace_s = 0.2
    return run
