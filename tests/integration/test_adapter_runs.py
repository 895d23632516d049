"""Every algorithm starts and ends with an adapter, over real services; only factors are kept."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from support.learning_runs import learn, service_processes, write_rows
from support.learning_tasks import (
    LETTERS,
    WORD_LENGTH,
    demonstrations,
    given_recipe,
    judged_by_function,
    judgements,
    model_of,
    pairs,
    sampled_recipe,
    write_task,
)
from support.run_results import learnt, written
from support.slow_cases import mostly_slow
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rolemesh.coordinator.algorithms.registry import ALGORITHMS
from rolemesh.coordinator.recipe.algorithm.policy_gradients import POLICY_GRADIENTS
from rolemesh.engine.weights.checkpoints.checkpoint import open_checkpoint

STEPS = 2
ROWS = {"sft": demonstrations, "dpo": pairs, "kto": judgements, "reward_model": pairs}
SECTIONS: Mapping[str, Mapping[str, Any]] = {
    "dr_grpo": {
        "policy_loss": {
            "type": "ppo_policy",
            "aggregation": "seq_sum_norm",
            "norm_length": WORD_LENGTH,
        },
    },
    "online_dpo": {"policy_loss": {"type": "dpo", "beta": 0.05}},
}
OF_THE_FAMILY = ("grpo", "dr_grpo", "gspo", "rloo", "reinforce_plus_plus")
"""Of the family of GRPO, whose members are one listing: some of each kind of loss and estimator."""
NAMES = [name for name in ALGORITHMS if name not in POLICY_GRADIENTS or name in OF_THE_FAMILY]
AS_GRPO = (*OF_THE_FAMILY[1:], "dapo", "remax")
"""They ask the same of a model with an adapter; their numbers are tested where losses are."""
ADAPTER = {"rank": 4, "alpha": 8}


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Addresses of services that outlive the runs, two at a time; none is a reference."""
    roles = ("actor", "critic", "teacher", "reward", "cost", "rollout")
    folder = tmp_path_factory.mktemp("services")
    with service_processes(folder, roles, "--runs", "2") as addresses:
        yield addresses


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("task"), 1)


def _recipe(
    name: str, task: Path, folder: Path, *, has_environment: bool = False
) -> dict[str, Any]:
    section = {"type": name, **SECTIONS.get(name, {})}
    if name in ROWS:
        data = write_rows(folder / "rows.jsonl", ROWS[name](1, 16 * STEPS))
        recipe = given_recipe(task, section, data, seed=1, steps=STEPS, rows_per_step=8)
    else:
        recipe = sampled_recipe(task, section, seed=1, steps=STEPS, worth={LETTERS: 1.0})
        recipe = recipe if has_environment else judged_by_function(recipe, task)
    if name == "safe_rlhf":
        recipe["cost"] = recipe["reward"]
    if name == "on_policy_distillation":
        recipe["teacher"] = {"model": model_of(write_task(folder / "teacher", 2) / "model")}
    for role in ("actor", "critic"):
        if role in recipe:
            recipe[role] = {**recipe[role], "model": _adapted(task)}
    if "reference" in recipe:
        recipe["reference"] = {}
    if name == "reward_model":
        recipe["reward"]["source"]["model"] = _adapted(task)
    return recipe


def _adapted(task: Path) -> dict[str, Any]:
    return {**model_of(task / "model"), "adapter": ADAPTER}


@pytest.mark.parametrize(
    "name",
    mostly_slow(
        [number for number, name in enumerate(NAMES) if name not in AS_GRPO],
        [(name,) for name in NAMES],
    ),
)
async def test_every_algorithm_starts_and_ends_with_an_adapter(
    name: str, task: Path, services: dict[str, str], tmp_path: Path
) -> None:
    recipe = _recipe(name, task, tmp_path)
    used = {role: services[role] for role in recipe if role in services}
    run = await learn(recipe, used, tmp_path / "run")
    trained = "reward" if name == "reward_model" else "actor"
    checkpoint = open_checkpoint(tmp_path / "run/checkpoints/step-00000002" / trained)
    names = checkpoint.parameters("weights")
    assert names
    assert all(".lora_" in one or one.startswith("score.") for one in names)
    assert checkpoint.state["base"]["path"] == str((task / "model").resolve())

    is_policy = trained == "actor"
    auto = AutoModelForCausalLM if is_policy else AutoModelForSequenceClassification
    fields = {} if is_policy else {"num_labels": 1}
    base = auto.from_pretrained(task / "model", dtype=torch.float32, **fields)
    before = {key: value.clone() for key, value in base.state_dict().items()}
    model = peft.PeftModel.from_pretrained(base, run.model)
    for key, value in model.state_dict().items():
        if "lora_B" in key:
            assert value.abs().max() > 0, key
    merged = model.merge_and_unload().state_dict()
    assert merged.keys() == before.keys()
    moved = [key for key in merged if not torch.equal(merged[key], before[key])]
    assert all("_proj.weight" in key or key.startswith("score.") for key in moved)
    if "reference" not in recipe:
        return
    for line in (tmp_path / "run/dataflow.jsonl").read_text().splitlines():
        served = [(one["role"], one["method"]) for one in json.loads(line)["nodes"]]
        assert ("actor", "compute_reference_logprobs") in served
        assert not any(role == "reference" for role, _ in served)


@pytest.mark.parametrize("name", ["grpo", pytest.param("ppo", marks=pytest.mark.slow)])
async def test_two_runs_that_share_services_learn_what_each_learns_alone(
    name: str, task: Path, services: dict[str, str], tmp_path: Path
) -> None:
    def recipe(seed: int) -> dict[str, Any]:
        # Rewards of functions tell of times besides.
        made = _recipe(name, task, tmp_path, has_environment=True)
        made["run"] = {**made["run"], "seed": seed, "name": f"seed-{seed}"}
        return made

    async def made(seed: int, folder: str) -> tuple[list[dict[str, float]], dict[str, str]]:
        """What is learnt and written: weights, moments, generators."""
        directory = tmp_path / folder / str(seed)
        used = {role: services[role] for role in recipe(seed) if role in services}
        await learn(recipe(seed), used, directory)
        return learnt(directory), written(directory)

    alone = [await made(seed, "alone") for seed in (1, 2)]
    together = await asyncio.gather(*(made(seed, "together") for seed in (1, 2)))
    assert list(together) == alone
    assert alone[0][1] != alone[1][1]
    # They did run at once: each began before the other one ended.
    moments = [_moments(tmp_path / "together" / str(seed)) for seed in (1, 2)]
    assert max(first for first, _ in moments) < min(last for _, last in moments)


def _moments(directory: Path) -> tuple[float, float]:
    """When the first call of a run's steps began, and when the last one ended."""
    lines = (directory / "dataflow.jsonl").read_text().splitlines()
    nodes = [node for line in lines for node in json.loads(line)["nodes"]]
    return min(node["started_at"] for node in nodes), max(node["ended_at"] for node in nodes)


async def test_the_actors_base_is_the_reference_bit_by_bit(
    task: Path, services: dict[str, str], tmp_path: Path
) -> None:
    recipe = _recipe("ppo", task, tmp_path)
    recipe["algorithm"]["advantages"] = {
        "type": "gae",
        "kl_in_reward": {"type": "fixed", "coefficient": 0.1},
    }
    used = {role: services[role] for role in recipe if role in services}
    found = await learn(recipe, used, tmp_path / "base")
    with service_processes(tmp_path, ("reference",)) as reference:
        own = {**recipe, "reference": {"model": model_of(task / "model")}}
        expected = await learn(own, {**used, **reference}, tmp_path / "own")
    assert found.curve("kl/mean")[-1] != 0
    for metric in ("kl/mean", "reward/mean", "policy_loss"):
        assert found.curve(metric) == expected.curve(metric)


async def test_the_adapter_alone_travels_to_rollout_services(
    task: Path, services: dict[str, str], tmp_path: Path
) -> None:
    recipe = _recipe("grpo", task, tmp_path)
    actor = recipe["actor"]
    recipe["rollout"] = {"model": {"path": actor["model"]["path"]}, "rollout": actor.pop("rollout")}
    recipe["rollout"]["data"] = actor["data"]
    recipe["pools"] = {
        "training": {"roles": ["actor", "reward"]},
        "rollout": {"roles": ["rollout"]},
    }
    recipe["run"]["steps"] = 3
    used = {role: services[role] for role in recipe if role in services}
    run = await learn(recipe, used, tmp_path / "run")
    checkpoint = open_checkpoint(tmp_path / "run/checkpoints/step-00000003/actor")
    factors = checkpoint.parameters("weights").values()
    num_bytes = sum(one.num_bytes for one in factors)
    for record in run.records:
        assert record["published_bytes"] == record["weight_sync_bytes"] == num_bytes
        # Nats: float32 products in another order.
        assert record["sampler_logprob_diff_max"] < 2e-5
