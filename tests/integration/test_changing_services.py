"""Rollout services that join a run and leave it, while its steps go on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.changing_runs import (
    STEPS,
    SYNC,
    changing_recipe,
    check_went_on,
    learnt,
    leaves_within_a_step,
    quick_looks,
    scene,
    undisturbed,
)

from rolemesh.coordinator.state.store import RunState
from rolemesh.rpc.errors import PreconditionError

pytestmark = pytest.mark.usefixtures(quick_looks.__name__)

BLOCKS = {"type": "sync", "batch_size": 2, "block_rows": 2}
FIRST, SECOND, THIRD = (f"rollout-{number}" for number in range(3))


@pytest.mark.parametrize("role", ["rollout", "reward", "reference"])
async def test_a_service_joins_and_leaves_between_steps_and_changes_nothing(
    role: str, tmp_path: Path
) -> None:
    first, second = f"{role}-0", f"{role}-1"
    async with scene(tmp_path, role=role) as made:
        task = asyncio.create_task(made.run.execute())
        async with made.during("actor", "Update", 2):
            made.register(second)
            await made.loaded(second)
        async with made.during("actor", "Update", 4):
            made.drain(second)
            await made.told(f"{second} leaves in step 4: it drains")
        check_went_on(made, await task)
        assert made.numbers == [1.0, 1.0, 2.0, 2.0, 1.0, 1.0]
        # Three blocks are dealt out over two services.
        assert made.answered(second) == [3, 4]
        assert made.answered(first) == [1, 2, 3, 4, 5, 6]
        assert await made.journal() == [
            (3, [second], [], [first, second]),
            (5, [], [second], [first]),
        ]
        await made.told(f"{second} at {made.mesh.roles[second].address} joins: it takes part from")
        record = await made.store.get_run(made.run.run_id)
        # A run tells the services that it began with.
        assert [name for name in record.services if role in name] == [first]
    assert learnt(tmp_path) == await undisturbed(tmp_path / "undisturbed", role=role)
    assert "held_out/score" in (tmp_path / "metrics.jsonl").read_text()


def repeats() -> list[Any]:
    """Calls during which the service leaves, and how; one for each of them is not slow."""
    # The updates read the tokens, some of which lie on the service that leaves.
    calls = [(SECOND, "UpdateWeights"), (SECOND, "Generate"), ("actor", "ComputeAdvantages")]
    fast = [("Generate", BLOCKS, "drains")]
    fast.append(("UpdateWeights", SYNC, "lease ends"))
    return [
        pytest.param(
            *(service, method, sampler, way),
            marks=() if (method, sampler, way) in fast else pytest.mark.slow,
        )
        for service, method in calls
        for sampler in (SYNC, BLOCKS)
        for way in ("drains", "lease ends", "dies")
    ]


@pytest.mark.parametrize(("service", "method", "sampler", "way"), repeats())
async def test_others_make_what_a_service_that_leaves_within_a_step_has_not_made(
    service: str, method: str, sampler: dict[str, Any], way: str, tmp_path: Path
) -> None:
    await leaves_within_a_step(tmp_path, service, method, way, sampler)


async def test_a_death_that_the_run_goes_on_after_is_told_as_one(tmp_path: Path) -> None:
    async with scene(tmp_path) as made:
        task = asyncio.create_task(made.run.execute())
        async with made.during("actor", "Update", 2):
            made.register(SECOND)
            await made.loaded(SECOND)
        async with made.during(SECOND, "Generate", 3):
            await made.mesh.roles[SECOND].stop()
            made.run.service_lost(SECOND, f"{SECOND} was killed by signal 9")
            # The watcher says the same a little later.
            made.run.service_lost(SECOND, f"{SECOND} is gone")
        summary = await task
        check_went_on(made, summary, deaths=1)
        assert summary.recoveries[0].cause == f"{SECOND} was killed by signal 9"
        # Its lease, which goes on, does not bring it back.
        assert made.numbers == [1.0, 1.0, 2.0, 1.0, 1.0, 1.0]


async def test_a_service_that_joins_gets_weights_that_the_others_have_already(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path) as made:
        task = asyncio.create_task(made.run.execute())
        # The evaluation before the first step has brought the weights that it samples with.
        async with made.during(FIRST, "Generate", 0):
            made.register(SECOND)
            await made.loaded(SECOND)
        check_went_on(made, await task)
        assert made.numbers == [2.0] * STEPS
        taken = [call.step for call in made.mesh.calls if call.name == f"{SECOND}.UpdateWeights"]
        assert 1 in taken
    assert learnt(tmp_path) == await undisturbed(tmp_path / "undisturbed")


async def test_a_service_that_left_may_come_back_as_another_process(tmp_path: Path) -> None:
    async with scene(tmp_path) as made:
        task = asyncio.create_task(made.run.execute())
        async with made.during("actor", "Update", 1):
            made.register(SECOND)
            await made.loaded(SECOND)
        async with made.during("actor", "Update", 2):
            made.unregister(SECOND)
            await made.mesh.restart(SECOND)
            await made.told(f"{SECOND} leaves in step 2")
            made.mesh.log.clear()
            made.register(SECOND, "b")
        async with made.during("actor", "Update", 3):
            await made.loaded(SECOND)
        check_went_on(made, await task)
        assert made.numbers == [1.0, 2.0, 1.0, 2.0, 2.0, 2.0]
    assert learnt(tmp_path) == await undisturbed(tmp_path / "undisturbed")


async def test_a_run_that_keeps_too_few_waits_for_others(tmp_path: Path) -> None:
    async with scene(tmp_path) as made:
        task = asyncio.create_task(made.run.execute())
        async with made.during(FIRST, "Generate", 3):
            made.drain(FIRST)
            await made.told(f"{FIRST} leaves: it drains, and too few are left without it")
        made.register(THIRD)
        summary = await task
        assert summary.state is RunState.SUCCEEDED
        assert {call.key[1] for call in made.mesh.calls} == {1, 2}
        assert made.answered(THIRD) == [3, 4, 5, 6]
        (recovered,) = summary.recoveries
        assert recovered.lost_steps == 0
    assert learnt(tmp_path) == await undisturbed(tmp_path / "undisturbed")


async def test_a_service_that_cannot_take_part_is_told_of_and_left_out(tmp_path: Path) -> None:
    async with scene(tmp_path) as made:
        made.mesh.roles[SECOND].failures["Initialize"] = PreconditionError(
            "run 'other' holds the rollout", reason="ALREADY_INITIALIZED"
        )
        task = asyncio.create_task(made.run.execute())
        async with made.during("actor", "Update", 2):
            made.register(SECOND)
            await made.told(f"{SECOND} at {made.mesh.roles[SECOND].address} cannot join: run")
        check_went_on(made, await task)
        assert made.numbers == [1.0] * STEPS


@pytest.mark.parametrize(
    ("sampler", "services", "said"),
    [
        ({"type": "sync"}, {}, "schedule.sampler.batch_size is not given"),
        (
            {"type": "one_step_ahead", "batch_size": 2},
            {},
            "schedule.sampler.type is 'one_step_ahead'",
        ),
        ({**SYNC, "weights": "nccl"}, {}, "schedule.sampler.weights is 'nccl'"),
        (SYNC, {"registers": False}, "most_replicas is 3, but registers is false"),
        (SYNC, {"replicas": 3}, "most_replicas is 3 and replicas, the least, is 3"),
        ({**SYNC, "batch_size": 6}, {}, "make 1 calls of them"),
    ],
)
def test_what_cannot_change_is_refused(
    sampler: dict[str, Any], services: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        changing_recipe(sampler=sampler, **services)
