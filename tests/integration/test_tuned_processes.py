"""A run of real processes that tunes itself, and whose coordinator is killed in a trial."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.mesh_runs import CliRun, tiny_model, tiny_recipe
from support.run_results import learnt, written

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

WAIT_S = 400
STEPS = 10
SPACE = {
    "reward.source.concurrency": [4],
    "schedule.sampler.block_rows": [4],
    "pools": [{"actor": {"roles": ["actor"]}, "reward": {"roles": ["reward"]}}],
}
JUDGE = """
import time

def judge(prompts, completions, **columns):
    time.sleep(0.1 * len(completions))
    return [sum(map(ord, text)) % 7 / 7 for text in completions]
"""


def recipe_of(folder: Path) -> dict[str, Any]:
    (folder / "judge.py").write_text(JUDGE)
    recipe = tiny_recipe(
        tiny_model(folder / "model"),
        run__steps=STEPS,
        run__checkpoint={"every_steps": 0},
        algorithm={
            "type": "grpo",
            "sampling": {"samples_per_prompt": 2, "max_new_tokens": 6},
            "mini_batch_rows": 4,
        },
        reward={
            "source": {
                "type": "python",
                "function": f"{folder / 'judge.py'}:judge",
                "batch_size": 1,
            }
        },
        services={role: {"threads": 1} for role in ("actor", "reward")},
    )
    del recipe["critic"], recipe["reference"]
    return recipe


def finished(run: CliRun) -> Path:
    try:
        assert run.wait(WAIT_S) == 0, run.output
    finally:
        run.close()
    return run.out


def test_a_tuned_run_has_the_bits_of_one_without_tuning_also_after_a_kill(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    for name in ("plain", "tuned"):
        (tmp_path / name).mkdir()
    plain = finished(CliRun(recipe, tmp_path / "plain"))
    recipe["run"]["tuning"] = {"space": SPACE}
    first = CliRun(recipe, tmp_path / "tuned")
    first.wait_until((first.out / "tuning.jsonl").exists, WAIT_S)
    first.kill()
    begun = json.loads((first.out / "tuning.jsonl").read_text().splitlines()[0])
    tuned = finished(CliRun(recipe, tmp_path / "tuned", "--resume", str(first.out)))
    told = json.loads((tuned / "summary.json").read_text())["tuning"]
    assert told["turns"][0] == begun
    assert any(turn["verdict"] is not None for turn in told["turns"])
    assert written(tuned) == written(plain)

    def updates(run: Path) -> list[dict[str, float]]:
        # How judges were asked changes; of rewards in blocks, deviations cannot be joined.
        return [
            {name: value for name, value in record.items() if "reward/" not in name}
            for record in learnt(run)
        ]

    assert updates(tuned) == updates(plain)
