"""Predicted steps of real CPU meshes beside measured ones; one JSON line, and a table.

    PYTHONPATH=tests python tests/benchmarks/predicted_steps.py [--steps 12] [--rounds 2]
        [--runs DIR] [--calibration FILE] [--table]

Each case is a recipe with a placement on tiny random models, trained by the real command line over
real services, one thread a rank. Half of the cases is fitted, together with the primitives that
`rolemesh calibrate` measures here; the others are kept out, and predicted.

The machine may be shared. So seconds are those of a clock that stands still while a process of the
run waits for a core (Linux's schedstat), and the measured step is the median over all steps but the
first ones; the median by the plain clock stands beside it. What others do to caches, and to cores
that share their units, is in both.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from support.mesh_runs import CliRun, tiny_recipe
from support.tiny_models import write_tiny_llama
from support.undisturbed import Undisturbed, Waits

from rolemesh.coordinator.api.reads.plans import WARMUP_STEPS
from rolemesh.coordinator.mapping.calibration.calibration import (
    Calibration,
    Machine,
    calibrated,
    read_calibration,
)
from rolemesh.coordinator.mapping.calibration.primitives import Primitive
from rolemesh.coordinator.mapping.calibration.recorded import RecordedRun
from rolemesh.coordinator.mapping.machines.devices import device_of
from rolemesh.coordinator.run.folders.recorded_steps import recorded_run

WAIT_S = 600


@dataclass(frozen=True, kw_only=True)
class Case:
    """A recipe on a placement."""

    name: str
    algorithm: str
    width: int
    layers: int
    prompts: int
    samples: int
    tokens: int
    """Of a completion at most, which a random model nearly always reaches."""
    mini_batch: int
    pools: tuple[tuple[str, ...], ...]
    """Roles by pool; those of one pool take turns."""
    layouts: dict[str, dict[str, int]] = field(default_factory=dict)
    """By role; one rank where there is none."""


ONE = (("actor", "critic", "reference", "reward"),)
SPLIT = (("actor", "reference"), ("critic", "reward"))
APART = (("actor",), ("critic",), ("reference",), ("reward",))
THREE = (("actor", "reference", "reward"),)
TWO = (("actor", "reward"),)
SAMPLER = (("actor", "reference", "reward"), ("rollout",))


def _case(
    name: str, size: tuple[int, int], rows: tuple[int, int, int, int], *pools: Any, **layouts: Any
) -> Case:
    width, layers = size
    prompts, samples, tokens, mini_batch = rows
    return Case(
        name=name,
        algorithm=name.split()[0],
        width=width,
        layers=layers,
        prompts=prompts,
        samples=samples,
        tokens=tokens,
        mini_batch=mini_batch,
        pools=pools,
        layouts=layouts,
    )


DP, FSDP, TP = {"dp": 2, "fsdp": 1}, {"dp": 2, "fsdp": 2}, {"tp": 2}
SMALL, MIDDLE, WIDE = (64, 2), (128, 4), (256, 4)

FITTED = (
    _case("ppo one", SMALL, (8, 1, 16, 8), *ONE),
    _case("ppo split", MIDDLE, (8, 2, 16, 16), *SPLIT),
    _case("grpo one", SMALL, (4, 4, 32, 16), *THREE),
    _case("grpo wide", WIDE, (8, 2, 32, 8), *THREE),
    _case("rloo split", SMALL, (8, 4, 48, 32), ("actor",), ("reference", "reward")),
    _case("remax one", MIDDLE, (8, 1, 16, 8), *TWO),
    _case("ppo dp", SMALL, (8, 2, 32, 16), *SPLIT, actor=DP),
    _case("grpo tp", MIDDLE, (4, 4, 16, 16), *THREE, actor=TP),
    _case("grpo sampler", SMALL, (8, 2, 32, 16), *SAMPLER),
)
HELD_OUT = (
    _case("ppo two", SMALL, (8, 2, 32, 8), *SPLIT),
    _case("ppo middle", MIDDLE, (16, 1, 32, 8), *ONE),
    _case("grpo wide few", WIDE, (4, 4, 16, 16), *THREE),
    _case("rloo one", MIDDLE, (8, 4, 16, 32), *THREE),
    _case("remax small", SMALL, (8, 1, 32, 8), *TWO),
    _case("ppo apart", WIDE, (8, 1, 16, 8), *APART),
    _case("grpo dp", MIDDLE, (8, 2, 16, 16), *THREE, actor=DP),
    _case("ppo tp", SMALL, (8, 1, 16, 8), *SPLIT, actor=TP),
    _case("rloo sampler", MIDDLE, (4, 4, 16, 16), *SAMPLER),
)


def recipe_of(case: Case, models: Path, steps: int) -> dict[str, Any]:
    """The recipe of a case."""
    model = models / f"{case.width}x{case.layers}"
    if not model.exists():
        write_tiny_llama(
            model,
            hidden_size=case.width,
            num_layers=case.layers,
            num_heads=case.width // 16,
            num_kv_heads=case.width // 32,
        )
    recipe = tiny_recipe(
        model,
        run__steps=steps,
        run__prompts_per_step=case.prompts,
        run__evaluation={"num_prompts": 0},
        run__checkpoint={"every_steps": 0},
        algorithm={
            "type": case.algorithm,
            "sampling": {"samples_per_prompt": case.samples, "max_new_tokens": case.tokens},
            "mini_batch_rows": case.mini_batch,
        },
        actor__data__train_size=256,
        pools={f"pool{number}": {"roles": list(roles)} for number, roles in enumerate(case.pools)},
    )
    roles = [role for pool in case.pools for role in pool]
    if "rollout" in roles:
        actor = recipe["actor"]
        recipe["rollout"] = {
            "model": {"path": str(model)}, "rollout": actor.pop("rollout"), "data": actor["data"]
        }  # fmt: skip
        recipe["schedule"] = {"sampler": {"type": "sync"}}
    for role in ("critic", "reference"):
        if role not in roles:
            del recipe[role]
    recipe["services"] = {role: {"threads": 1} for role in roles}
    for role, layout in case.layouts.items():
        recipe[role]["train"] = layout
    return recipe


def make_runs(folder: Path, steps: int, rounds: int) -> None:
    """Trains all cases, those that are there already left out."""
    for number in range(rounds):
        for case in (*FITTED, *HELD_OUT):
            place = folder / f"round{number}" / case.name.replace(" ", "-")
            if (place / "run" / "summary.json").exists():
                continue
            place.mkdir(parents=True)
            with Waits() as waits:
                run = CliRun(recipe_of(case, folder / "models", steps), place)
                try:
                    code = run.wait(WAIT_S)
                    assert code == 0, run.output
                finally:
                    run.close()
            (place / "waits.json").write_text(json.dumps(waits.samples))


def read_runs(folder: Path, cases: Sequence[Case]) -> list[RecordedRun]:
    """What the runs of all rounds took: of each number the median over the rounds."""
    found = []
    for case in cases:
        rounds = []
        for place in sorted(folder.glob(f"round*/{case.name.replace(' ', '-')}")):
            samples = json.loads((place / "waits.json").read_text())
            rounds.append(recorded_run(place / "run", Undisturbed(samples)))
        found.append(
            replace(
                rounds[0],
                seconds=tuple(
                    statistics.median(one) for one in zip(*(r.seconds for r in rounds), strict=True)
                ),
                step_s=statistics.median(one.step_s for one in rounds),
                beside_s=statistics.median(one.beside_s for one in rounds),
            )
        )
    return found


def plain_step(folder: Path, case: Case) -> float:
    """Median seconds of a step by the plain clock."""
    places = folder.glob(f"round*/{case.name.replace(' ', '-')}")
    return statistics.median(recorded_run(place / "run").step_s for place in places)


def table_of(
    folder: Path, cases: Sequence[Case], runs: Sequence[RecordedRun], found: Calibration
) -> list[dict[str, Any]]:
    """A row for each case."""
    rows = []
    for case, run in zip(cases, runs, strict=True):
        predicted = run.predicted(found.described_device, found.coefficients)
        errors = {
            task.name: (mine - seconds) / run.step_s
            for task, mine, seconds in zip(
                run.job.step.tasks, predicted.seconds, run.seconds, strict=True
            )
        }
        worst = max(errors, key=lambda name: abs(errors[name]))
        rows.append(
            {
                "case": case.name,
                "model": f"{case.width} x {case.layers}",
                "rows": f"{case.prompts} x {case.samples}, {case.tokens} tokens",
                "pools": " / ".join("+".join(pool) for pool in case.pools),
                "layouts": case.layouts,
                "kept_out": case in HELD_OUT,
                "measured_s": run.step_s,
                "plain_clock_s": plain_step(folder, case),
                "predicted_s": predicted.period,
                "error": predicted.period / run.step_s - 1,
                "most_off": worst,
                "most_off_share_of_step": errors[worst],
            }
        )
    return rows


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """A row for each recipe, in Markdown."""
    print("| case | model | rows | pools | measured | predicted | error | most off, of the step |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        ranks = "".join(
            f", {role} {'-'.join(f'{k} {v}' for k, v in cut.items())}"
            for role, cut in row["layouts"].items()
        )
        print(
            f"| {row['case']}{' (kept out)' if row['kept_out'] else ''} | {row['model']} "
            f"| {row['rows']} | {row['pools']}{ranks} | {row['measured_s']:.3f} "
            f"| {row['predicted_s']:.3f} | {100 * row['error']:+.0f} % "
            f"| {row['most_off']} {100 * row['most_off_share_of_step']:+.0f} % |"
        )


def primitives_here() -> list[Primitive]:
    """What `rolemesh calibrate` measures on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "calibration.json"
        command = [sys.executable, "-m", "rolemesh", "calibrate", "--out", str(file)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return list(read_calibration(file).primitives)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--runs", type=Path, help="keeps runs there, and takes those that it has")
    parser.add_argument("--calibration", type=Path, help="takes its primitives; measured if absent")
    parser.add_argument("--table", action="store_true", help="prints a table beside the JSON line")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.runs or Path(temporary)
        make_runs(folder, arguments.steps, arguments.rounds)
        if arguments.calibration is None:
            primitives = primitives_here()
        else:
            primitives = list(read_calibration(arguments.calibration).primitives)
        runs, kept_out = read_runs(folder, FITTED), read_runs(folder, HELD_OUT)
        versions = {n: importlib.metadata.version(n) for n in ("torch", "transformers", "grpcio")}
        machine = Machine(
            name=platform.machine(),
            threads=1,
            versions={"python": platform.python_version(), **versions},
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        )
        found = calibrated(device_of("cpu"), primitives, runs, kept_out, machine)
        rows = table_of(folder, FITTED, runs, found) + table_of(folder, HELD_OUT, kept_out, found)
    if arguments.table:
        print_table(rows)
    kept = [abs(row["error"]) for row in rows if row["kept_out"]]
    result = {
        "benchmark": "predicted_steps",
        "config": {"steps": arguments.steps, "rounds": arguments.rounds, "warmup": WARMUP_STEPS},
        "cases": rows,
        "kept_out_within_20_percent": f"{sum(error <= 0.2 for error in kept)} of {len(kept)}",
        "coefficients": found.coefficients.to_dict(),
        "basis": found.basis(),
        "versions": dict(machine.versions),
        "machine": {
            "cpus": os.cpu_count(),
            "arch": platform.machine(),
            "load": round(os.getloadavg()[0], 1),
        },
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
