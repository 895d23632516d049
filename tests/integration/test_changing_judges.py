"""Services of roles that score and judge, which join a run and leave it while its steps go on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.changing_runs import (
    METHODS,
    SYNC,
    changing_recipe,
    check_went_on,
    learnt,
    quick_looks,
    scene,
    undisturbed,
)

from rolemesh.coordinator.recipe.schema import Recipe

pytestmark = pytest.mark.usefixtures(quick_looks.__name__)


@pytest.mark.parametrize("role", ["reward", "reference"])
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
    assert learnt(tmp_path) == await undisturbed(tmp_path / "undisturbed", role=role)
    assert "held_out/score" in (tmp_path / "metrics.jsonl").read_text()


def leavings() -> list[Any]:
    """Roles, the call during which one of their services leaves, and how; some are slow repeats."""
    fast = [("reward", "own", "drains"), ("reward", "later", "dies")]
    # The fakes' advantages read rewards, and no log-probs of the reference.
    cases = [("reward", "own"), ("reward", "later"), ("reference", "own")]
    return [
        pytest.param(role, when, way, marks=() if (role, when, way) in fast else pytest.mark.slow)
        for role, when in cases
        for way in ("drains", "lease ends", "dies")
    ]


@pytest.mark.parametrize(("role", "when", "way"), leavings())
async def test_others_make_what_a_service_that_leaves_within_a_step_has_not_made(
    role: str, when: str, way: str, tmp_path: Path
) -> None:
    second = f"{role}-1"
    # What it has answered is read by the advantages.
    service, method = (second, METHODS[role]) if when == "own" else ("actor", "ComputeAdvantages")
    async with scene(tmp_path, role=role) as made:
        task = asyncio.create_task(made.run.execute())
        async with made.during("actor", "Update", 2):
            made.register(second)
            await made.loaded(second)
        async with made.during(service, method, 4):
            if way == "drains":
                made.drain(second)
            else:
                made.unregister(second)
            if way == "dies":
                await made.mesh.roles[second].stop()
            await made.told(f"{second} leaves in step 4")
            await made.mesh.roles[second].stop()
        summary = await task
        # A process that dies may be missed by its lease or by its connection first.
        check_went_on(made, summary, deaths=len(summary.recoveries))
        assert len(summary.recoveries) <= (way == "dies")
        assert made.numbers == [1.0, 1.0, 2.0, 2.0, 1.0, 1.0]
        made_again = [call.step for call in made.mesh.of(f"{role}.{METHODS[role]}")].count(4)
        assert made_again > 3
    assert learnt(tmp_path) == await undisturbed(tmp_path / "undisturbed", role=role)


def test_judges_may_change_in_a_schedule_that_samples_ahead() -> None:
    """Which rows a call judges does not depend on who judges them, nor on when."""
    ahead = {**SYNC, "type": "one_step_ahead"}
    with pytest.raises(ValueError, match=r"services\.rollout\.most_replicas is 3, but schedule"):
        changing_recipe("rollout", ahead)
    values = changing_recipe("rollout").model_dump(mode="json")
    values["services"] = {"reward": values["services"]["rollout"]}
    values["schedule"]["sampler"] = ahead
    assert Recipe.model_validate(values).changes("reward")


def test_services_without_a_block_each_are_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"services\.reward has 3 services, which share the blocks of a step's rows, but "
        r"there is 1: lower schedule\.sampler\.batch_size or block_rows, or have fewer",
    ):
        changing_recipe("reward", {"type": "sync"})
