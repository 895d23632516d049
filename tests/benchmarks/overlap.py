"""Measures how far a placement overlaps calls: a step's time against its graph's critical path.

    python tests/benchmarks/overlap.py [--steps 12] [--scale 1.0]

The real coordinator makes PPO steps over fake services on loopback whose calls take the times of
SECONDS, so nothing but dispatch and waiting is measured. Three placements of the same work:
    one_pool     all roles in one pool: the calls of a step follow each other
    split        actor and reference in one pool, critic and reward in another
    stand_alone  each role in a pool of its own
each with whole batches and with four blocks of rows (of a generation that hands them out as it goes
on; the calls on a block take a quarter). Steps of the ways are not interleaved, since a run is one
placement; the first step of each is not counted. Prints one JSON line: the median step time, the
time between first start and last end of its calls, the critical path of its measured graph, the
path that follows from SECONDS alone, ratios to both, and the median pause between a call and the
next one that waited for its pool.
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
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.fake_recipes import PPO, fake_recipe
from support.fake_runs import make_run, read_lines
from support.timed_roles import Timing, timed_mesh

from rolemesh.coordinator.state.memory import MemoryStateStore

ROLES = ("actor", "critic", "reference", "reward")
SECONDS = {
    ("actor", "Generate"): 0.20,
    ("critic", "ComputeValues"): 0.08,
    ("reference", "ComputeLogprobs"): 0.12,
    ("reward", "ComputeReward"): 0.06,
    ("actor", "ComputeAdvantages"): 0.05,
    ("critic", "Update"): 0.15,
    ("actor", "Update"): 0.20,
}
"""Of a whole batch."""
ON_BLOCKS = ("ComputeValues", "ComputeLogprobs", "ComputeReward")
PLACEMENTS: dict[str, dict[str, Any]] = {
    "one_pool": {"one": {"roles": ROLES}},
    "split": {
        "policy": {"roles": ["actor", "reference"]},
        "values": {"roles": ["critic", "reward"]},
    },
    "stand_alone": {role: {"roles": [role]} for role in ROLES},
}
PROMPTS, SAMPLES, NUM_BLOCKS = 8, 4, 4
NUM_WARMUP_STEPS = 1


def shortest(placement: str, blocks: int) -> float:
    """Seconds of a step that follow from SECONDS alone, if dispatch cost nothing.

    Worked out by hand: the blocks of a generation come at equal distances, and the calls on the
    last block begin when it comes.
    """
    generate, values, reference, reward, advantages, critic, actor = SECONDS.values()
    if placement == "one_pool":
        return sum(SECONDS.values())
    if placement == "split":
        # The actor keeps its pool until the generation ends, so the reference starts then; critic
        # and reward keep up with the blocks.
        judged = (values + reward) / blocks
        scored = generate + max(reference, judged if blocks > 1 else values + reward)
    else:
        scored = generate + max(values, reference, reward) / blocks
    return scored + advantages + max(critic, actor)


def turn_gaps(nodes: list[dict[str, Any]]) -> list[float]:
    """Seconds between the end of a call and the start of the next one that waited for its pool."""
    gaps = []
    for pool in {node["pool"] for node in nodes}:
        turns = sorted((n for n in nodes if n["pool"] == pool), key=lambda n: n["started_at"])
        for first, second in pairwise(turns):
            if second["ready_at"] <= first["ended_at"]:
                gaps.append(second["started_at"] - first["ended_at"])
    return gaps


async def measure(placement: str, blocks: int, steps: int, scale: float) -> dict[str, Any]:
    """Figures of one placement."""
    rows = PROMPTS * SAMPLES
    whole = {
        call: scale * seconds / (blocks if call[1] in ON_BLOCKS else 1)
        for call, seconds in SECONDS.items()
        if call[1] != "Generate"
    }
    # Block k of n is finished after k + 1 steps of decoding.
    lengths = tuple(1 + row * blocks // rows for row in range(rows))
    timing = Timing(
        seconds=whole,
        lengths=lengths,
        token_seconds=scale * SECONDS["actor", "Generate"] / blocks,
    )
    recipe = fake_recipe(
        steps=steps,
        prompts_per_step=PROMPTS,
        evaluation={"num_prompts": 0},
        algorithm={**PPO, "sampling": {"samples_per_prompt": SAMPLES}, "mini_batch_rows": rows},
        pools=PLACEMENTS[placement],
        sampler={"type": "sync", "block_rows": rows // blocks if blocks > 1 else 0},
    )
    async with timed_mesh(ROLES, timing) as mesh:
        with tempfile.TemporaryDirectory() as folder:
            await make_run(mesh, Path(folder), recipe, MemoryStateStore()).execute()
            records = read_lines(Path(folder) / "metrics.jsonl")[NUM_WARMUP_STEPS:]
            graphs = read_lines(Path(folder) / "dataflow.jsonl")[NUM_WARMUP_STEPS:]
    seconds = [record["time/step"] for record in records]
    paths = [record["dataflow/critical_path_seconds"] for record in records]
    spans = [
        max(node["ended_at"] for node in graph["nodes"])
        - min(node["started_at"] for node in graph["nodes"])
        for graph in graphs
    ]
    gaps = [gap for graph in graphs for gap in turn_gaps(graph["nodes"])]
    ideal = scale * shortest(placement, blocks)
    return {
        "step_seconds": statistics.median(seconds),
        "step_seconds_max": max(seconds),
        "span_seconds": statistics.median(spans),
        "critical_path_seconds": statistics.median(paths),
        "ideal_seconds": ideal,
        "step_over_critical_path": statistics.median(
            step / path for step, path in zip(seconds, paths, strict=True)
        ),
        "step_over_ideal": statistics.median(seconds) / ideal,
        "calls": len(graphs[0]["nodes"]),
        "turn_gap_ms": 1e3 * statistics.median(gaps) if gaps else None,
    }


async def everything(steps: int, scale: float) -> dict[str, Any]:
    """All ways, one after the other."""
    found: dict[str, Any] = {}
    for name, blocks in (("whole", 1), ("blocks", NUM_BLOCKS)):
        found[name] = {
            placement: await measure(placement, blocks, steps, scale) for placement in PLACEMENTS
        }
        alone = found[name]["one_pool"]["step_seconds"]
        for figures in found[name].values():
            figures["speedup_over_one_pool"] = alone / figures["step_seconds"]
    return found


def rounded(value: Any) -> Any:
    """Three digits are more than the machine's noise leaves."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    return round(value, 3) if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12, help="steps of each run")
    parser.add_argument("--scale", type=float, default=1.0, help="makes all delays longer")
    arguments = parser.parse_args()
    if arguments.steps <= NUM_WARMUP_STEPS:
        parser.error(f"--steps is {arguments.steps}: give more than {NUM_WARMUP_STEPS}")
    result = {
        "benchmark": "overlap",
        "config": {"steps": arguments.steps, "scale": arguments.scale},
        **rounded(asyncio.run(everything(arguments.steps, arguments.scale))),
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
