"""Folders of runs that were never made, for what reads the steps of a run."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import yaml
from support.mapping_jobs import LLAMAS
from support.mesh_runs import tiny_recipe

from rolemesh.coordinator.api.reads.plans import WARMUP_STEPS
from rolemesh.coordinator.dataflow.futures import NodeState
from rolemesh.coordinator.recipe.loading import load_recipe
from rolemesh.coordinator.run.checks.planning import plan_step

CALLS = (0.4, 0.05, 0.06, 0.01, 0.02, 0.1, 0.2)
"""Seconds of generate, values, reference, reward, advantages, and of both updates."""
STEPS = WARMUP_STEPS + 3


def run_folder(folder: Path, *, steps: int = STEPS, **changes: Any) -> Path:
    """A run of which step s took s times as long, but for the first ones: 100 times."""
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(LLAMAS["tiny"]))
    directory = folder / "run"
    directory.mkdir(exist_ok=True)
    (directory / "config.yaml").write_text(yaml.safe_dump(tiny_recipe(model, **changes)))
    recipe = load_recipe([directory / "config.yaml"])
    nodes = list(asyncio.run(plan_step(recipe)))
    graphs, records = [], []
    for step in range(1, steps + 1):
        now, slowness = 1000.0 * step, 100 if step <= WARMUP_STEPS else step
        for node, seconds in zip(nodes, CALLS, strict=False):
            node.step, node.state, node.num_rows = step, NodeState.DONE, 8
            node.queued_at = 1000.0 * step
            node.started_at, node.ended_at = now, now + slowness * seconds
            # 8 rows of 30 tokens of prompt and 5 of completion.
            node.num_tokens = 8 * 35
            now = node.ended_at
        graphs.append({"step": step, "nodes": [node.to_dict() for node in nodes]})
        records.append(
            {
                "step": step,
                "time/step": slowness * (sum(CALLS) + 0.03),
                "completion_length/mean": 5.0,
            }
        )
    for name, lines in (("dataflow.jsonl", graphs), ("metrics.jsonl", records)):
        (directory / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory
