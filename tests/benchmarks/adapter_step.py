"""Measures what an adapter spares: a PPO step of the quickstart with one, and with all weights.

    PYTHONPATH=tests python tests/benchmarks/adapter_step.py [--steps 4] [--pairs 2]

Both sides run the command line as a user does, in turns, without evaluation: the quickstart's
recipe as it is, and recipes/quickstart-lora.yaml. The first step of each run is a warm-up and is
not counted. Prints one JSON line: medians of both sides' update and step, their ratios, and the
bytes of the actor's newest checkpoint. Of the recipe with the adapter the time of the step also
tells that the actor scores as the reference, with no model more in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rolemesh.engine.hardware.devices import device_of

NUM_WARMUP_STEPS = 1
RECIPES = {
    "full": Path("recipes/quickstart-ppo.yaml"),
    "adapter": Path("recipes/quickstart-lora.yaml"),
}
PHASES = ("update_actor", "step", "generate", "reference")


def run(recipe: Path, steps: int, out: Path, settings: list[str]) -> list[dict[str, Any]]:
    """The records of the counted steps of a run."""
    subprocess.run(
        [
            *(sys.executable, "-m", "rolemesh.coordinator.commands.cli", "train", str(recipe)),
            *("--set", f"run.steps={steps}", "--set", "run.evaluation.num_prompts=0"),
            *(word for one in settings for word in ("--set", one)),
            *("--out", str(out), "--json"),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines][NUM_WARMUP_STEPS:]


def checkpoint_bytes(out: Path) -> int:
    """Of the actor's part of the newest checkpoint."""
    newest = max((out / "checkpoints").iterdir())
    return sum(file.stat().st_size for file in (newest / "actor").iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], help="of both recipes")
    arguments = parser.parse_args()
    records: dict[str, list[dict[str, Any]]] = {name: [] for name in RECIPES}
    sizes: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        for pair in range(arguments.pairs):
            for name, recipe in RECIPES.items():
                out = Path(folder) / f"{name}-{pair}"
                records[name] += run(recipe, arguments.steps, out, arguments.set)
                sizes[name] = checkpoint_bytes(out)
    seconds = {
        name: {phase: statistics.median(one[f"time/{phase}"] for one in found) for phase in PHASES}
        for name, found in records.items()
    }
    full, adapter = seconds["full"], seconds["adapter"]
    result = {
        "benchmark": "adapter_step",
        "config": {"steps": arguments.steps, "pairs": arguments.pairs, "set": arguments.set},
        "seconds": {
            name: {phase: round(value, 3) for phase, value in found.items()}
            for name, found in seconds.items()
        },
        "ratio": {phase: round(adapter[phase] / full[phase], 3) for phase in PHASES},
        "checkpoint_bytes": sizes,
        "checkpoint_ratio": round(sizes["adapter"] / sizes["full"], 4),
        "multiplies_bfloat16": device_of("cpu").multiplies_bfloat16,
        "load_average": os.getloadavg(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
