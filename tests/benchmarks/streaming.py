"""Completions that go on in blocks against waiting for the whole batch, where a few are long.

    python tests/benchmarks/streaming.py [--steps 2] [--rounds 3] [--block-rows 4]

The real coordinator makes PPO steps over fake services on loopback. A generation takes a decoding
step of TOKEN_SECONDS for each token of its longest row; reference, critic and reward take time for
each token of prompts and completions that they work on; updates take their time. The same work in
two ways:
    whole   block_rows 0: reference, critic and reward begin when the last completion is finished
    blocks  block_rows as given: they begin with a block as soon as its rows are finished
on two split placements (the actor in one pool, the others in one or in three), and for two
distributions of lengths: skewed, most completions short and LONG of ROWS long, and even, all as
long as the longest, where there is nothing to win. Rounds of the ways are interleaved. Prints one
JSON line with medians over all counted steps; the ratio is of the whole step, and `until_scored` of
the part before the updates.
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

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.fake_recipes import PPO, fake_recipe
from support.fake_runs import make_run, read_lines
from support.timed_roles import Timing, skewed_lengths, timed_mesh

from rolemesh.coordinator.state.memory import MemoryStateStore

ROLES = ("actor", "critic", "reference", "reward")
PROMPTS, SAMPLES = 16, 4
ROWS = PROMPTS * SAMPLES
SHORT, LONG, NUM_LONG = 64, 512, 4
LENGTHS = {
    "skewed": skewed_lengths(ROWS, seed=1, short=SHORT, long=LONG, num_long=NUM_LONG),
    "even": [LONG] * ROWS,
}
PROMPT_TOKENS = 64
TOKEN_SECONDS = 0.003
SCORING_SECONDS = 0.6
"""That reference, critic and reward take each for a whole batch."""
SECONDS = {
    ("actor", "ComputeAdvantages"): 0.01,
    ("actor", "Update"): 0.45,
    ("critic", "Update"): 0.3,
}
SCORED_BY = (
    ("reference", "ComputeLogprobs"),
    ("critic", "ComputeValues"),
    ("reward", "ComputeReward"),
)
PLACEMENTS: dict[str, dict[str, Any]] = {
    "two_pools": {
        "policy": {"roles": ["actor"]},
        "judges": {"roles": ["reference", "critic", "reward"]},
    },
    "stand_alone": {role: {"roles": [role]} for role in ROLES},
}
NUM_WARMUP_STEPS = 1


async def make_steps(
    placement: str, lengths: str, block_rows: int, steps: int
) -> list[dict[str, float]]:
    """Seconds of each counted step, in all and until everything is scored."""
    num_tokens = sum(LENGTHS[lengths]) + ROWS * PROMPT_TOKENS
    timing = Timing(
        seconds=SECONDS,
        seconds_per_token=dict.fromkeys(SCORED_BY, SCORING_SECONDS / num_tokens),
        prompt_tokens=PROMPT_TOKENS,
        lengths=tuple(LENGTHS[lengths]),
        token_seconds=TOKEN_SECONDS,
    )
    recipe = fake_recipe(
        steps=steps + NUM_WARMUP_STEPS,
        prompts_per_step=PROMPTS,
        evaluation={"num_prompts": 0},
        algorithm={**PPO, "sampling": {"samples_per_prompt": SAMPLES}, "mini_batch_rows": ROWS},
        pools=PLACEMENTS[placement],
        sampler={"type": "sync", "block_rows": block_rows},
    )
    async with timed_mesh(ROLES, timing) as mesh:
        with tempfile.TemporaryDirectory() as folder:
            await make_run(mesh, Path(folder), recipe, MemoryStateStore()).execute()
            records = read_lines(Path(folder) / "metrics.jsonl")[NUM_WARMUP_STEPS:]
            graphs = read_lines(Path(folder) / "dataflow.jsonl")[NUM_WARMUP_STEPS:]
    counted = []
    for record, graph in zip(records, graphs, strict=True):
        first = min(node["started_at"] for node in graph["nodes"])
        (advantages,) = (n for n in graph["nodes"] if n["method"] == "compute_advantages")
        counted.append(
            {
                "step": record["time/step"],
                "until_scored": advantages["started_at"] - first,
            }
        )
    return counted


async def compare(
    placement: str, lengths: str, block_rows: int, steps: int, rounds: int
) -> dict[str, Any]:
    """Both ways of one placement, in turns."""
    ways = {"whole": 0, "blocks": block_rows}
    made: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, rows in ways.items():
            made[way] += await make_steps(placement, lengths, rows, steps)
    medians = {
        way: {name: statistics.median(step[name] for step in counted) for name in counted[0]}
        for way, counted in made.items()
    }
    ratio = {name: medians["whole"][name] / medians["blocks"][name] for name in medians["whole"]}
    return {**medians, "ratio": ratio, "repetitions": len(made["whole"])}


async def everything(block_rows: int, steps: int, rounds: int) -> dict[str, Any]:
    """All placements and distributions."""
    return {
        lengths: {
            placement: await compare(placement, lengths, block_rows, steps, rounds)
            for placement in PLACEMENTS
        }
        for lengths in LENGTHS
    }


def rounded(value: Any) -> Any:
    """Three digits are more than the machine's noise leaves."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    return round(value, 3) if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2, help="counted steps of each run")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each way, in turns")
    parser.add_argument("--block-rows", type=int, default=4)
    arguments = parser.parse_args()
    if arguments.steps < 1 or arguments.rounds < 1:
        parser.error("--steps and --rounds must be at least 1")
    if arguments.block_rows < 1 or arguments.block_rows % SAMPLES:
        parser.error(f"--block-rows must be a multiple of the {SAMPLES} samples a prompt")
    found = asyncio.run(everything(arguments.block_rows, arguments.steps, arguments.rounds))
    result = {
        "benchmark": "streaming",
        "config": {
            "steps": arguments.steps,
            "rounds": arguments.rounds,
            "block_rows": arguments.block_rows,
            "rows": ROWS,
            "skewed_lengths": {
                "mean": statistics.mean(LENGTHS["skewed"]),
                "median": statistics.median(LENGTHS["skewed"]),
                "max": max(LENGTHS["skewed"]),
            },
        },
        **rounded(found),
        "versions": {"python": platform.python_version(), "grpcio": grpc.__version__},
        "machine": {
            "cpus": os.cpu_count(),
            "arch": platform.machine(),
            "load": os.getloadavg()[0],
        },
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
