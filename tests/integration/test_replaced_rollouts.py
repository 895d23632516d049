"""Rollout services of a synchronous schedule: replaced while the step goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.fake_recipes import PPO_ROLES, fake_recipe, split_pools
from support.fake_roles import FakeMesh, expected_weight, fake_mesh, until
from support.fake_runs import kill_during, make_run, read_lines

from rolemesh.coordinator.run.folders.summary import RunSummary
from rolemesh.coordinator.run.training_run import TrainingRun
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.store import RunState

ROLES = (*PPO_ROLES, "rollout")
STEPS = 3
VICTIM = "rollout-0"
SYNC = {"type": "sync"}
# Two blocks for each of the two services, which sample three rows or more of a step.
BLOCKS = {"type": "sync", "block_rows": 2}


def run_of(mesh: FakeMesh, directory: Path, sampler: dict[str, Any] = SYNC) -> TrainingRun:
    recipe = fake_recipe(
        roles=ROLES,
        sampler=sampler,
        pools=split_pools(ROLES),
        services={"rollout": {"replicas": 2}},
        prompts_per_step=4,
        steps=STEPS,
        recovery={"attempts": 3, "pause_s": 0.0},
        evaluation={"num_prompts": 4},
    )
    run = make_run(mesh, directory, recipe, MemoryStateStore(), restart=mesh.restart)
    run._loss_grace_s = 0.2
    return run


async def undisturbed(directory: Path) -> list[dict[str, float]]:
    async with fake_mesh(ROLES, replicas=2, has_cuts=True) as mesh:
        await run_of(mesh, directory).execute()
    return learnt(directory)


def learnt(directory: Path) -> list[dict[str, float]]:
    names = ("step", "kl/mean", "score", "eval/score", "completion_length/mean")
    records = read_lines(directory / "metrics.jsonl")
    assert records
    return [{name: record[name] for name in names if name in record} for record in records]


def asked(mesh: FakeMesh, method: str, step: int) -> int:
    """Answered calls of the victim in a step, without those of an evaluation."""
    return sum(
        (call.service, call.method, call.step, call.state) == (VICTIM, method, step, "done")
        and not call.key[3].startswith("evaluate.")
        for call in mesh.calls
    )


def check_goes_on(mesh: FakeMesh, summary: RunSummary) -> None:
    """The run never went back: one epoch, nothing attached or restored."""
    assert summary.state is RunState.SUCCEEDED
    assert mesh.restarted == [VICTIM]
    assert mesh.roles["actor"].weight == expected_weight(STEPS)
    assert {call.key[1] for call in mesh.calls} == {1}
    assert not {"Attach", "RestoreCut"} & {call.method for call in mesh.calls}
    (recovered,) = summary.recoveries
    assert (recovered.restarted, recovered.lost_steps) == ((VICTIM,), 0)


@pytest.mark.parametrize("sampler", [SYNC, BLOCKS], ids=["whole", "blocks"])
async def test_a_generation_that_loses_its_service_is_made_by_the_next_process(
    sampler: dict[str, Any], tmp_path: Path
) -> None:
    async with fake_mesh(ROLES, replicas=2, has_cuts=True) as mesh:
        run = run_of(mesh, tmp_path, sampler)
        check_goes_on(mesh, await kill_during(run, mesh, VICTIM, "Generate", VICTIM, 2))
        # The new process gets the weights of the step; every other step brings its own.
        assert [asked(mesh, "UpdateWeights", step) for step in (2, 3)] == [2, 1]
        assert [asked(mesh, "Generate", step) for step in (1, 2, 3)] == [1, 1, 1]
    assert learnt(tmp_path) == await undisturbed(tmp_path / "undisturbed")


async def test_blocks_that_were_handed_out_before_the_loss_come_again(tmp_path: Path) -> None:
    async with fake_mesh(ROLES, replicas=2, has_cuts=True) as mesh:
        run = run_of(mesh, tmp_path, BLOCKS)
        gate = mesh.roles[VICTIM].block_gates[1] = asyncio.Event()
        task = asyncio.create_task(run.execute())
        sent = f"{VICTIM}.Generate sends block 0"
        await until(lambda: sent in mesh.log)
        # Its reader is at work when the block is lost.
        await until(lambda: any("reference.ComputeLogprobs" in entry for entry in mesh.log))
        await mesh.roles[VICTIM].stop()
        run.service_lost(VICTIM, "was killed by signal 9")
        gate.set()
        check_goes_on(mesh, await task)
        assert mesh.log.count(sent) == STEPS + 1
    assert learnt(tmp_path) == await undisturbed(tmp_path / "undisturbed")


@pytest.mark.parametrize("sampler", [SYNC, BLOCKS], ids=["whole", "blocks"])
async def test_trajectories_that_are_lost_are_sampled_again_where_they_are_read(
    sampler: dict[str, Any], tmp_path: Path
) -> None:
    async with fake_mesh(ROLES, replicas=2, has_cuts=True) as mesh:
        # The updates read the tokens, which lay on the victim.
        run = run_of(mesh, tmp_path, sampler)
        check_goes_on(mesh, await kill_during(run, mesh, "actor", "ComputeAdvantages", VICTIM, 2))
        assert [asked(mesh, "UpdateWeights", step) for step in (2, 3)] == [2, 1]
        assert [asked(mesh, "Generate", step) for step in (1, 2, 3)] == [1, 2, 1]
    assert learnt(tmp_path) == await undisturbed(tmp_path / "undisturbed")


async def test_weights_that_were_on_their_way_go_to_the_next_process(tmp_path: Path) -> None:
    async with fake_mesh(ROLES, replicas=2, has_cuts=True) as mesh:
        run = run_of(mesh, tmp_path)
        check_goes_on(mesh, await kill_during(run, mesh, VICTIM, "UpdateWeights", VICTIM, 2))
        assert [asked(mesh, "UpdateWeights", step) for step in (2, 3)] == [1, 1]
    assert learnt(tmp_path) == await undisturbed(tmp_path / "undisturbed")


async def test_an_evaluation_goes_on_with_the_weights_that_it_began_with(tmp_path: Path) -> None:
    async with fake_mesh(ROLES, replicas=2, has_cuts=True) as mesh:
        run = run_of(mesh, tmp_path)
        check_goes_on(mesh, await kill_during(run, mesh, VICTIM, "Generate", VICTIM, 0))
        # The first step samples with the version that the evaluation was given.
        assert asked(mesh, "UpdateWeights", 1) == 0
    assert learnt(tmp_path) == await undisturbed(tmp_path / "undisturbed")


@pytest.mark.parametrize(
    "sampler", [{"type": "one_step_ahead"}, {"type": "async", "max_staleness": 1}]
)
async def test_what_is_sampled_ahead_begins_a_new_attempt(
    sampler: dict[str, Any], tmp_path: Path
) -> None:
    async with fake_mesh(ROLES, replicas=2, has_cuts=True) as mesh:
        run = run_of(mesh, tmp_path, sampler)
        summary = await kill_during(run, mesh, "actor", "ComputeAdvantages", VICTIM, 2)
        assert summary.state is RunState.SUCCEEDED
        assert {call.key[1] for call in mesh.calls} == {1, 2}
        assert mesh.roles["actor"].weight == expected_weight(STEPS)
