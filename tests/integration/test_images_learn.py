"""Policies of images and text learn to name what they are shown, by services as they are.

A square in one of three colours is drawn; the answer is one token. Chance is a third, since tokens
are told by the remainder of their letter, and the best is 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.image_tasks import data_of, reward_of, write_task
from support.mesh_runs import ended_run
from support.run_results import curve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SEEDS = (1, 2, 3)
STEPS = 80
NUM_LAST = 5
RATES = {"qwen2_5_vl": 3e-3, "qwen3_vl": 1.5e-3}
"""Twice as many layers bear half the rate: at 3e-3 they reach 1, and later forget a colour."""
FIRST_LEVEL, LEVEL = 0.5, 0.9
"""The mean reward of the first step is near chance, and of the last ones above this."""
WAIT_S = 1500


def recipe_of(
    task: Path, algorithm: str, sampler: str, *, seed: int, steps: int, rate: float = 3e-3
) -> dict[str, Any]:
    model = {"path": str(task / "model"), "compute_dtype": "float32"}
    optimizer = {"learning_rate": rate}
    rollout = {"type": sampler, "max_model_len": 64, "dtype": "float32"}
    recipe: dict[str, Any] = {
        "run": {
            "name": "colours",
            "seed": seed,
            "steps": steps,
            "prompts_per_step": 12,
            "evaluation": {"num_prompts": 0},
        },
        "algorithm": {
            "type": algorithm,
            "sampling": {"samples_per_prompt": 8, "max_new_tokens": 1},
            "mini_batch_rows": 48,
        },
        "actor": {
            "model": model,
            "optimizer": optimizer,
            "rollout": rollout,
            "data": data_of(task),
        },
        "reward": reward_of(task),
        "services": {role: {"threads": 1} for role in ("actor", "reward")},
        "store": {"type": "memory"},
    }
    if algorithm == "ppo":
        recipe["reference"] = {"model": model}
        recipe["critic"] = {"model": model, "optimizer": optimizer}
        recipe["services"] |= {role: {"threads": 1} for role in ("critic", "reference")}
    return recipe


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("sampler", ["hf", "vllm"])
@pytest.mark.parametrize(
    ("family", "algorithm"), [("qwen2_5_vl", "grpo"), ("qwen2_5_vl", "ppo"), ("qwen3_vl", "grpo")]
)
def test_a_policy_learns_to_name_what_it_is_shown(
    family: str, algorithm: str, sampler: str, seed: int, tmp_path: Path
) -> None:
    task = write_task(tmp_path / "task", seed, family)
    recipe = recipe_of(task, algorithm, sampler, seed=seed, steps=STEPS, rate=RATES[family])
    out = ended_run(recipe, tmp_path / "run", timeout_s=WAIT_S)
    rewards = curve(out, "reward/mean")
    print(family, algorithm, sampler, seed, [round(value, 3) for value in rewards])
    assert rewards[0] < FIRST_LEVEL
    assert sum(rewards[-NUM_LAST:]) / NUM_LAST >= LEVEL
    # Sampler and trainer saw the same images.
    assert max(curve(out, "sampler_logprob_diff_max")) < 1e-4
