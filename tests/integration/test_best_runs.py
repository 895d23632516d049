"""Real tiny runs with a falling learning rate: stopped early, resumed, and with undone updates."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.mesh_runs import CliRun, tiny_model, tiny_recipe
from support.run_results import learnt, unexplained, written

from rolemesh.coordinator.run.saving.kept_checkpoints import best_kept

pytestmark = pytest.mark.timeout(600)

WAIT_S = 300
STEPS, UPDATES = 4, 2  # 8 rows in mini-batches of 4
METRIC = "held_out/sampler_logprob/mean"
"""Changes with the weights, while a tiny model's score stays 0."""
ACTOR, CRITIC, LOW = 1e-4, 1e-3, 1e-5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def recipe(model: Path, **changes: Any) -> dict[str, Any]:
    return tiny_recipe(
        model,
        **{
            "run__steps": STEPS,
            "run__evaluation": {"num_prompts": 4, "every_steps": 1},
            "run__checkpoint": {"every_steps": 0, "keep_best": {"metric": METRIC}},
            "actor__optimizer": {
                "learning_rate": ACTOR,
                "warmup_steps": 3,
                "schedule": {"type": "cosine", "min_learning_rate": LOW},
            },
            "critic__optimizer": {"learning_rate": CRITIC, "schedule": {"type": "linear"}},
            **changes,
        },
    )


def grpo(model: Path, **changes: Any) -> dict[str, Any]:
    """The same with two roles, which takes half the time."""
    values = recipe(model, **changes)
    sampling = values["algorithm"]["sampling"]
    # The rewards of a tiny model are all 0: without a bonus there would be no gradient.
    loss = {"entropy_coefficient": 0.01}
    values["algorithm"] = {
        "type": "grpo", "sampling": sampling, "mini_batch_rows": 4, "policy_loss": loss
    }  # fmt: skip
    for section in (values, values["services"]):
        del section["critic"], section["reference"]
    return values


@contextmanager
def made(recipe: dict[str, Any], folder: Path, *flags: str) -> Iterator[CliRun]:
    """The run, once it has come to its end."""
    folder.mkdir(exist_ok=True)
    run = CliRun(recipe, folder, *flags)
    try:
        assert run.wait(WAIT_S) == 0, run.output
        yield run
    finally:
        run.close()


def actor_rate(update: int) -> float:
    if update < 3:
        return ACTOR * (update + 1) / 3
    done = min(1.0, (update - 3) / (STEPS * UPDATES - 3))
    return LOW + (ACTOR - LOW) * (1 + math.cos(math.pi * done)) / 2


def critic_rate(update: int) -> float:
    return CRITIC * (1 - min(1.0, update / (STEPS * UPDATES)))


@pytest.mark.slow
def test_a_run_that_stopped_early_and_goes_on_is_the_one_that_did_not_stop(
    model: Path, tmp_path: Path
) -> None:
    with made(grpo(model), tmp_path / "whole") as whole:
        expected, files = learnt(whole.out), written(whole.out)
    assert unexplained(expected) == []
    assert all(record["grad_norm"] > 0 for record in expected)
    for step, record in enumerate(expected):
        updates = range(step * UPDATES, (step + 1) * UPDATES)
        mean = sum(map(actor_rate, updates)) / UPDATES
        assert record["learning_rate"] == pytest.approx(mean, rel=1e-12), step

    # No score is better by so much, so that the patience is over after as many steps.
    stopping = {"patience": 2, "min_delta": 1000.0}
    folder = tmp_path / "stopped"
    with made(grpo(model, run__early_stopping=stopping), folder) as stopped:
        told = json.loads((stopped.out / "summary.json").read_text())
        assert (told["state"], told["steps"], told["num_steps"]) == ("succeeded", 2, STEPS)
        assert told["early_stop"].startswith(f"early stopping after step 2: {METRIC} was ")
        assert told["early_stop"] in stopped.stdout
        assert learnt(stopped.out) == expected[:2]
        changes = ("--set", "run.early_stopping.patience=100")
    with made(
        grpo(model, run__early_stopping=stopping), folder, "--resume", str(stopped.out), *changes
    ) as resumed:
        assert learnt(resumed.out) == expected
        weights = {name: one for name, one in files.items() if name.startswith("model/")}
        again = written(resumed.out)
        assert weights
        assert {name: again.get(name) for name in weights} == weights
        values = [record[METRIC] for record in expected]
        assert len(set(values)) == STEPS
        best = values.index(max(values)) + 1
        assert best_kept(resumed.out) == best
        newest = f"checkpoints/step-{STEPS:08}/"
        assert {name for name in files if name.startswith(newest)} <= again.keys()


@pytest.mark.slow
def test_updates_that_are_undone_do_not_count_for_the_schedule(model: Path, tmp_path: Path) -> None:
    changes = {
        "run__evaluation": {"num_prompts": 0},
        "run__checkpoint": {"every_steps": 0},
        # Every gradient is larger, so that each update is undone.
        "run__health": {"grad_norm": {"above": {"actor": 1e-9}, "do": "skip"}},
    }
    with made(recipe(model, **changes), tmp_path / "skipping") as run:
        records = learnt(run.out)
    assert [record["health/skipped"] for record in records] == [1.0] * STEPS
    for role, rate in (("actor", actor_rate), ("critic", critic_rate)):
        rates = [record[f"{role}/learning_rate"] for record in records]
        assert rates == pytest.approx([(rate(0) + rate(1)) / 2] * STEPS, rel=1e-12), role
