"""Self-tuning of a badly set recipe beside a sweep of its whole space; one JSON line.

    PYTHONPATH=tests python tests/benchmarks/self_tuning.py [--seeds 3] [--sweep-steps 8]
        [--runs DIR]

GRPO on a tiny random model, trained by the real command line over real services, one thread a rank.
The judge is a function that waits for a while, as one that asks another machine does. The recipe
has it asked once at a time, after all rows are sampled. The space: requests in flight, blocks of
rows, and whether judge and actor share a pool; none of them changes a bit of what is learnt.

Each setting of the space has a run of its own; the median step counts, without the first three.
Tuned runs may tune for 20 steps. Their settings are compared by what the sweep measured of them,
and their weights and metrics with those of a run of the same seed without tuning.

The machine may be shared. So the sweep's seconds are those of a clock that stands still while a
process of the run waits for a core (Linux's schedstat); the plain clock's stand beside them. A run
decides by the plain clock.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import tempfile
from pathlib import Path
from typing import Any

from support.mesh_runs import CliRun, tiny_recipe
from support.run_results import learnt, written
from support.tiny_models import write_tiny_llama
from support.undisturbed import Undisturbed, Waits

WAIT_S = 900
WARMUP_STEPS = 3
TUNED_STEPS = 22
PROMPTS, SAMPLES, TOGETHER, TOKENS = 8, 2, 4, 16

JUDGE = '''
import time

def judge(prompts, completions, **columns):
    """As long as an answer from elsewhere takes; a number that depends on the text alone."""
    time.sleep(0.15 * len(completions))
    return [sum(map(ord, text)) % 7 / 7 for text in completions]
'''

ONE = {"main": {"roles": ["actor", "reward"]}}
SPLIT = {"actor": {"roles": ["actor"]}, "reward": {"roles": ["reward"]}}
SPACE: dict[str, list[Any]] = {
    "reward.source.concurrency": [1, 4, 8],
    "schedule.sampler.block_rows": [0, 4, 8],
    "pools": [ONE, SPLIT],
}
"""The first value of each is the recipe's own: the bad one."""


def recipe_of(folder: Path, seed: int, steps: int, settings: dict[str, Any]) -> dict[str, Any]:
    """The recipe with these settings."""
    model, judge = folder / "model", folder / "judge.py"
    if not model.exists():
        write_tiny_llama(model, hidden_size=64, num_layers=2)
        judge.write_text(JUDGE)
    recipe = tiny_recipe(
        model,
        run__seed=seed,
        run__steps=steps,
        run__prompts_per_step=PROMPTS,
        run__evaluation={"num_prompts": 0},
        run__checkpoint={"every_steps": 0},
        algorithm={
            "type": "grpo",
            "sampling": {"samples_per_prompt": SAMPLES, "max_new_tokens": TOKENS},
            "mini_batch_rows": 8,
        },
        actor__data__train_size=512,
        actor__rollout__max_num_seqs=TOGETHER,
        reward={
            "source": {
                "type": "python",
                "function": f"{judge}:judge",
                "batch_size": 1,
                "concurrency": settings["reward.source.concurrency"],
            }
        },
        schedule={
            "sampler": {"type": "sync", "block_rows": settings["schedule.sampler.block_rows"]}
        },
        pools=settings["pools"],
        services={role: {"threads": 1} for role in ("actor", "reward")},
    )
    del recipe["critic"], recipe["reference"]
    return recipe


def made(place: Path, recipe: dict[str, Any]) -> Path:
    """Folder of a run that was made, now or before."""
    if not (place / "run" / "summary.json").exists():
        place.mkdir(parents=True)
        with Waits() as waits:
            run = CliRun(recipe, place)
            try:
                code = run.wait(WAIT_S)
                assert code == 0, run.output
            finally:
                run.close()
        (place / "waits.json").write_text(json.dumps(waits.samples))
    return place / "run"


def step_seconds(run: Path) -> list[float]:
    """Of all steps, by the plain clock."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["time/step"] for line in lines]


def undisturbed_seconds(run: Path) -> list[float]:
    """The same by the clock that stands still while the run waits for a core."""
    clock = Undisturbed(json.loads((run.parent / "waits.json").read_text()))
    graphs = [json.loads(line) for line in (run / "dataflow.jsonl").read_text().splitlines()]
    begun = [min(node["queued_at"] for node in graph["nodes"]) for graph in graphs]
    return [
        clock(start + seconds) - clock(start)
        for start, seconds in zip(begun, step_seconds(run), strict=True)
    ]


def key_of(settings: dict[str, Any]) -> str:
    """Settings as one short text."""
    roles = sorted(",".join(pool["roles"]) for pool in settings["pools"].values())
    return (
        f"concurrency {settings['reward.source.concurrency']}, blocks of "
        f"{settings['schedule.sampler.block_rows']}, pools {' | '.join(roles)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sweep-steps", type=int, default=8)
    parser.add_argument("--runs", type=Path, help="keeps runs there, and takes those that it has")
    arguments = parser.parse_args()
    every = [dict(zip(SPACE, v, strict=True)) for v in itertools.product(*SPACE.values())]
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = arguments.runs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        sweep, plain_clock = {}, {}
        for number, settings in enumerate(every):
            place = folder / f"sweep{number}"
            run = made(place, recipe_of(folder, 0, arguments.sweep_steps, settings))
            key = key_of(settings)
            sweep[key] = statistics.median(undisturbed_seconds(run)[WARMUP_STEPS:])
            plain_clock[key] = statistics.median(step_seconds(run)[WARMUP_STEPS:])
        best = min(sweep, key=lambda key: sweep[key])
        tuned = []
        for seed in range(arguments.seeds):
            recipe = recipe_of(folder, seed, TUNED_STEPS, every[0])
            plain = made(folder / f"plain{seed}", recipe)
            recipe["run"]["tuning"] = {"space": SPACE}
            run = made(folder / f"tuned{seed}", recipe)
            told = json.loads((run / "summary.json").read_text())["tuning"]
            chosen = key_of(told["settings"])
            models = [written(one) for one in (plain, run)]
            tuned.append(
                {
                    "seed": seed,
                    "chosen": chosen,
                    "of_best": sweep[chosen] / sweep[best],
                    "last_turn_after_step": told["turns"][-1]["step"],
                    "tried": sum(turn["verdict"] is not None for turn in told["turns"]),
                    "kept": sum(
                        turn["verdict"] is not None and turn["verdict"]["is_kept"]
                        for turn in told["turns"]
                    ),
                    "expected_and_measured_s": [
                        [turn["verdict"]["expected_s"], turn["verdict"]["measured_s"]]
                        for turn in told["turns"]
                        if turn["verdict"]
                    ],
                    "seconds": sum(step_seconds(run)),
                    "seconds_without": sum(step_seconds(plain)),
                    "same_weights": bool(models[0]) and models[0] == models[1],
                    "same_metrics": metrics_of(run) == metrics_of(plain),
                }
            )
    print(
        json.dumps(
            {
                "benchmark": "self_tuning",
                "config": {
                    "settings": len(every), "sweep_steps": arguments.sweep_steps,
                    "tuned_steps": TUNED_STEPS, "warmup": WARMUP_STEPS,
                },
                "own": key_of(every[0]),
                "own_s": sweep[key_of(every[0])],
                "best": best,
                "best_s": sweep[best],
                "sweep_s": sweep,
                "plain_clock_s": plain_clock,
                "tuned": tuned,
                "machine": {
                    "cpus": os.cpu_count(),
                    "arch": platform.machine(),
                    "load": round(os.getloadavg()[0], 1),
                },
            }
        )
    )  # fmt: skip


def metrics_of(run: Path) -> list[dict[str, float]]:
    """What the records say of learning, and not of how judges were asked.

    Means over rows are computed from those of blocks, and spreads cannot be: they say the same of
    the same rows, in other bits.
    """
    return [
        {name: value for name, value in record.items() if not name.startswith("reward")}
        for record in learnt(run)
    ]


if __name__ == "__main__":
    main()
