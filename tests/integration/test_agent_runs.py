"""Runs whose trajectories agents play, with kills of sampler, front, coordinator and agents.

The HTTP front lives in the actor's process, so that it dies with the sampler.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.agents import write_agents
from support.kill_plans import COMMON, COORDINATOR, Kill
from support.killed_runs import killed_run, kills_of, left_of
from support.learning_tasks import sampled_recipe, write_task
from support.mesh_runs import CliRun
from support.run_results import learnt, written

from rolemesh.coordinator.run.results.samples_file import read_samples

STEPS = 3
WAIT_S = 1200

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * WAIT_S)]


def recipe_of(folder: Path, environment: dict[str, Any]) -> dict[str, Any]:
    task = write_task(folder / "task", 1)
    recipe = sampled_recipe(task, {"type": "grpo"}, seed=1, steps=STEPS, worth={})
    recipe["run"] |= {"checkpoint": {"every_steps": 1, "keep": 9}}
    recipe["algorithm"]["sampling"] = {"samples_per_prompt": 2, "max_new_tokens": 6}
    recipe["actor"] |= {
        "rollout": {"type": "vllm", "max_model_len": 256, "dtype": "float32"},
        "endpoint": {},
        "environment": environment,
    }
    return recipe


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("undisturbed")
    agents = write_agents(folder)
    environment = {"type": "program", "command": ["python", str(agents), "play"]}
    recipe = recipe_of(folder, {**environment, "on_failure": "retry"})
    run = CliRun(recipe, folder)
    try:
        assert run.wait(WAIT_S) == 0, run.output
    finally:
        run.close()
    return recipe, run.out


PLANS = {
    "sampler": [("actor", "sampling", 2.0), ("actor", "update of the actor", 0.0)],
    "coordinator": [(COORDINATOR, "sampling", 2.0), (COORDINATOR, "actor updated", 0.0)],
}
"""Victim, phase, and how many seconds after its beginning: sessions are in flight then."""


@pytest.mark.parametrize("name", PLANS)
def test_a_run_of_agents_ends_with_the_same_bits_though_processes_are_killed(
    name: str, undisturbed: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    recipe, out = undisturbed
    phases = {phase.name: phase for phase in COMMON}
    plan = [
        Kill(victim, phases[phase], late_s, number)
        for number, (victim, phase, late_s) in enumerate(PLANS[name])
    ]
    run = killed_run(recipe, tmp_path, plan, WAIT_S)
    assert sum(kill["was_found"] for kill in kills_of(tmp_path)) == len(plan)
    assert learnt(run.out) == learnt(out)
    assert written(run.out) == written(out)
    assert left_of(tmp_path) == []


def test_agents_that_are_killed_begin_again_and_nothing_is_trained_twice(
    undisturbed: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    recipe, out = undisturbed
    run = CliRun(recipe, tmp_path)
    killed: list[int] = []
    is_over = threading.Event()

    def kill_some() -> None:
        while not is_over.is_set() and len(killed) < 3:
            for process in psutil.process_iter(["cmdline"]):
                words = process.info["cmdline"] or []
                if words[1:2] == [recipe["actor"]["environment"]["command"][1]]:
                    killed.append(process.pid)
                    process.kill()
                    break
            time.sleep(1.0)

    killer = threading.Thread(target=kill_some)
    killer.start()
    try:
        assert run.wait(WAIT_S) == 0, run.output
    finally:
        is_over.set()
        killer.join()
        run.close()
    assert killed
    # The events of the run say so, and the attempts stand beside the rows that came of them.
    assert "begins again" in run.stdout
    sessions = [one.session for one in read_samples(run.out)]
    assert sessions
    assert all(one is not None and one["log"] for one in sessions)
    assert but_for_attempts(learnt(run.out)) == but_for_attempts(learnt(out))
    assert written(run.out) == written(out)
    summary = json.loads((run.out / "summary.json").read_text())
    assert (summary["state"], summary["steps"]) == ("succeeded", STEPS)


def but_for_attempts(records: list[dict[str, float]]) -> list[dict[str, float]]:
    """Without how often agents began again, which is what the kills change."""
    return [
        {name: value for name, value in record.items() if name != "agents/again"}
        for record in records
    ]
