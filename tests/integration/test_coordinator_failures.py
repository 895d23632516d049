"""Tests of runs in which a role, a service, the store or the disk fails."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.fake_roles import (
    fake_mesh,
    fake_recipe,
    until,
)
from support.fake_runs import SPLIT_POOLS, Recorder, make_run, read_lines

from rolemesh.coordinator.dataflow.errors import RunError, ServiceLostError
from rolemesh.coordinator.run.folders.summary import git_commit
from rolemesh.coordinator.run.services.watcher import WatchSettings
from rolemesh.coordinator.run.training_run import TrainingRun
from rolemesh.coordinator.state.errors import StoreUnavailableError
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.store import RunState
from rolemesh.rpc.errors import PreconditionError


async def test_a_failing_node_is_named_with_rank_and_reason_and_the_rest_is_cancelled(
    tmp_path: Path,
) -> None:
    store = MemoryStateStore()
    async with fake_mesh() as mesh:
        mesh.roles["critic"].gates["ComputeValues"] = asyncio.Event()
        gate = mesh.roles["reward"].gates["ComputeReward"] = asyncio.Event()
        mesh.roles["reward"].failures["ComputeReward"] = PreconditionError(
            "the reward of row 3 is nan", reason="REWARD_INVALID"
        )
        recipe = fake_recipe(evaluation={"num_prompts": 0}, pools=SPLIT_POOLS)
        run = make_run(mesh, tmp_path, recipe, store)
        task = asyncio.create_task(run.execute())
        await until(lambda: "critic.ComputeValues" in mesh.running)
        gate.set()
        with pytest.raises(RunError) as failed:
            await task
        await until(lambda: mesh.roles["critic"].cancelled == ["ComputeValues"])
        assert mesh.roles["actor"].weight == 0.0
    expected = (
        "step 1: reward.compute_reward failed on reward rank 0 [REWARD_INVALID]: "
        "the reward of row 3 is nan"
    )
    assert str(failed.value) == expected
    record = await store.get_run(run.run_id)
    assert (record.state, record.failure) == (RunState.FAILED, expected)
    assert json.loads((tmp_path / "summary.json").read_text())["failure"] == expected
    assert not (tmp_path / "model").exists()


async def test_a_refused_spec_names_role_and_field(tmp_path: Path) -> None:
    async with fake_mesh() as mesh:
        mesh.roles["critic"].failures["Initialize"] = PreconditionError(
            "critic.model.path: /models/none is no folder", reason="SPEC_INVALID"
        )
        run = make_run(mesh, tmp_path, fake_recipe(), MemoryStateStore())
        with pytest.raises(RunError, match=r"initialize failed on critic rank 0 .*no folder"):
            await run.execute()


async def test_the_launchers_reason_is_told_when_a_service_is_killed(tmp_path: Path) -> None:
    reason = "actor rank 0 (pid 123) was killed by signal 9; its log ends with: oh"
    async with fake_mesh() as mesh:
        mesh.roles["actor"].gates["Update"] = asyncio.Event()
        run = make_run(mesh, tmp_path, fake_recipe(), MemoryStateStore())
        task = asyncio.create_task(run.execute())
        await until(lambda: "actor.Update" in mesh.running)
        # The broken call is seen first, the launcher's word comes a moment later.
        await mesh.roles["actor"].stop()
        asyncio.get_running_loop().call_later(0.2, run.service_lost, "actor", reason)
        with pytest.raises(ServiceLostError) as lost:
            await task
    assert str(lost.value) == f"step 1, actor.update: {reason}"
    assert lost.value.role == "actor"


async def test_the_watcher_finds_an_idle_service_gone(tmp_path: Path) -> None:
    async with fake_mesh() as mesh:
        mesh.roles["actor"].gates["Generate"] = asyncio.Event()
        recipe = fake_recipe(evaluation={"num_prompts": 0})
        run = make_run(mesh, tmp_path, recipe, MemoryStateStore())
        task = asyncio.create_task(run.execute())
        await until(lambda: "actor.Generate" in mesh.running)
        address = mesh.roles["reference"].address
        await mesh.roles["reference"].stop()
        with pytest.raises(ServiceLostError, match="reference rank 0") as lost:
            await task
        await until(lambda: mesh.roles["actor"].cancelled == ["Generate"])
    assert lost.value.role == "reference"
    assert address in str(lost.value)


async def test_a_service_that_holds_its_connection_but_is_silent_is_lost(tmp_path: Path) -> None:
    async with fake_mesh() as mesh:
        mesh.roles["critic"].gates["GetStatus"] = asyncio.Event()
        mesh.roles["actor"].gates["Generate"] = asyncio.Event()
        run = TrainingRun(
            fake_recipe(),
            directory=tmp_path,
            addresses=mesh.addresses,
            store=MemoryStateStore(),
            watch=WatchSettings(interval_s=0.02, status_timeout_s=0.1, silence_until_lost_s=0.3),
        )
        with pytest.raises(ServiceLostError, match=r"critic rank 0 .* has not answered for"):
            await run.execute()


async def test_a_broken_connection_alone_names_role_and_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolemesh.coordinator.dataflow.calls.connection.OUTAGE_S", 0.3)
    async with fake_mesh() as mesh:
        mesh.roles["actor"].gates["Update"] = asyncio.Event()
        run = TrainingRun(
            fake_recipe(),
            directory=tmp_path,
            addresses=mesh.addresses,
            store=MemoryStateStore(),
            # The watcher says nothing: it would find the service gone.
            watch=WatchSettings(refusals_until_lost=1000),
            loss_grace_s=0.0,
        )
        task = asyncio.create_task(run.execute())
        await until(lambda: "actor.Update" in mesh.running)
        await mesh.roles["actor"].stop()
        with pytest.raises(RunError, match=r"actor\.update failed on actor rank 0"):
            await task


async def test_a_store_that_fails_ends_the_run_with_its_own_error(tmp_path: Path) -> None:
    class FailingStore(MemoryStateStore):
        async def append_journal(self, run_id: str, entry: Any) -> str:
            if entry.step == 2:
                raise StoreUnavailableError("redis://gone", ConnectionError("refused"))
            return await super().append_journal(run_id, entry)

    async with fake_mesh() as mesh:
        run = make_run(mesh, tmp_path, fake_recipe(), FailingStore())
        with pytest.raises(StoreUnavailableError, match="redis://gone"):
            await run.execute()
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 1


async def test_a_coordinator_that_lost_its_run_stops_writing(tmp_path: Path) -> None:
    store = MemoryStateStore()
    async with fake_mesh() as mesh:
        gate = mesh.roles["actor"].gates["Update"] = asyncio.Event()
        run = make_run(mesh, tmp_path, fake_recipe(), store)
        task = asyncio.create_task(run.execute())
        await until(lambda: "actor.Update" in mesh.running)
        await store.next_epoch(run.run_id)
        gate.set()
        with pytest.raises(Exception, match="epoch 1 is stale"):
            await task
    assert (await store.get_run(run.run_id)).step == 0


async def test_a_committed_step_counts_and_is_written_though_its_release_fails(
    tmp_path: Path,
) -> None:
    store = MemoryStateStore()
    async with fake_mesh() as mesh:
        mesh.roles["actor"].failures["Release"] = PreconditionError("no", reason="BROKEN")
        recipe = fake_recipe(evaluation={"num_prompts": 0})
        run = make_run(mesh, tmp_path, recipe, store)
        with pytest.raises(RunError, match="step 1 failed on actor"):
            await run.execute()
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 1
    assert [record["step"] for record in read_lines(tmp_path / "metrics.jsonl")] == [1]
    assert [graph["step"] for graph in read_lines(tmp_path / "dataflow.jsonl")] == [1]
    assert (await store.get_run(run.run_id)).step == 1


def spoil_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("rolemesh.coordinator.run.results.metrics.MetricsWriter.close", full)
    monkeypatch.setattr("rolemesh.coordinator.run.folders.summary.RunSummary.write", full)


async def test_a_full_disk_at_the_end_does_not_hide_why_the_run_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, recorder = MemoryStateStore(), Recorder()
    async with fake_mesh() as mesh:
        mesh.roles["actor"].failures["Update"] = PreconditionError("oh", reason="BROKEN")
        run = make_run(mesh, tmp_path, fake_recipe(), store, observer=recorder)
        spoil_files(monkeypatch)
        with pytest.raises(RunError, match=r"actor\.update failed"):
            await run.execute()
    assert (await store.get_run(run.run_id)).state is RunState.FAILED
    assert any("could not be recorded: [Errno 28]" in event for event in recorder.events)


async def test_a_full_disk_at_the_end_of_a_good_run_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStateStore()
    async with fake_mesh() as mesh:
        run = make_run(mesh, tmp_path, fake_recipe(steps=1), store)
        spoil_files(monkeypatch)
        with pytest.raises(OSError, match="No space left"):
            await run.execute()
    assert (await store.get_run(run.run_id)).state is RunState.SUCCEEDED


async def test_a_git_that_hangs_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git = tmp_path / "git"
    git.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    git.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("rolemesh.coordinator.run.folders.summary._GIT_TIMEOUT_S", 0.5)
    assert await git_commit() is None
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))
