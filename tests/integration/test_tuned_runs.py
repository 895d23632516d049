"""Runs that tune themselves over gRPC: what changes, what does not, and what a failure costs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.fake_recipes import GRPO, fake_recipe, split_pools
from support.fake_roles import FakeMesh, fake_mesh, until
from support.fake_runs import Recorder, make_run, read_lines
from support.run_results import learnt

from rolemesh.coordinator.dataflow.futures import Node
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.run.saving.progress import RunProgress
from rolemesh.coordinator.run.saving.resume import reached
from rolemesh.coordinator.run.steps.told_steps import ToldSteps
from rolemesh.coordinator.run.training_run import TrainingRun
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.store import RunState
from rolemesh.rpc.errors import InvalidRequestError

ROLES = ("actor", "reward")
STEPS = 14
CONCURRENCY = "reward.source.concurrency"
JUDGING_S = 0.12
"""Of a step's rows with one request in flight: far more than all else of a step."""
OTHER_S = 0.002
"""Of each other call."""
SPACE = {CONCURRENCY: [6], "pools": [split_pools(ROLES)], "schedule.sampler.block_rows": [2]}


def recipe(space: dict[str, Any] | None, **run: Any) -> Recipe:
    return fake_recipe(
        roles=ROLES,
        algorithm=GRPO,
        reward={"source": {
            "type": "python", "function": "rewards.py:judge", "batch_size": 1, "concurrency": 1,
        }},
        steps=STEPS,
        evaluation={"num_prompts": 4, "every_steps": 5},
        recovery={"attempts": 3, "pause_s": 0.01},
        tuning=None if space is None else {"space": space},
        **run,
    )  # fmt: skip


@contextlib.asynccontextmanager
async def judged_mesh() -> AsyncIterator[FakeMesh]:
    """A mesh whose reward is as quick as it may have requests in flight.

    Steps are timed by what their calls would take, so that no load of the machine decides.
    """
    async with fake_mesh(ROLES, has_cuts=True) as mesh:
        measured = ToldSteps.record

        def record(
            told: ToldSteps, step: int, nodes: Sequence[Node], started: float
        ) -> dict[str, float]:
            seconds = lay_out(nodes, JUDGING_S / concurrency_of(mesh))
            return {**measured(told, step, nodes, started), "time/step": seconds}

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ToldSteps, "record", record)
            yield mesh


def lay_out(nodes: Sequence[Node], judging_s: float) -> float:
    """Gives the calls of a step times that follow from what they wait for; returns its seconds."""
    begun = nodes[0].queued_at
    ended: dict[int, float] = {}
    free: dict[str, float] = {}
    for node in nodes:
        node.ready_at = max((ended[before] for before in node.inputs), default=begun)
        node.started_at = max(node.ready_at, free.get(node.pool, begun))
        node.ended_at = node.started_at + (
            judging_s if node.method == "compute_reward" else OTHER_S
        )
        ended[node.node_id] = free[node.pool] = node.ended_at
    return max(ended.values()) - begun


def concurrency_of(mesh: FakeMesh) -> int:
    return int(mesh.roles["reward"].spec["source"]["concurrency"])


def run_of(
    mesh: FakeMesh, folder: Path, wanted: Recipe, store: MemoryStateStore, **settings: Any
) -> TrainingRun:
    run = make_run(mesh, folder, wanted, store, restart=mesh.restart, **settings)
    run._loss_grace_s = 0.2
    return run


async def untuned(folder: Path) -> list[dict[str, float]]:
    async with fake_mesh(ROLES, has_cuts=True) as mesh:
        await make_run(mesh, folder, recipe(None), MemoryStateStore()).execute()
    return learnt(folder)


async def test_a_tuned_run_learns_what_the_same_run_without_tuning_learns(tmp_path: Path) -> None:
    expected = await untuned(tmp_path / "untuned")
    folder, recorder = tmp_path / "tuned", Recorder()
    async with judged_mesh() as mesh:
        run = run_of(mesh, folder, recipe(SPACE), MemoryStateStore(), observer=recorder)
        summary = await run.execute()
        # The judge alone was given the run anew; each update was made once.
        initialized = [call.service for call in mesh.calls if call.method == "Initialize"]
        assert initialized.count("actor") == 1
        assert initialized.count("reward") > 1
        assert [call.step for call in mesh.of("actor.Update")] == list(range(1, STEPS + 1))
        # The same rows of the data in each step.
        starts = [call.request.prompts.start for call in mesh.of("actor.Generate")]  # type: ignore[attr-defined]
        assert starts == [3 * step for step in range(STEPS)]
        assert concurrency_of(mesh) == 6
    assert learnt(folder) == expected
    assert summary.recoveries == ()
    assert summary.tuning is not None
    assert summary.tuning["settings"][CONCURRENCY] == 6
    assert read_lines(folder / "tuning.jsonl") == summary.tuning["turns"]
    kept = [turn["verdict"] for turn in summary.tuning["turns"] if turn["verdict"]]
    assert kept[0]["is_kept"]
    assert kept[0]["measured_s"] < kept[0]["before_s"] / 2
    told = [event for event in recorder.events if event.startswith("tuning after step 4: tries")]
    assert len(told) == 1
    assert "reward.source.concurrency 6 (was 1)" in told[0]


async def test_settings_change_what_the_services_are_asked_and_where(tmp_path: Path) -> None:
    async with judged_mesh() as mesh:
        space = {"schedule.sampler.block_rows": [2]}
        run = run_of(mesh, tmp_path, recipe(space), MemoryStateStore())
        summary = await run.execute()
        asked = [
            (call.step, call.request.block_rows)  # type: ignore[attr-defined]
            for call in mesh.of("actor.Generate")
        ]
    assert summary.tuning is not None
    turns = {turn["step"] + 1: turn["settings"] for turn in summary.tuning["turns"]}
    block_rows = 0
    for step, rows in asked:
        block_rows = turns.get(step, {"schedule.sampler.block_rows": block_rows})[
            "schedule.sampler.block_rows"
        ]
        assert rows == block_rows
    assert {rows for _, rows in asked} == {0, 2}


async def in_trial(mesh: FakeMesh) -> None:
    await until(lambda: bool(mesh.roles["reward"].spec) and concurrency_of(mesh) == 6)


async def test_a_coordinator_that_dies_in_a_trial_goes_on_with_what_was_learnt(
    tmp_path: Path,
) -> None:
    expected = await untuned(tmp_path / "untuned")
    folder, store = tmp_path / "tuned", MemoryStateStore()
    space = {CONCURRENCY: [6, 3]}
    async with judged_mesh() as mesh:
        run = run_of(mesh, folder, recipe(space), store)
        task = asyncio.create_task(run.execute())
        await in_trial(mesh)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        progress, _ = await reached(store, run.run_id, folder)
        assert isinstance(progress, RunProgress)
        before = list(progress.turns)
        assert [turn.is_trial for turn in before] == [True]
        again = run_of(mesh, folder, recipe(space), store, run_id=run.run_id, resumed=progress)
        summary = await again.execute()
    assert summary.state is RunState.SUCCEEDED
    assert learnt(folder) == expected
    assert summary.tuning is not None
    assert summary.tuning["turns"][0] == before[0].to_dict()
    # The trial went on: it was not proposed a second time.
    tried = [one["settings"] for one in summary.tuning["turns"] if one["settings"] != one["best"]]
    assert tried.count({CONCURRENCY: 6}) == 1
    assert summary.tuning["settings"][CONCURRENCY] == 6


async def test_a_killed_service_ends_a_trial_and_changes_nothing_that_is_learnt(
    tmp_path: Path,
) -> None:
    expected = await untuned(tmp_path / "untuned")
    folder = tmp_path / "tuned"
    async with judged_mesh() as mesh:
        run = run_of(mesh, folder, recipe({CONCURRENCY: [6]}), MemoryStateStore())
        task = asyncio.create_task(run.execute())
        await in_trial(mesh)
        await mesh.roles["actor"].stop()
        run.service_lost("actor", "actor was killed by signal 9")
        summary = await task
        assert mesh.restarted == ["actor"]
        assert concurrency_of(mesh) == 1
    assert learnt(folder) == expected
    assert summary.tuning is not None
    (verdict,) = [turn["verdict"] for turn in summary.tuning["turns"] if turn["verdict"]]
    assert verdict["has_failed"]
    assert "killed by signal 9" in verdict["why"]


async def test_settings_that_a_service_refuses_are_given_up_and_not_tried_again(
    tmp_path: Path,
) -> None:
    expected = await untuned(tmp_path / "untuned")
    folder, recorder = tmp_path / "tuned", Recorder()
    async with judged_mesh() as mesh:

        def reported(name: str, key: Any) -> dict[str, float]:
            if name == "reward.ComputeReward" and concurrency_of(mesh) == 6:
                raise InvalidRequestError("too many processes", reason="SPEC_INVALID")
            return {}

        mesh.reported = reported
        run = run_of(
            mesh, folder, recipe({CONCURRENCY: [6, 3]}), MemoryStateStore(), observer=recorder
        )
        summary = await run.execute()
    assert summary.state is RunState.SUCCEEDED
    assert learnt(folder) == expected
    assert summary.tuning is not None
    assert summary.tuning["settings"][CONCURRENCY] == 3
    tried = [turn["settings"][CONCURRENCY] for turn in summary.tuning["turns"]]
    assert tried[:2] == [6, 1]
    assert 6 not in tried[2:]
    assert any("something failed" in event and "too many" in event for event in recorder.events)


async def test_a_run_that_goes_on_with_another_space_tunes_anew(tmp_path: Path) -> None:
    store, recorder = MemoryStateStore(), Recorder()
    async with judged_mesh() as mesh:
        run = run_of(mesh, tmp_path, recipe({CONCURRENCY: [6]}), store)
        task = asyncio.create_task(run.execute())
        await in_trial(mesh)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        progress, _ = await reached(store, run.run_id, tmp_path)
        again = run_of(
            mesh, tmp_path, recipe({CONCURRENCY: [2]}), store,
            run_id=run.run_id, resumed=progress, observer=recorder,
        )  # fmt: skip
        summary = await again.execute()
        assert concurrency_of(mesh) == 2
    assert summary.state is RunState.SUCCEEDED
    assert summary.tuning is not None
    assert summary.tuning["settings"] == {CONCURRENCY: 2}
    assert any("tuning begins anew" in event for event in recorder.events)
