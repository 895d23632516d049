"""Checkpoints of real runs: written beside the steps, or waited for, or interrupted by a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.kill_plans import COMMON, Kill
from support.killed_runs import killed_run, kills_of
from support.mesh_runs import CliRun, tiny_model, tiny_recipe
from support.run_results import learnt, written

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

WAIT_S = 500
STEPS = 6
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "two ranks": {"actor__train": {"tp": 2}, "actor__generate": {"tp": 1}},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def recipe_of(model: Path, layout: str, **changes: Any) -> dict[str, Any]:
    return tiny_recipe(
        model,
        run__steps=STEPS,
        run__evaluation={"num_prompts": 4, "every_steps": 2},
        run__checkpoint={"every_steps": 1, "keep": 9},
        run__recovery__pause_s=0.1,
        **LAYOUTS[layout],
        **changes,
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_checkpoints_beside_the_steps_are_those_that_a_run_waits_for_also_after_a_kill(
    model: Path, tmp_path: Path, layout: str
) -> None:
    (tmp_path / "waiting").mkdir()
    waiting = CliRun(recipe_of(model, layout, run__recovery__cuts=False), tmp_path / "waiting")
    try:
        assert waiting.wait(WAIT_S) == 0, waiting.output
    finally:
        waiting.close()
    phases = {phase.name: phase for phase in COMMON}
    ranks = "actor" if layout == "one rank" else "actor rank 1"
    plan = [
        Kill(ranks, phases["checkpoint"], 0.0, 1),
        Kill("critic", phases["actor's part of it renamed"], 0.0, 3),
    ]
    killed = killed_run(recipe_of(model, layout), tmp_path, plan, WAIT_S)
    assert len(kills_of(tmp_path)) == len(plan)
    assert learnt(killed.out) == learnt(waiting.out)
    # Each checkpoint was due once, and each was written, of the weights of its own step.
    assert written(killed.out) == written(waiting.out)
    assert len(list(killed.out.glob("checkpoints/*/COMMITTED"))) == STEPS
    recoveries = json.loads((killed.out / "summary.json").read_text())["recoveries"]
    assert [one["lost_steps"] for one in recoveries] == [0, 0]
