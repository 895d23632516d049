"""Services of roles that score and judge, which join a run and leave it while its steps go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.changing_runs import (
    METHODS,
    SYNC,
    changing_recipe,
    leaves_within_a_step,
    quick_looks,
)

from rolemesh.coordinator.recipe.schema import Recipe

pytestmark = pytest.mark.usefixtures(quick_looks.__name__)


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
    made = await leaves_within_a_step(tmp_path, service, method, way, role=role)
    made_again = [call.step for call in made.mesh.of(f"{role}.{METHODS[role]}")].count(4)
    assert made_again > 3


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
