"""Real runs of which every process is killed in every phase, beside ones that are left alone.

Seeds deal pairs of victim and phase out to the runs. ROLEMESH_TEST_KILL_RUNS makes more of them.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.image_tasks import data_of, write_task
from support.kill_plans import (
    COMMON,
    COORDINATOR,
    STORE,
    WITH_ROLLOUT,
    Phase,
    plans,
    read_log,
)
from support.killed_runs import killed_run, kills_of, left_of
from support.mesh_runs import ROLES, CliRun, tiny_model, tiny_recipe
from support.run_results import learnt, written
from support.tiny_mixtures import write_tiny_mixture

pytestmark = pytest.mark.slow

WAIT_S = 600
STEPS = 10
RUNS = int(os.environ.get("ROLEMESH_TEST_KILL_RUNS", "6"))
"""Runs of each recipe."""
KILLS = 4
SPLIT = {role: {"roles": [role]} for role in (*ROLES, "rollout")}
VICTIMS = (STORE, COORDINATOR, *ROLES)


@dataclass(frozen=True)
class Case:
    """One recipe, and what can happen to it."""

    changes: dict[str, Any]
    victims: tuple[str, ...] = VICTIMS
    phases: tuple[Phase, ...] = COMMON


def _without_reference(instead: Phase) -> tuple[Phase, ...]:
    """The phases of a run whose actor answers for the reference."""
    return tuple(instead if one.service == "reference" else one for one in COMMON)


CASES = {
    "colocated": Case({}),
    "split": Case({"pools": {role: SPLIT[role] for role in ROLES}}),
    # The actor is the reference, too, and cuts and checkpoints hold its adapter alone.
    "adapter": Case(
        {"actor__model__adapter": {"rank": 4}, "reference": {}},
        (STORE, COORDINATOR, "actor", "actor", "critic", "reward"),
        _without_reference(Phase("scoring by the base", "actor", "compute_reference_logprobs")),
    ),
    "two ranks": Case(
        {"actor__train": {"tp": 2}, "actor__generate": {"tp": 1}},
        # All pairs of a process are drawn with the others; the ranks come twice as often.
        ("actor rank 0", "actor rank 1", "actor rank 1", "actor", "critic", COORDINATOR),
    ),
    "rollout": Case(
        {
            "pools": SPLIT,
            "rollout": {"rollout": {"type": "hf", "max_model_len": 256}},
            "schedule__sampler": {"type": "sync"},
        },
        ("rollout-0", "rollout-1", "actor", STORE, COORDINATOR),
        WITH_ROLLOUT,
    ),
    # Experts shared out over two ranks, which replay the routes of their sampler.
    "experts": Case(
        {
            "actor__train": {"dp": 2, "fsdp": 2, "ep": 2},
            "actor__rollout__replay_routes": True,
            "actor__model__balancing": {"rate": 0.01},
        },
        ("actor rank 0", "actor rank 1", "actor rank 1", "actor", "critic", COORDINATOR),
    ),
    # The KL is taken to the actor's own moving average, which cuts and checkpoints hold.
    "own average": Case(
        {"teacher": {"of": "actor", "average": 0.9}},
        (STORE, COORDINATOR, "actor", "actor", "critic", "reward"),
        _without_reference(Phase("scoring by its average", "actor", "compute_teacher_logprobs")),
    ),
    # Pictures in prompts, and a tower that every process loads anew.
    "images": Case({}, ("actor", "actor", "critic", "reference", "reward", COORDINATOR)),
    # Two ranks that cut each packed row: of a policy, and of a critic.
    "cut rows": Case(
        {
            "actor__train": {"dp": 2, "cp": 2},
            "critic__train": {"dp": 2, "fsdp": 2, "cp": 2},
        },
        ("actor rank 0", "actor rank 1", "actor rank 1", "actor", "critic", COORDINATOR),
    ),
}


def recipe_of(name: str, model: Path) -> dict[str, Any]:
    recipe = tiny_recipe(
        model,
        run__steps=STEPS,
        run__evaluation={"num_prompts": 4, "every_steps": 3},
        run__checkpoint={"every_steps": 2, "keep": 9},
        run__recovery={"pause_s": 0.1},
        **CASES[name].changes,
    )
    if name in ("adapter", "own average"):
        del recipe["services"]["reference"]
    if name == "own average":
        del recipe["reference"]
    if name == "experts":
        # The critic is a dense model of the same tokens.
        mixture = str(model.parent / "mixture")
        recipe["actor"]["model"]["path"] = recipe["reference"]["model"]["path"] = mixture
    if name == "images":
        task = model.parent / "images"
        for role in ("actor", "critic", "reference"):
            recipe[role]["model"]["path"] = str(task / "model")
        recipe["actor"]["data"] = data_of(task, held_out_size=4)
    if name == "rollout":
        actor = recipe["actor"]
        recipe["rollout"] |= {"model": {"path": str(model)}, "data": actor["data"]}
        recipe["services"]["rollout"] = {"replicas": 2, "threads": 1}
    return recipe


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    write_tiny_mixture(folder.parent / "mixture")
    write_task(folder.parent / "images", seed=1)
    return folder


@pytest.fixture(scope="module")
def undisturbed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folders of the runs that are left alone, by recipe; each is made when it is first needed."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            run = CliRun(recipe_of(name, model), tmp_path_factory.mktemp("undisturbed"))
            try:
                assert run.wait(WAIT_S) == 0, run.output
            finally:
                run.close()
            made[name] = run.out
        return made[name]

    return folder


@pytest.mark.timeout(3 * WAIT_S)
@pytest.mark.parametrize("number", range(RUNS))
@pytest.mark.parametrize("name", CASES)
def test_kill_matrix(name: str, number: int, model: Path, undisturbed: Any, tmp_path: Path) -> None:
    expected, case = undisturbed(name), CASES[name]
    seed = list(CASES).index(name)
    dealt = plans(case.victims, case.phases, runs=RUNS, kills=KILLS, seed=seed)
    run = killed_run(recipe_of(name, model), tmp_path, dealt[number], WAIT_S)
    kills = kills_of(tmp_path)
    told = json.dumps(read_log(tmp_path), indent=1)
    assert learnt(run.out) == learnt(expected), told
    assert written(run.out) == written(expected), told
    assert len(kills) == KILLS, told
    assert sum(kill["was_found"] for kill in kills) >= 3, told
    assert left_of(tmp_path) == [], told
    summary = json.loads((run.out / "summary.json").read_text())
    assert (summary["state"], summary["steps"]) == ("succeeded", STEPS)
