"""A mixture whose experts two ranks share out learns, replaying the routes of its sampler.

Coordinator and services as they are, on the tasks of `test_algorithms_learn`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.learning_tasks import LETTERS, VOCAB_SIZE, sampled_recipe, write_task
from support.mesh_runs import ended_run
from support.run_results import curve
from support.tiny_mixtures import write_tiny_mixture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SEEDS = (1, 2, 3)
STEPS = 60
NUM_LAST = 5
FIRST_LEVEL, LEVEL = 0.2, 0.9
"""See `test_algorithms_learn`."""
WAIT_S = 1500
SHARED = {"dp": 2, "fsdp": 2, "ep": 2}


def _recipe(task: Path, algorithm: str, seed: int, steps: int, **train: int) -> dict[str, Any]:
    recipe = sampled_recipe(task, {"type": algorithm}, seed=seed, steps=steps, worth={LETTERS: 1.0})
    recipe["actor"] |= {"train": train}
    recipe["actor"]["rollout"]["replay_routes"] = True
    # The critic is a dense model of the same tokens.
    mixture = {**recipe["actor"]["model"], "path": str(task / "mixture")}
    recipe["actor"]["model"] = {**mixture, "balancing": {"rate": 0.01}}
    if "reference" in recipe:
        recipe["reference"] = {"model": mixture}
    services = {role: {"threads": 1} for role in ("actor", "critic", "reference", "reward")}
    used = {role: services[role] for role in services if role in recipe}
    return {**recipe, "services": used, "store": {"type": "memory"}}


def _task(folder: Path, seed: int) -> Path:
    task = write_task(folder, seed)
    write_tiny_mixture(task / "mixture", seed=seed, vocab_size=VOCAB_SIZE)
    return task


def _loads(run: Path) -> list[tuple[int, list[int]]]:
    """Steps, and choices of each expert of the one layer with experts, of the actor alone.

    They are sums over two optimizer steps, which are at most as uneven as the more uneven of both.
    """
    lines = [json.loads(line) for line in (run / "experts.jsonl").read_text().splitlines()]
    for line in lines:
        assert line["roles"].keys() == {"actor"}
        assert line["roles"]["actor"]["layers"] == [1]
    loads = [(line["step"], line["roles"]["actor"]["choices"][0]) for line in lines]
    for (_, found), most in zip(loads, curve(run, "experts/load_ratio_max"), strict=True):
        assert 1 <= max(found) * len(found) / sum(found) <= most * (1 + 1e-9)
    return loads


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_mixture_over_two_ranks_learns(algorithm: str, seed: int, tmp_path: Path) -> None:
    task = _task(tmp_path / "task", seed)
    out = ended_run(
        _recipe(task, algorithm, seed, STEPS, **SHARED), tmp_path / "run", timeout_s=WAIT_S
    )
    rewards = curve(out, "reward/mean")
    print(algorithm, seed, [round(value, 3) for value in rewards])
    assert rewards[0] < FIRST_LEVEL
    assert sum(rewards[-NUM_LAST:]) / NUM_LAST >= LEVEL
    gaps = curve(out, "sampler_logprob_diff_max")
    # With its routes the trainer scores what the sampler did, but for the order of sums.
    assert max(gaps) < 1e-4
    ratios = curve(out, "experts/load_ratio")
    assert all(1 <= ratio <= 4 for ratio in ratios)
    assert [step for step, _ in _loads(out)] == list(range(1, STEPS + 1))


def test_a_run_goes_on_with_its_experts_shared_out_otherwise(tmp_path: Path) -> None:
    """The checkpoint does not know how many ranks there were: steps are those of one run."""
    task = _task(tmp_path / "task", 1)

    def recipe(steps: int, **train: int) -> dict[str, Any]:
        made = _recipe(task, "grpo", 1, steps, **train)
        made["run"]["checkpoint"] = {"every_steps": 2}
        return made

    whole = ended_run(recipe(6, **SHARED), tmp_path / "whole", timeout_s=WAIT_S)
    out = ended_run(recipe(4, **SHARED), tmp_path / "run", timeout_s=WAIT_S)
    resumed = ended_run(
        recipe(6, dp=4, fsdp=4, ep=4), tmp_path / "run", "--resume", str(out), timeout_s=WAIT_S
    )
    for name in ("reward/mean", "entropy", "grad_norm", "experts/load_ratio"):
        # Sums in another order, by which no draw of these few changes.
        assert curve(resumed, name) == pytest.approx(curve(whole, name), rel=1e-3), name
    assert [step for step, _ in _loads(resumed)] == [1, 2, 3, 4, 5, 6]
    for (_, found), (_, expected) in zip(_loads(resumed), _loads(whole), strict=True):
        # A choice between scores that differ in their last bits may fall otherwise.
        assert sum(found) == sum(expected)
        assert sum(abs(a - b) for a, b in zip(found, expected, strict=True)) <= 4
    models = [load_file(run / "model" / "model.safetensors") for run in (whole, resumed)]
    assert models[0].keys() == models[1].keys()
    for name, weight in models[0].items():
        # Steps of 3e-3, saved in bfloat16.
        torch.testing.assert_close(models[1][name], weight, rtol=2**-7, atol=3e-4, msg=name)
