"""Measures how soon a policy learns the quickstart's sums from a teacher, from PPO and from GRPO.

    PYTHONPATH=tests python tests/benchmarks/distillation_curve.py [--seeds 1 2 3] [--picture FILE]

Makes the teacher first, with the quickstart (or takes that run, of --teacher RUN). Then recipes run
one after another, seed by seed, with the held-out prompts answered every two steps. Prints one JSON
line: for each recipe and seed the held-out score after so many seconds of steps (evaluations are
not counted), and the seconds to the teacher's own score less two standard errors. --picture draws
the curves; docs/images/distillation.png is made so.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rolemesh.engine.hardware.devices import device_of

RECIPES = {
    "on-policy distillation": "recipes/distillation.yaml",
    "PPO": "recipes/quickstart-ppo.yaml",
    "GRPO": "recipes/quickstart-grpo.yaml",
}
STEPS = {"on-policy distillation": 8, "PPO": 16, "GRPO": 16}
EVERY_STEPS = 2

Curve = list[tuple[float, float]]
"""Seconds of steps, and held-out score then."""


def run(recipe: str, seed: int, out: Path, *settings: str) -> dict[str, Any]:
    """Trains as a user does, and gives the run's summary."""
    subprocess.run(
        [
            *(sys.executable, "-m", "rolemesh.coordinator.commands.cli", "train", recipe),
            *("--set", f"run.seed={seed}"),
            *(word for one in settings for word in ("--set", one)),
            *("--out", str(out), "--json"),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


def curve_of(out: Path, summary: dict[str, Any]) -> Curve:
    """Of a run that was evaluated as it went."""
    points, seconds = [(0.0, float(summary["held_out"]["before"]["score"]))], 0.0
    for line in (out / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        seconds += record["time/step"]
        if "held_out/score" in record:
            points.append((round(seconds, 1), record["held_out/score"]))
    return points


def seconds_to(level: float, curve: Curve) -> float | None:
    """When the curve first passes a level, by a line between its points; None: never."""
    for (before, low), (after, high) in itertools.pairwise(curve):
        if high >= level:
            share = 0.0 if high == low else (level - low) / (high - low)
            return round(before + max(share, 0.0) * (after - before), 1)
    return None


def draw(curves: dict[str, list[Curve]], level: float, path: Path) -> None:
    """Scores by seconds: a thin line a seed, and the teacher's score."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.6))
    for color, (name, seeds) in zip(("#00796b", "#3949ab", "#c77700"), curves.items(), strict=True):
        for number, curve in enumerate(seeds):
            axes.plot(*zip(*curve, strict=True), color=color, label=None if number else name)
    axes.axhline(level, color="#777777", linestyle="--", linewidth=1, label="the teacher")
    axes.set_xlabel("seconds of steps, on two CPU cores")
    axes.set_ylabel("held-out score")
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--teacher", type=Path, help="folder of a run of the quickstart")
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        folder, teacher = Path(directory), arguments.teacher
        if teacher is None:
            teacher = folder / "teacher"
            run(RECIPES["PPO"], 1, teacher)
        told = json.loads((teacher / "summary.json").read_text())["held_out"]["after"]
        level = told["score"] - 2 * told["standard_error"]
        curves: dict[str, list[Curve]] = {name: [] for name in RECIPES}
        for seed in arguments.seeds:
            for name, recipe in RECIPES.items():
                out = folder / f"{name}-{seed}"
                settings = [
                    f"run.steps={STEPS[name]}",
                    f"run.evaluation.every_steps={EVERY_STEPS}",
                    "run.checkpoint.every_steps=1000",
                ]
                if name == "on-policy distillation":
                    settings.append(f"teacher.model.path={teacher / 'model'}")
                curves[name].append(curve_of(out, run(recipe, seed, out, *settings)))
                shutil.rmtree(out)
    reached = {name: [seconds_to(level, one) for one in seeds] for name, seeds in curves.items()}
    if arguments.picture is not None:
        draw(curves, told["score"], arguments.picture)
    print(
        json.dumps(
            {
                "benchmark": "distillation_curve",
                "multiplies_bfloat16": device_of("cpu").multiplies_bfloat16,
                "load_average": os.getloadavg(),
                "seeds": arguments.seeds,
                "teacher_score": told["score"],
                "level": level,
                "last_score": {
                    name: round(statistics.fmean(one[-1][1] for one in seeds), 3)
                    for name, seeds in curves.items()
                },
                "seconds_to_level": reached,
                "curves": curves,
            }
        )
    )


if __name__ == "__main__":
    main()
