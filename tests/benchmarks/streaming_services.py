"""Blocks against whole batches with real services: tiny models, the transformers sampler.

    python tests/benchmarks/streaming_services.py [--steps 5] [--rounds 3] [--block-rows 8]

The same as streaming.py without fakes: the actor samples in a process of its own, and reference,
critic and reward judge in theirs, one thread each, on a split placement (the actor in one pool, the
others in another). The policy ends a completion with one of many stop tokens, so lengths fall off
like odds do: most are short, a few long. Reference and critic are wider than the policy, so that
there is something to overlap. Services start once; runs of both ways take turns over them, and each
run's first step is not counted. Both ways sample and judge the same rows. Where other programs have
the processors, two processes at once gain less. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import grpc
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.fake_runs import read_lines
from support.mesh_runs import ROLES, tiny_recipe
from support.tiny_models import write_tiny_llama

from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.run.services.commands import service_commands
from rolemesh.coordinator.run.services.launch import Launcher
from rolemesh.coordinator.run.training_run import TrainingRun
from rolemesh.coordinator.state.memory import MemoryStateStore

PROMPTS, SAMPLES = 16, 4
ROWS = PROMPTS * SAMPLES
MAX_NEW_TOKENS = 200
NUM_STOP_TOKENS = 20
"""Of a vocabulary of 512: a token ends its row about one time in 25."""
POOLS = {
    "policy": {"roles": ["actor"]},
    "judges": {"roles": ["critic", "reference", "reward"]},
}
NUM_WARMUP_STEPS = 1


def write_models(folder: Path) -> tuple[Path, Path]:
    """The policy, and the wider model of reference and critic."""
    policy = write_tiny_llama(folder / "policy")
    generation = policy / "generation_config.json"
    stops = [2, *range(300, 299 + NUM_STOP_TOKENS)]
    generation.write_text(json.dumps(json.loads(generation.read_text()) | {"eos_token_id": stops}))
    wide = write_tiny_llama(
        folder / "wide", seed=1, num_layers=4, hidden_size=256, num_heads=8, num_kv_heads=4
    )
    return policy, wide


def recipe_of(
    models: tuple[Path, Path], steps: int, block_rows: int, addresses: dict[str, str] | None
) -> Recipe:
    """One run; without addresses, what services are started with."""
    policy, wide = ({"path": str(path), "compute_dtype": "float32"} for path in models)
    values = tiny_recipe(
        models[0],
        run__steps=steps + NUM_WARMUP_STEPS,
        run__prompts_per_step=PROMPTS,
        run__evaluation__num_prompts=0,
        algorithm__sampling={"samples_per_prompt": SAMPLES, "max_new_tokens": MAX_NEW_TOKENS},
        algorithm__mini_batch_rows=ROWS,
        actor__model=policy,
        actor__data__train_size=256,
        critic__model=wide,
        reference__model=wide,
        # The policy stays as it is: every step has lengths of one distribution.
        actor__optimizer__learning_rate=1e-8,
        schedule__sampler={"type": "sync", "block_rows": block_rows},
        pools=POOLS,
        store={"type": "memory"},
    )
    if addresses is not None:
        values["services"] = {role: {"address": address} for role, address in addresses.items()}
    return Recipe.model_validate(values)


async def make_steps(
    recipe: Recipe, addresses: dict[str, str], folder: Path
) -> list[dict[str, float]]:
    """Figures of each counted step."""
    run = TrainingRun(recipe, directory=folder, addresses=addresses, store=MemoryStateStore())
    await run.execute()
    counted = []
    for record, graph in zip(
        read_lines(folder / "metrics.jsonl")[NUM_WARMUP_STEPS:],
        read_lines(folder / "dataflow.jsonl")[NUM_WARMUP_STEPS:],
        strict=True,
    ):
        first = min(node["started_at"] for node in graph["nodes"])
        (advantages,) = (n for n in graph["nodes"] if n["method"] == "compute_advantages")
        counted.append(
            {
                "step": record["time/step"],
                "until_scored": advantages["started_at"] - first,
                "generate": record["time/generate"],
                "scoring": sum(record[f"time/{of}"] for of in ("values", "reference", "reward")),
                "length_mean": record["completion_length/mean"],
                "length_max": record["completion_length/max"],
            }
        )
    return counted


async def compare(steps: int, rounds: int, block_rows: int) -> dict[str, Any]:
    """Both ways, in turns."""
    ways = {"whole": 0, "blocks": block_rows}
    made: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = write_models(folder)
        started = recipe_of(models, steps, 0, None)
        commands = service_commands(started, folder)
        async with Launcher(ROLES, commands, folder / "logs") as launcher:
            addresses = dict(await launcher.start())
            for number in range(rounds):
                for way, rows in ways.items():
                    recipe = recipe_of(models, steps, rows, addresses)
                    made[way] += await make_steps(recipe, addresses, folder / f"{way}-{number}")
    lengths = {way: [step["length_mean"] for step in counted] for way, counted in made.items()}
    if lengths["whole"] != lengths["blocks"]:
        raise RuntimeError(f"the ways sampled different rows: {lengths}")
    medians = {
        way: {name: statistics.median(step[name] for step in counted) for name in counted[0]}
        for way, counted in made.items()
    }
    return {
        **medians,
        "ratio": {
            name: medians["whole"][name] / medians["blocks"][name]
            for name in ("step", "until_scored")
        },
        "repetitions": len(made["whole"]),
    }


def rounded(value: Any) -> Any:
    """Three digits are more than the machine's noise leaves."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    return round(value, 3) if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5, help="counted steps of each run")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each way, in turns")
    parser.add_argument("--block-rows", type=int, default=8)
    arguments = parser.parse_args()
    if arguments.steps < 1 or arguments.rounds < 1:
        parser.error("--steps and --rounds must be at least 1")
    if arguments.block_rows < 1 or arguments.block_rows % SAMPLES:
        parser.error(f"--block-rows must be a multiple of the {SAMPLES} samples a prompt")
    found = asyncio.run(compare(arguments.steps, arguments.rounds, arguments.block_rows))
    result = {
        "benchmark": "streaming_services",
        "config": {
            "steps": arguments.steps,
            "rounds": arguments.rounds,
            "block_rows": arguments.block_rows,
            "rows": ROWS,
        },
        **rounded(found),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "grpcio": grpc.__version__,
        },
        "machine": {
            "cpus": os.cpu_count(),
            "arch": platform.machine(),
            "load": os.getloadavg()[0],
        },
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
