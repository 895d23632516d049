"""Losses that come at a bad time: between two attempts, in a replacement, while the run ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from support.fake_recipes import split_pools
from support.fake_roles import FakeMesh, expected_weight, fake_mesh, fake_recipe, until
from support.fake_runs import Recorder, kill_during, make_run

from rolemesh.coordinator.dataflow.errors import RunAbortedError
from rolemesh.coordinator.run.folders.summary import RunSummary
from rolemesh.coordinator.run.training_run import TrainingRun
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.store import RunState
from rolemesh.rpc.errors import CapacityError

ROLES = ("actor", "critic", "reference", "reward")
AHEAD_ROLES = (*ROLES, "rollout")
STEPS = 3
SOON_S = 10.0
"""A forgotten loss costs a wait of 20 s or more (MEET_AGAIN_DEADLINE_S, the start deadline), or one
without end; what is not forgotten takes far less than a second."""


def run_of(mesh: FakeMesh, directory: Path, **settings: Any) -> TrainingRun:
    roles = tuple(mesh.roles)
    recipe = fake_recipe(
        roles=roles,
        sampler=settings.pop("sampler", None),
        steps=STEPS,
        evaluation={"num_prompts": 0},
        recovery={"attempts": 3, "pause_s": 0.0},
        health=settings.pop("health", {}),
        checkpoint=settings.pop("checkpoint", {}),
        pools=split_pools(roles),
    )
    settings = {"store": MemoryStateStore(), "restart": mesh.restart, **settings}
    run = make_run(mesh, directory, recipe, **settings)
    run._loss_grace_s = 0.2
    return run


async def soon(run: Awaitable[RunSummary]) -> RunSummary:
    return await asyncio.wait_for(run, SOON_S)


def check_succeeded(mesh: FakeMesh, summary: RunSummary) -> None:
    assert summary.state is RunState.SUCCEEDED
    assert mesh.roles["actor"].weight == expected_weight(STEPS)


@pytest.mark.parametrize(
    "failures",
    # The replacement meets the first; the second, the new attempt that follows.
    [[OSError(12, "no memory for a process")] * 2, [ValueError("half an announcement")]],
    ids=["no memory", "unforeseen"],
)
async def test_whatever_keeps_a_service_from_its_start_leaves_no_call_waiting(
    failures: list[Exception], tmp_path: Path
) -> None:
    left = list(failures)
    async with fake_mesh(has_cuts=True) as mesh:

        async def restart(service: str) -> str:
            if left:
                raise left.pop()
            return await mesh.restart(service)

        run = run_of(mesh, tmp_path, restart=restart)
        summary = await soon(kill_during(run, mesh, "reward", "ComputeReward", "reward", 2))
        check_succeeded(mesh, summary)
    (recovered,) = summary.recoveries
    assert str(failures[0]) in recovered.cause


async def never(service: str) -> str:
    await asyncio.Event().wait()
    raise AssertionError


async def in_step_two(mesh: FakeMesh, run: TrainingRun) -> asyncio.Task[RunSummary]:
    """The run, while the reward answers in its second step and goes on answering."""
    mesh.roles["reward"].gates["ComputeReward 2"] = asyncio.Event()
    task = asyncio.create_task(run.execute())
    await until(lambda: any(call.step == 2 for call in mesh.of("reward.ComputeReward")))
    return task


@pytest.mark.parametrize("first", ["the stop", "the loss"])
async def test_a_run_that_is_to_end_waits_for_no_replacement(first: str, tmp_path: Path) -> None:
    async with fake_mesh(has_cuts=True) as mesh:
        run = run_of(mesh, tmp_path, restart=never)
        task = await in_step_two(mesh, run)
        if first == "the stop":
            run.request_stop()
        await mesh.roles["reward"].stop()
        run.service_lost("reward", "reward was ended by signal 15")
        if first == "the loss":
            await asyncio.sleep(0)
            run.request_stop()
        with pytest.raises(RunAbortedError):
            await soon(task)
    assert mesh.restarted == []


@pytest.mark.parametrize("stage", ["process", "models"])
async def test_a_step_that_is_undone_while_a_service_is_replaced_goes_on_with_a_new_one(
    stage: str, tmp_path: Path
) -> None:
    starts, recorder = 0, Recorder()
    async with fake_mesh(has_cuts=True) as mesh:
        gate = asyncio.Event()

        async def restart(service: str) -> str:
            nonlocal starts
            starts += 1
            if starts == 1 and stage == "process":
                await never(service)
            address = await mesh.restart(service)
            if stage == "models":
                mesh.roles[service].gates["Initialize"] = gate
            return address

        def reported(name: str, key: Any) -> dict[str, float]:
            is_bad = name == "actor.Update" and key.step == 2
            return {"loss": float("nan")} if is_bad else {}

        mesh.reported = reported
        run = run_of(
            mesh,
            tmp_path,
            restart=restart,
            observer=recorder,
            health={"not_finite": {"do": "skip"}},
        )
        task = asyncio.create_task(kill_during(run, mesh, "actor", "Update", "reference", 2))
        # The next attempt gives the process that is there the run; it needs no other one.
        await until(lambda: any("recovering after 1 steps" in text for text in recorder.events))
        gate.set()
        summary = await soon(task)
        assert summary.state is RunState.SUCCEEDED
        assert starts == (2 if stage == "process" else 1)
    (recovered,) = summary.recoveries
    assert recovered.cause == "reference was killed by signal 9"


class EpochStore(MemoryStateStore):
    """Has something happen while an attempt is given its epoch."""

    on_epoch: Callable[[int], Awaitable[None]]

    async def next_epoch(self, run_id: str, **settings: Any) -> int:
        epoch = await super().next_epoch(run_id, **settings)
        await self.on_epoch(epoch)
        return epoch


@pytest.mark.parametrize("late", [1, 2])
async def test_a_loss_before_an_attempt_begins_is_not_forgotten(late: int, tmp_path: Path) -> None:
    store = EpochStore()
    async with fake_mesh(has_cuts=True) as mesh:
        run = run_of(mesh, tmp_path, store=store)

        async def on_epoch(epoch: int) -> None:
            if epoch == late:
                await mesh.roles["actor"].stop()
                run.service_lost("actor", "actor was killed by signal 9")

        store.on_epoch = on_epoch
        work = run.execute() if late == 1 else kill_during(run, mesh, "actor", "Update", "actor", 2)
        summary = await soon(work)
        check_succeeded(mesh, summary)
        assert mesh.restarted == ["actor"] * late
    (recovered,) = summary.recoveries
    assert "actor was killed by signal 9" in recovered.cause


class SlowStore(MemoryStateStore):
    """Waits where a replacement is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked, self.may_go_on = asyncio.Event(), asyncio.Event()

    async def update_run(self, run_id: str, **changes: Any) -> Any:
        # The record of a recovery has its state, too.
        if changes.get("recoveries") == 1 and "state" not in changes:
            self.is_asked.set()
            await self.may_go_on.wait()
        return await super().update_run(run_id, **changes)


async def test_services_that_never_answer_are_started_again_together(tmp_path: Path) -> None:
    async with fake_mesh(has_cuts=True) as mesh:
        run = run_of(mesh, tmp_path, start_deadline_s=1.0)
        for service in ("reference", "reward"):
            await mesh.roles[service].stop()
        summary = await soon(run.execute())
        check_succeeded(mesh, summary)
        assert sorted(mesh.restarted) == ["reference", "reward"]
    # One recovery: each would otherwise cost a wait of its own.
    assert len(summary.recoveries) == 1


async def test_a_loss_right_after_a_replacement_is_another_loss(tmp_path: Path) -> None:
    store = SlowStore()
    async with fake_mesh(has_cuts=True) as mesh:
        gate = mesh.roles["actor"].gates["Update 2"] = asyncio.Event()
        run = run_of(mesh, tmp_path, store=store)
        task = await in_step_two(mesh, run)
        await mesh.roles["reward"].stop()
        run.service_lost("reward", "reward was killed by signal 9")
        await store.is_asked.wait()
        await until(lambda: any(call.step == 2 for call in mesh.of("actor.Update")))
        for victim in ("actor", "reward"):
            await mesh.roles[victim].stop()
            run.service_lost(victim, f"{victim} was killed once more")
        store.may_go_on.set()
        gate.set()
        check_succeeded(mesh, await soon(task))
        assert sorted(mesh.restarted) == ["actor", "reward", "reward"]
        summary = task.result()
    assert [one.restarted for one in summary.recoveries] == [("reward",), ("actor", "reward")]


async def test_the_first_step_after_a_recovery_can_have_services_replaced(tmp_path: Path) -> None:
    async with fake_mesh(AHEAD_ROLES, has_cuts=True) as mesh:
        gate = asyncio.Event()

        async def restart(service: str) -> str:
            address = await mesh.restart(service)
            if service == "actor":
                mesh.roles[service].gates["ComputeAdvantages 2"] = gate
            return address

        def is_there(method: str, epoch: int) -> bool:
            return any(call.key[1:3] == (epoch, 2) for call in mesh.of(f"actor.{method}"))

        run = run_of(mesh, tmp_path, restart=restart, sampler={"type": "one_step_ahead"})
        mesh.roles["actor"].gates["Update 2"] = asyncio.Event()
        task = asyncio.create_task(run.execute())
        await until(lambda: is_there("Update", 1))
        await mesh.roles["actor"].stop()
        run.service_lost("actor", "actor was killed by signal 9")
        # What the reward has answered is about to be read in the step that is made again.
        await until(lambda: is_there("ComputeAdvantages", 2))
        await mesh.roles["reward"].stop()
        run.service_lost("reward", "reward was killed by signal 9")
        gate.set()
        summary = await soon(task)
        assert {call.key[1] for call in mesh.calls} == {1, 2}
    assert [one.restarted for one in summary.recoveries] == [("actor",), ("reward",)]


async def test_a_call_that_fails_leaves_no_line_of_what_it_did(tmp_path: Path) -> None:
    recorder = Recorder()
    async with fake_mesh(has_cuts=True) as mesh:

        def reported(name: str, key: Any) -> dict[str, float]:
            if name == "actor.SaveCheckpoint" and key.step == 1:
                raise CapacityError("no room", reason="CHECKPOINT_CAPACITY")
            return {}

        mesh.reported = reported
        run = run_of(mesh, tmp_path, observer=recorder, checkpoint={"every_steps": 1})
        await soon(run.execute())
    assert any("is left out: no room" in text for text in recorder.events)
    stages = [stage for service, stage, _, _ in recorder.phases if service == "actor checkpoint"]
    assert stages.count("") == STEPS
