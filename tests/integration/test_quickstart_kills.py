"""The quickstart's own model and vLLM, with processes killed all over: the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.kill_plans import COMMON, COORDINATOR, STORE, Kill
from support.killed_runs import killed_run, kills_of, left_of
from support.mesh_runs import CliRun
from support.run_results import learnt, written

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes/quickstart-ppo.yaml"
MODEL = ROOT / ".models/SmolLM2-135M-Instruct"
STEPS = 5
WAIT_S = 3600

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3 * WAIT_S),
    pytest.mark.skipif(not MODEL.is_dir(), reason="no model: `make model` prepares it"),
]

PLANS = {
    "services": [
        ("actor", "update of the actor", 1.0),
        ("critic", "going back", 0.0),
        (STORE, "cut of the critic", 0.0),
        ("reference", "sampling", 1.0),
        ("critic", "update of the critic", 1.0),
    ],
    "coordinator": [
        (COORDINATOR, "actor updated", 0.0),
        ("actor", "loading again", 0.1),
        ("reward", "advantages", 0.0),
        ("actor", "sampling", 1.0),
        (COORDINATOR, "checkpoint", 0.3),
    ],
}
"""Victim, phase, and how many seconds after its beginning."""


def recipe_of() -> dict[str, Any]:
    recipe: dict[str, Any] = yaml.safe_load(RECIPE.read_text())
    recipe["run"] |= {
        "steps": STEPS,
        "evaluation": {"num_prompts": 16},
        "checkpoint": {"every_steps": 2, "keep": 9},
    }
    for role in ("actor", "critic", "reference"):
        recipe[role]["model"]["path"] = str(MODEL)
    return recipe


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = CliRun(recipe_of(), tmp_path_factory.mktemp("undisturbed"))
    try:
        assert run.wait(WAIT_S) == 0, run.output
    finally:
        run.close()
    return run.out


@pytest.mark.parametrize("name", PLANS)
def test_the_quickstart_ends_with_the_same_bits_though_processes_are_killed(
    name: str, undisturbed: Path, tmp_path: Path
) -> None:
    phases = {phase.name: phase for phase in COMMON}
    plan: list[Kill] = []
    for number, (victim, phase, late_s) in enumerate(PLANS[name]):
        in_recovery = phases[phase].in_recovery
        plan.append(Kill(victim, phases[phase], late_s, 0 if in_recovery else min(number, 3)))
    run = killed_run(recipe_of(), tmp_path, plan, WAIT_S)
    assert sum(kill["was_found"] for kill in kills_of(tmp_path)) == len(plan)
    assert learnt(run.out) == learnt(undisturbed)
    assert written(run.out) == written(undisturbed)
    assert left_of(tmp_path) == []
    summary = json.loads((run.out / "summary.json").read_text())
    assert (summary["state"], summary["steps"]) == ("succeeded", STEPS)
