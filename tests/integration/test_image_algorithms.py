"""Every algorithm makes its steps with images, over real services."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.image_tasks import data_of, picture_rows, reward_of, write_task
from support.learning_runs import LearnedRun, learn, service_processes, write_rows
from support.learning_tasks import given_recipe, model_of, sampled_recipe

from rolemesh.coordinator.algorithms.registry import ALGORITHMS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 2
COLORS = "RGB"
GIVEN = ("sft", "dpo", "kto", "reward_model")
SECTIONS: Mapping[str, Mapping[str, Any]] = {
    "dr_grpo": {
        "policy_loss": {"type": "ppo_policy", "aggregation": "seq_sum_norm", "norm_length": 2},
    },
    "online_dpo": {"policy_loss": {"type": "dpo", "beta": 0.05}},
    "pass_at_k": {"advantages": {"k": 2}},
}
"""What a recipe of the algorithm has to say besides its name."""


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with service_processes(tmp_path_factory.mktemp("services")) as addresses:
        yield addresses


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("task"), 1)


async def made(
    recipe: dict[str, Any], services: dict[str, str], folder: Path, task: Path
) -> LearnedRun:
    """The run, of which sampler and trainer agree, and whose export has the tower as it was."""
    used = {role: services[role] for role in recipe if role in services}
    run = await learn(recipe, used, folder)
    for record in run.records:
        assert record.get("sampler_logprob_diff_max", 0.0) < 1e-4
    before, after = (load_file(one / "model.safetensors") for one in (task / "model", run.model))
    towers = [name for name in before if name.startswith("visual.")]
    assert towers
    for name in towers:
        assert torch.equal(after[name].float(), before[name].to(after[name].dtype).float()), name
    return run


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in GIVEN])
async def test_an_algorithm_that_samples_makes_its_steps(
    name: str, task: Path, services: dict[str, str], tmp_path: Path
) -> None:
    section = {"type": name, **SECTIONS.get(name, {})}
    recipe = sampled_recipe(task, section, seed=1, steps=STEPS, worth={})
    recipe["algorithm"]["sampling"]["max_new_tokens"] = 2
    del recipe["actor"]["environment"]
    recipe["actor"]["data"] = data_of(task)
    recipe["reward"] = reward_of(task)
    if name == "safe_rlhf":
        recipe["cost"] = reward_of(task)
    if name == "gdpo":
        # It weighs several sources.
        recipe["reward"] = [{"name": one, **reward_of(task)} for one in ("first", "second")]
    if name == "on_policy_distillation":
        teacher = write_task(tmp_path / "teacher", 2)
        recipe["teacher"] = {"model": model_of(teacher / "model")}
    run = await made(recipe, services, tmp_path / "run", task)
    assert len(run.records) == STEPS


@pytest.mark.parametrize("name", GIVEN)
async def test_an_algorithm_of_given_answers_sees_the_pictures(
    name: str, task: Path, services: dict[str, str], tmp_path: Path
) -> None:
    """With other pictures, and all else alike, its losses are others."""
    losses = []
    for turn in (0, 1):
        rows = []
        for number, row in enumerate(picture_rows(task)):
            right = COLORS[int(row["answer"])]
            wrong = COLORS[(int(row["answer"]) + 1) % 3]
            answers: dict[str, dict[str, Any]] = {
                "sft": {"completion": right},
                "kto": {"completion": right, "label": number % 2 == 0},
            }
            given = answers.get(name, {"chosen": right, "rejected": wrong})
            other = picture_rows(task)[(number + 4 * turn) % 12]
            rows.append({"prompt": "?", "images": other["images"], **given})
        folder = tmp_path / str(turn)
        folder.mkdir()
        data = write_rows(folder / "rows.jsonl", rows)
        section = {"type": name}
        recipe = given_recipe(task, section, data, seed=1, steps=STEPS, rows_per_step=12)
        role = "reward" if name == "reward_model" else "actor"
        recipe[role]["data"] = {**data_of(task), "path": str(data)}
        run = await made(recipe, services, folder / "run", task)
        losses.append([record["nll" if name == "sft" else "loss"] for record in run.records])
    # The second step's: a preference loss begins at ln 2 whatever is seen.
    assert losses[0][-1] != losses[1][-1]
