"""Measures which corrections keep the score while weights of several updates ago sample.

    PYTHONPATH=tests python tests/benchmarks/off_policy_forms.py [--seeds 1 2 3] [--staleness 4]

recipes/async-grpo.yaml with each form of algorithm.off_policy and without any, seed by seed, and
the same recipe with sampler type sync as the bound. Prints one JSON line: for each form held-out
scores, the mean gap between sampler and trainer (k3, nats a token), the effective share of samples
and the share of tokens that are masked or capped, over the last half of the steps.
"""

from __future__ import annotations

import argparse
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

RECIPE = "recipes/async-grpo.yaml"
FORMS = {
    "fresh weights": "{type: token_truncation, cap: 5.0}",
    "none": "null",
    "token_truncation": "{type: token_truncation}",
    "sequence_truncation": "{type: sequence_truncation}",
    "masking of tokens": "{type: masking}",
    "masking of rows": "{type: masking, level: sequence, low: 0.0, high: 3.0}",
    "geometric_rejection": "{type: geometric_rejection, low: 0.8, high: 1.25}",
    "token_truncation, normalized": "{type: token_truncation, normalize: batch}",
}
GAPS = ("sampler_kl_k3", "effective_sample_fraction")
STRUCK = ("importance_capped_fraction", "importance_masked_fraction")


def run(form: str, seed: int, staleness: int, steps: int, out: Path) -> dict[str, float]:
    """Trains as a user does, and tells of the run."""
    settings = [
        *(f"run.seed={seed}", f"run.steps={steps}", f"algorithm.off_policy={FORMS[form]}"),
        "schedule.sampler={type: sync}"
        if form == "fresh weights"
        else f"schedule.sampler.max_staleness={staleness}",
        "run.checkpoint.every_steps=1000",
    ]
    subprocess.run(
        [
            *(sys.executable, "-m", "rolemesh.coordinator.commands.cli", "train", RECIPE),
            *(word for one in settings for word in ("--set", one)),
            *("--out", str(out), "--json"),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    lines = (out / "metrics.jsonl").read_text().splitlines()
    records: list[dict[str, Any]] = [json.loads(line) for line in lines][steps // 2 :]
    found = {
        "score": json.loads((out / "summary.json").read_text())["held_out"]["after"]["score"],
        **{name: statistics.fmean(one[name] for one in records) for name in GAPS},
        "struck": statistics.fmean(sum(one.get(name, 0.0) for name in STRUCK) for one in records),
    }
    return {name: round(float(number), 4) for name, number in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--staleness", type=int, default=4)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--forms", nargs="+", choices=[*FORMS], default=[*FORMS])
    given = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = {form: [] for form in given.forms}
    with tempfile.TemporaryDirectory() as folder:
        for seed in given.seeds:
            for form in given.forms:
                out = Path(folder) / f"{given.forms.index(form)}-{seed}"
                runs[form].append(run(form, seed, given.staleness, given.steps, out))
                # It takes an hour: what there is so far is told.
                told = {"form": form, "seed": seed, **runs[form][-1]}
                print(json.dumps(told), file=sys.stderr, flush=True)
                shutil.rmtree(out)
    print(
        json.dumps(
            {
                "benchmark": "off_policy_forms",
                "config": {
                    "seeds": given.seeds,
                    "max_staleness": given.staleness,
                    "steps": given.steps,
                },
                "mean_score": {
                    form: round(statistics.fmean(one["score"] for one in found), 3)
                    for form, found in runs.items()
                },
                "runs": runs,
                "multiplies_bfloat16": device_of("cpu").multiplies_bfloat16,
                "load_average": os.getloadavg(),
            }
        )
    )


if __name__ == "__main__":
    main()
