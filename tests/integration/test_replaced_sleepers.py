"""Services that leave their devices to each other: replaced, with one of them awake at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.fake_roles import FakeMesh, expected_weight, fake_mesh, fake_recipe
from support.fake_runs import kill_during, make_run, read_lines

from rolemesh.coordinator.run.folders.summary import RunSummary
from rolemesh.coordinator.run.training_run import TrainingRun
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.store import RunState

ROLES = ("actor", "critic", "reference", "reward")
STEPS = 3


def run_of(mesh: FakeMesh, directory: Path) -> TrainingRun:
    recipe = fake_recipe(
        recovery={"attempts": 3, "pause_s": 0.0},
        steps=STEPS,
        evaluation={"num_prompts": 4},
        pools={"all": {"roles": ROLES, "sleep": "always"}},
    )
    run = make_run(mesh, directory, recipe, MemoryStateStore(), restart=mesh.restart)
    run._loss_grace_s = 0.2
    return run


def learnt(directory: Path) -> list[dict[str, Any]]:
    return [
        {
            name: record[name]
            for name in ("step", "kl/mean", "score", "eval/score")
            if name in record
        }
        for record in read_lines(directory / "metrics.jsonl")
    ]


def note_end(mesh: FakeMesh, victim: str) -> None:
    """Has the log say when the victim's process ends: what it held on its devices is free then."""
    process = mesh.roles[victim]
    stop = process.stop

    async def told() -> None:
        mesh.log.append(f"{victim}.End")
        await stop()

    process.stop = told  # type: ignore[method-assign]


def check_one_is_awake(log: list[str]) -> None:
    """No process was loaded or woken on devices that another one still held."""
    awake: set[str] = set()
    for entry in log:
        service, _, what = entry.partition(".")
        if what in ("Initialize begins", "Wake"):
            assert awake <= {service}, entry
            awake.add(service)
        elif what in ("Sleep", "End"):
            awake.discard(service)


@pytest.mark.parametrize(
    ("service", "method", "victim"),
    [
        # Its own call waits for the new process, and has the devices.
        ("reward", "ComputeReward", "reward"),
        ("reference", "ComputeLogprobs", "reference"),
        # Another one computes: the new process waits until the devices are free.
        ("critic", "ComputeValues", "reference"),
        ("actor", "Generate", "reward"),
        # It has answered, and its answer is read later.
        ("actor", "ComputeAdvantages", "reward"),
    ],
)
async def test_a_service_that_sleeps_is_replaced_within_the_step(
    service: str, method: str, victim: str, tmp_path: Path
) -> None:
    async with fake_mesh(has_cuts=True) as mesh:
        await run_of(mesh, tmp_path / "undisturbed").execute()
    async with fake_mesh(has_cuts=True) as mesh:
        note_end(mesh, victim)
        summary: RunSummary = await kill_during(
            run_of(mesh, tmp_path), mesh, service, method, victim, 2
        )
        assert summary.state is RunState.SUCCEEDED
        assert mesh.restarted == [victim]
        assert mesh.roles["actor"].weight == expected_weight(STEPS)
        # One epoch: nothing went back.
        assert {call.key[1] for call in mesh.calls} == {1}
        check_one_is_awake(mesh.log)
    assert [one.lost_steps for one in summary.recoveries] == [0]
    assert learnt(tmp_path) == learnt(tmp_path / "undisturbed")
