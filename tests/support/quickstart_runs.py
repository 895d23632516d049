"""The quickstart's run on its real model, cut to a few steps, for benchmarks."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import yaml
from support.mesh_runs import CliRun

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes/quickstart-ppo.yaml"
MODEL = ROOT / ".models/SmolLM2-135M-Instruct"
WAIT_S = 1800


def quickstart_records(steps: int, *, run: dict[str, Any], **started: Any) -> list[dict[str, Any]]:
    """What the steps say of themselves; one more is made before them as warm-up.

    Args:
        steps: Steps that count.
        run: Keys of the recipe's section `run`.
        started: Of CliRun.
    """
    recipe: dict[str, Any] = yaml.safe_load(RECIPE.read_text())
    recipe["run"] |= {
        "steps": steps + 1,
        "evaluation": {"num_prompts": 0},
        "checkpoint": {"every_steps": 0},
        **run,
    }
    for role in ("actor", "critic", "reference"):
        recipe[role]["model"]["path"] = str(MODEL)
    with tempfile.TemporaryDirectory() as folder:
        made = CliRun(recipe, Path(folder), **started)
        try:
            assert made.wait(WAIT_S) == 0, made.output
            return list(made.metrics()[1:])
        finally:
            made.close()
