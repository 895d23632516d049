"""Measures what it saves to compute what rows share once: here the prompt of a group.

    python tests/benchmarks/tree_sharing.py [--model .models/SmolLM2-135M-Instruct] [--rows 8]
        [--groups 1,2,4,8] [--prompts 32,128,512] [--completion 64] [--repetitions 2] [--threads 2]
        [--layers 30] [--constants]

For each number of completions of a prompt and each length of prompts, the same rows with and
without sharing, in turns, by one policy: `update` is forward and backward of a PPO loss over the
rows (without the optimizer's own step, which does not depend on rows), `logprobs` a log-prob pass.
Completions are between half of and all of --completion tokens. Sharing is as the model decides it
("auto"): `shares` is how many of the rows stood in passes that shared. Prints one JSON line;
seconds are medians, ratios are without sharing over with. CPU time of all threads is given beside
the time by the clock, because other programs may have had the processors.

With --constants it measures instead what decides whether a pass shares, on the device that torch
takes (a GPU if there is one), for `DEVICE_COSTS` of `engine/packing/pass_cost.py`:
`attention_slowness`, by the masked attention that sharing needs, and `margin`, by rows that have
all but nothing to share. ROLEMESH_KERNELS=triton on a GPU gives those of FlexAttention.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.token_batches import token_batch, with_shared_prompts
from support.updates import forward_backward

from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.hardware.devices import current_device
from rolemesh.engine.models.folder import read_config
from rolemesh.engine.specs import ModelSpec, OptimizerSpec, PpoPolicyLossSpec
from rolemesh.engine.train.trainer import Trainer

LOSS = PpoPolicyLossSpec()


def rows_of(num_rows: int, group: int, prompt: int, completion: int, vocab: int) -> Experience:
    """Rows with what the policy loss reads; `group` neighbours have the same prompt."""
    generator = torch.Generator().manual_seed(prompt)
    lengths = torch.randint(completion // 2, completion + 1, (num_rows,), generator=generator)
    batch = with_shared_prompts(
        token_batch(
            prompt_lengths=[prompt] * num_rows,
            completion_lengths=lengths.tolist(),
            vocab_size=vocab,
        ),
        group,
    )
    column = batch["advantages"]
    logprobs = Column(ColumnKind.COMPLETION, torch.full_like(column.values, -6.0), column.offsets)
    return batch | Experience({"logprobs": logprobs})


def measure(trainer: Trainer, batch: Experience, repetitions: int) -> dict[str, Any]:
    """Seconds of each pass, with and without sharing in turns."""
    packing = trainer.model.packing
    assert packing is not None
    passes: dict[str, Callable[[], Any]] = {
        "update": lambda: forward_backward(trainer, batch, LOSS),
        "logprobs": lambda: trainer.compute_logprobs(batch, temperature=1.0),
    }
    clock: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    for _ in range(repetitions):
        for way, cost in (("shared", packing), ("apart", replace(packing, shares=False))):
            trainer.model.packing = cost
            for name, run in passes.items():
                synchronize()
                began, computed = time.perf_counter(), time.process_time()
                run()
                synchronize()
                key = f"{name}_{way}"
                clock.setdefault(key, []).append(time.perf_counter() - began)
                cpu.setdefault(key, []).append(time.process_time() - computed)
                trainer.drop_gradients()
    trainer.model.packing = packing
    planned = trainer.rank_model.micro_batches(batch)
    shared = [one for one in planned if one.shares]
    medians = {key: statistics.median(seconds) for key, seconds in clock.items()}
    cpu_medians = {key: statistics.median(seconds) for key, seconds in cpu.items()}
    return {
        "shares": sum(len(one.rows) for one in shared),
        "tokens": len(batch["tokens"].values),
        "tokens_shared": sum(one.num_tokens for one in planned),
        "median_s": {key: round(seconds, 3) for key, seconds in medians.items()},
        "spread_s": {key: [round(min(x), 3), round(max(x), 3)] for key, x in clock.items()},
        "median_cpu_s": {key: round(seconds, 3) for key, seconds in cpu_medians.items()},
        **{
            f"ratio_{name}": round(medians[f"{name}_apart"] / medians[f"{name}_shared"], 2)
            for name in passes
        },
        **{
            f"ratio_cpu_{name}": round(
                cpu_medians[f"{name}_apart"] / cpu_medians[f"{name}_shared"], 2
            )
            for name in passes
        },
    }


def synchronize() -> None:
    """Waits for the GPU, if there is one: its work goes on behind the caller."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds_of(run: Callable[[], Any], repetitions: int) -> float:
    """Median of some runs after one that warms up."""
    found = []
    for _ in range(repetitions + 1):
        synchronize()
        began = time.perf_counter()
        run()
        synchronize()
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:])


def constants(trainer: Trainer, repetitions: int, vocab: int) -> dict[str, float]:
    """The constants of this device, by passes of its own and by the model's."""
    shape, model = trainer.model.shape, trainer.model
    assert shape is not None, "a model without a plan shares nothing"
    packing = model.packing
    assert packing is not None
    rows, length = 8, 512
    dtype = getattr(torch, model.spec.compute_dtype)
    options: dict[str, Any] = {"dtype": dtype, "device": model.device, "requires_grad": True}
    query, key, value = (
        torch.randn(rows, shape.num_heads, length, shape.head_dim, **options) for _ in range(3)
    )
    mask = torch.ones(length, length, dtype=torch.bool, device=model.device).tril()
    states = torch.randn(rows * length, shape.hidden_size, **options)
    weight = torch.randn(shape.intermediate_size, shape.hidden_size, **options)
    attend = torch.nn.functional.scaled_dot_product_attention
    attention_s = seconds_of(
        lambda: attend(query, key, value, attn_mask=mask).sum().backward(), repetitions
    )
    product_s = seconds_of(lambda: (states @ weight.T).sum().backward(), repetitions)
    # The score of a pair and its part of the output: two multiplications an element.
    multiplied = 2 * rows * length**2 * shape.num_heads * shape.head_dim
    slowness = (attention_s / multiplied) / (product_s / (states.numel() * len(weight)))

    batch = rows_of(rows, rows, 2, 128, vocab)
    always = replace(packing, margin=float("inf"))
    found = {}

    def there_and_back() -> None:
        forward_backward(trainer, batch, LOSS)
        trainer.drop_gradients()

    for name, cost in (("shared", always), ("apart", replace(packing, shares=False))):
        model.packing = cost
        found[name] = seconds_of(there_and_back, repetitions)
    tokens = {"shared": 2 + sum(batch["loss_mask"].lengths().tolist())}
    tokens["apart"] = len(batch["tokens"].values)
    a_token = {name: seconds / tokens[name] for name, seconds in found.items()}
    return {
        "attention_slowness": round(slowness, 2),
        "margin": round(min(1.0, a_token["apart"] / a_token["shared"]), 2),
    }


def numbers(text: str) -> list[int]:
    """Numbers with commas between them."""
    return [int(number) for number in text.split(",")]


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path(".models/SmolLM2-135M-Instruct"))
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--groups", type=numbers, default=[1, 2, 4, 8])
    parser.add_argument("--prompts", type=numbers, default=[32, 128, 512])
    parser.add_argument("--completion", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compute-dtype", default="bfloat16")
    parser.add_argument("--layers", type=int, default=None, help="keep only the first layers")
    parser.add_argument("--constants", action="store_true", help="measure the cost model's")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    spec = ModelSpec(
        path=arguments.model,
        compute_dtype=arguments.compute_dtype,
        num_layers=arguments.layers,
    )
    vocab = read_config(spec).vocab_size
    trainer = Trainer.policy(spec, OptimizerSpec(), device=current_device())
    # The first passes allocate; they are not counted.
    measure(
        trainer,
        rows_of(arguments.rows, arguments.rows, 2, arguments.completion, vocab),
        repetitions=1,
    )
    if arguments.constants:
        found = constants(trainer, arguments.repetitions, vocab)
        kind = trainer.model.device.type
        name = torch.cuda.get_device_name() if kind == "cuda" else platform.machine()
        print(
            json.dumps(
                {
                    "benchmark": "tree_sharing_constants",
                    "kind": kind,
                    "device": name,
                    "compute_dtype": arguments.compute_dtype,
                    **found,
                }
            )
        )
        return 0
    points = []
    for prompt in arguments.prompts:
        for group in arguments.groups:
            batch = rows_of(arguments.rows, group, prompt, arguments.completion, vocab)
            found = measure(trainer, batch, arguments.repetitions)
            points.append({"prompt_tokens": prompt, "group": group, **found})
            # Minutes go by between points.
            print(json.dumps(points[-1]), file=sys.stderr, flush=True)
    print(
        json.dumps(
            {
                "benchmark": "tree_sharing",
                "config": {
                    "model": arguments.model.name,
                    "rows": arguments.rows,
                    "completion_tokens": [arguments.completion // 2, arguments.completion],
                    "compute_dtype": arguments.compute_dtype,
                    "layers": arguments.layers,
                    "micro_batch_tokens": spec.micro_batch_tokens,
                    "repetitions": arguments.repetitions,
                },
                "points": points,
                "versions": {"python": platform.python_version(), "torch": torch.__version__},
                "machine": {
                    "processor": platform.machine(),
                    "cores": os.cpu_count(),
                    "torch_threads": torch.get_num_threads(),
                },
            }
        )
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
