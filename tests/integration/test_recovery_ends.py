"""Runs of fake roles that cannot recover, or are told not to, and how they end."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.fake_roles import expected_weight, fake_mesh, until
from support.fake_runs import Recorder, make_run
from support.recovering_runs import RECOVERY, STEPS, recipe, recovering_run

from rolemesh.coordinator.dataflow.errors import RunAbortedError, RunError, ServiceLostError
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.store import RunState
from rolemesh.rpc.errors import InternalError, InvalidRequestError
from rolemesh.v1 import experience_pb2


async def test_a_run_whose_services_die_again_and_again_ends_after_its_attempts(
    tmp_path: Path,
) -> None:
    store, recorder = MemoryStateStore(), Recorder()
    async with fake_mesh(has_cuts=True) as mesh:
        run = recovering_run(mesh, tmp_path, store, observer=recorder)
        task = asyncio.create_task(run.execute())
        for number in range(RECOVERY["attempts"] + 1):
            await until(lambda: len(mesh.restarted) == number)  # noqa: B023 - awaited here
            mesh.roles["actor"].gates["Update"] = asyncio.Event()
            await until(lambda: "actor.Update" in mesh.running)
            await mesh.roles["actor"].stop()
            run.service_lost("actor", "actor was killed by signal 9")
            await until(lambda: "actor.Update" not in mesh.running)
        with pytest.raises(ServiceLostError, match="killed by signal 9"):
            await task
    assert mesh.restarted == ["actor"] * RECOVERY["attempts"]
    assert (await store.get_run(run.run_id)).state is RunState.FAILED


async def test_an_error_inside_a_service_that_comes_again_ends_the_run(tmp_path: Path) -> None:
    async with fake_mesh(has_cuts=True) as mesh:
        mesh.roles["critic"].failures["Update"] = InternalError("KeyError: 'values'")
        run = recovering_run(mesh, tmp_path, MemoryStateStore())
        with pytest.raises(RunError, match="KeyError"):
            await run.execute()
        updates = [call for call in mesh.calls if call.name == "critic.Update"]
        assert len(updates) == 2


@pytest.mark.parametrize("refusals", [2, RECOVERY["attempts"] + 1])
async def test_a_role_that_is_refused_what_it_had_before_is_asked_again(
    refusals: int, tmp_path: Path
) -> None:
    lacking = InvalidRequestError("9 GiB are free, but 12 are needed", reason="VALUE_INVALID")
    store = MemoryStateStore()
    async with fake_mesh(has_cuts=True) as mesh:
        mesh.roles["actor"].gates["Update"] = asyncio.Event()

        async def restart(service: str) -> str:
            address = await mesh.restart(service)
            mesh.roles[service].failures["Initialize"] = lacking
            return address

        run = make_run(mesh, tmp_path, recipe(), store, restart=restart)
        run._loss_grace_s = 0.2
        task = asyncio.create_task(run.execute())
        await until(lambda: "actor.Update" in mesh.running)
        await mesh.roles["actor"].stop()
        run.service_lost("actor", "actor was killed by signal 9, for want of memory")

        def number_of(state: str) -> int:
            return sum(call.state == state for call in mesh.of("actor.Initialize"))

        await until(lambda: number_of("failed") == min(refusals, RECOVERY["attempts"]))
        if refusals > RECOVERY["attempts"]:
            with pytest.raises(RunError, match="12 are needed"):
                await task
            return
        mesh.roles["actor"].failures.clear()
        summary = await task
        assert mesh.restarted == ["actor"]
        assert mesh.roles["actor"].weight == expected_weight(STEPS)
    assert [one.restarted for one in summary.recoveries] == [("actor",)]


async def test_a_run_that_is_told_to_end_while_it_recovers_ends_at_once(tmp_path: Path) -> None:
    async with fake_mesh(has_cuts=True) as mesh:
        is_starting = asyncio.Event()

        async def restart(service: str) -> str:
            is_starting.set()
            await asyncio.Event().wait()
            raise AssertionError

        mesh.roles["actor"].gates["Update"] = asyncio.Event()
        run = make_run(mesh, tmp_path, recipe(), MemoryStateStore(), restart=restart)
        run._loss_grace_s = 0.2
        task = asyncio.create_task(run.execute())
        await until(lambda: "actor.Update" in mesh.running)
        await mesh.roles["actor"].stop()
        run.service_lost("actor", "actor was ended by signal 15")
        await is_starting.wait()
        run.request_stop()
        with pytest.raises(RunAbortedError, match="steps made before: 0"):
            await task


async def test_a_role_that_is_refused_at_the_start_ends_the_run(tmp_path: Path) -> None:
    async with fake_mesh(has_cuts=True) as mesh:
        mesh.roles["actor"].failures["Initialize"] = InvalidRequestError(
            "9 GiB are free, but 12 are needed", reason="VALUE_INVALID"
        )
        with pytest.raises(RunError, match="12 are needed"):
            await recovering_run(mesh, tmp_path, MemoryStateStore()).execute()
        assert len(mesh.of("actor.Initialize")) == 1


async def test_loads_that_cannot_be_end_the_run_with_the_name_of_what_told_them(
    tmp_path: Path,
) -> None:
    wrong = [experience_pb2.LayerLoads(layer=1, choices=[3, -4])]
    told = lambda role, version: wrong if role == "critic" else []  # noqa: E731 - short
    async with fake_mesh(has_cuts=True, loads=told) as mesh:
        run = make_run(mesh, tmp_path, recipe(), MemoryStateStore())
        words = (
            r"step 1: critic\.update has answered .* expert_loads\[0\]\.choices holds -4: give 0"
        )
        with pytest.raises(RunError, match=words):
            await run.execute()
    assert not (tmp_path / "experts.jsonl").exists()
