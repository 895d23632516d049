"""One thread of a CPU against all of them, for passes of small models: where the second one pays.

    PYTHONPATH=tests python tests/benchmarks/small_passes.py [--widths 64,128,256] [--threads 2]

Threads wait passively, as in a service. Each model has five layers; a pass is the trainer's forward
and backward pass over rows without a shared prompt, or one token of the hf sampler for each row.
Both sides take turns in one process. Prints one JSON line: for each pass the multiply-adds of its
largest matrix product (`engine/hardware/cpu_threads.py`), milliseconds of both sides, and their
ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# OpenMP reads it once, when torch loads it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from support.tiny_models import write_tiny_llama
from support.token_batches import token_batch
from support.updates import forward_backward
from transformers import AutoModelForCausalLM

from rolemesh.engine.hardware import cpu_threads
from rolemesh.engine.hardware.cpu_threads import largest_product
from rolemesh.engine.specs import ModelSpec, OptimizerSpec, SftLossSpec
from rolemesh.engine.train.trainer import Trainer

NUM_LAYERS = 5
UPDATES = ((1, 16, 16), (4, 32, 32), (16, 32, 32), (48, 45, 12), (64, 48, 48))
"""Rows, prompt and completion tokens."""
DECODED_ROWS = (1, 4, 16, 48, 256)
CONTEXT = 40
"""Tokens before the one that is decoded."""


def in_turns(work: Callable[[], Any], threads: int, repetitions: int) -> tuple[float, float]:
    """Median milliseconds with one thread and with all; the first round is not counted."""
    seconds: dict[int, list[float]] = {1: [], threads: []}
    for round_number in range(repetitions + 1):
        for number, found in seconds.items():
            torch.set_num_threads(number)
            began = time.perf_counter()
            work()
            if round_number:
                found.append(time.perf_counter() - began)
    torch.set_num_threads(threads)
    one, several = (1e3 * statistics.median(found) for found in seconds.values())
    return one, several


def passes(folder: Path) -> list[tuple[str, int, int, Callable[[], Any]]]:
    """Kind, rows, largest product, and what makes the pass."""
    trainer = Trainer.policy(
        ModelSpec(path=folder, compute_dtype="float32", micro_batch_tokens=8192), OptimizerSpec()
    )
    found: list[tuple[str, int, int, Callable[[], Any]]] = []
    for rows, prompt, completion in UPDATES:
        batch = token_batch(prompt_lengths=[prompt] * rows, completion_lengths=[completion] * rows)

        def update(batch: Any = batch) -> None:
            forward_backward(trainer, batch, SftLossSpec())
            trainer.drop_gradients()

        longest = prompt + completion
        product = largest_product(
            trainer.model.config, rows * longest, longest, num_predicted=rows * completion
        )
        found.append(("update", rows, product, update))
    model = AutoModelForCausalLM.from_pretrained(folder).eval().requires_grad_(False)
    for rows in DECODED_ROWS:
        token = torch.randint(3, 500, (rows, 1))
        cache = model(token.expand(-1, CONTEXT), use_cache=True).past_key_values

        def decode(token: Any = token, cache: Any = cache) -> None:
            model(token, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache.crop(-1)

        product = largest_product(model.config, rows, CONTEXT + 1, num_predicted=rows)
        found.append(("token", rows, product, decode))
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--widths", default="64,128,256,384,576")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repetitions", type=int, default=7)
    options = parser.parse_args()
    # The rule under test must not decide.
    cpu_threads.LEAST_SHARED_PRODUCT = 0
    measured: list[dict[str, Any]] = []
    for width in map(int, options.widths.split(",")):
        with tempfile.TemporaryDirectory() as name:
            folder = write_tiny_llama(
                Path(name) / "model", num_layers=NUM_LAYERS, hidden_size=width
            )
            for kind, rows, product, work in passes(folder):
                one, several = in_turns(work, options.threads, options.repetitions)
                measured.append(
                    {
                        "pass": kind,
                        "width": width,
                        "rows": rows,
                        "largest_product_millions": round(product / 1e6, 2),
                        "one_thread_ms": round(one, 2),
                        "all_threads_ms": round(several, 2),
                        "all_over_one": round(several / one, 2),
                    }
                )
    measured.sort(key=lambda each: each["largest_product_millions"])
    print(
        json.dumps(
            {
                "benchmark": "small_passes",
                "config": vars(options),
                "passes": measured,
                "versions": {"python": platform.python_version(), "torch": torch.__version__},
                "machine": {"cpus": os.cpu_count(), "arch": platform.machine()},
            }
        )
    )


if __name__ == "__main__":
    main()
