"""Seconds and bytes of one trainer on one GPU: parts of the first hour."""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import torch
from first_hour_tools import (
    SHAPES,
    Found,
    make_trainer,
    needs,
    scratch,
    shape_that_fits,
    update,
    write_shape,
)

PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "4090": 165e12,
}
"""Dense bfloat16 FLOP/s by a part of the device's name, as NVIDIA gives them."""


def trainer_sleep(found: Found) -> None:
    """A trainer after a step: seconds and GB/s of sleep and wake, and what stays on the device."""
    needs("transformers", "pydantic")
    from rolemesh.engine.devices import free_bytes, give_back_memory

    device = torch.device("cuda", 0)
    shape = shape_that_fits()
    found["shape"] = shape
    give_back_memory(device)
    empty = free_bytes(device)
    with scratch() as folder:
        trainer = make_trainer(write_shape(folder / "model", shape), recompute="full")
    update(trainer, rows=2, tokens=1024)
    give_back_memory(device)
    found["held_bytes"] = empty - free_bytes(device)
    # The first sleep locks host memory, the second one has it.
    for name in ("sleep", "wake", "second_sleep", "second_wake"):
        target = torch.device("cpu") if name.endswith("sleep") else device
        before = free_bytes(device)
        started = time.perf_counter()
        moved = trainer.move_to(target)
        torch.cuda.synchronize(device)
        give_back_memory(device)
        seconds = time.perf_counter() - started
        found[name] = {
            "moved_bytes": moved,
            "free_changed_by_bytes": free_bytes(device) - before,
            "seconds": seconds,
            "gb_per_s": moved / seconds / 1e9,
        }
        if name == "sleep":
            left = empty - free_bytes(device)
            found["left_after_sleep_bytes"] = left
            assert left < 0.1 * moved + (1 << 30), f"{left} bytes stay on the device"


def update_speed(found: Found) -> None:
    """Tokens/s, MFU and peak of Trainer.update, by length, recomputation and chunk.

    The script runs it twice, in environments that differ by the kernels alone: `loss` and
    `grad_norm` say whether both computed the same, `tokens_per_s` which of them should be the
    default.
    """
    needs("transformers", "pydantic")
    from rolemesh.engine.devices import give_back_memory
    from rolemesh.engine.kernels.choice import KERNELS_VARIABLE

    found["kernels"] = os.environ[KERNELS_VARIABLE]
    if os.environ[KERNELS_VARIABLE] == "triton":
        needs("triton")
    device = torch.device("cuda", 0)
    shape = shape_that_fits()
    name = torch.cuda.get_device_name(device)
    peak = next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)
    found["shape"], found["device"], found["peak_flops"] = shape, name, peak
    results: dict[str, Any] = {}
    with scratch() as folder:
        model = write_shape(folder / "model", shape)
        for tokens in (4096, 16384):
            for recompute in ("full", "selective", "none"):
                give_back_memory(device)
                try:
                    trainer = make_trainer(model, recompute=recompute, micro_batch_tokens=tokens)
                    for chunk in (512, 2048, 8192):
                        changed = {"logprob_chunk_tokens": chunk}
                        trainer.model.spec = trainer.model.spec.model_copy(update=changed)
                        key = f"{tokens} tokens, recompute {recompute}, chunk {chunk}"
                        results[key] = _speed(trainer, shape, tokens, peak)
                        found["updates"] = results
                except torch.cuda.OutOfMemoryError as error:
                    results[f"{tokens} tokens, recompute {recompute}"] = f"no room: {error}"[:300]
                    found["updates"] = results
                trainer = None
    if not any(isinstance(result, dict) for result in results.values()):
        raise RuntimeError("no choice had room")


def _speed(trainer: Any, shape: str, tokens: int, peak: float | None) -> dict[str, Any]:
    rows = max(1, 16384 // tokens)
    first = update(trainer, rows=rows, tokens=tokens)
    torch.cuda.reset_peak_memory_stats(0)
    seconds = []
    for _ in range(3):
        torch.cuda.synchronize(0)
        started = time.perf_counter()
        update(trainer, rows=rows, tokens=tokens)
        torch.cuda.synchronize(0)
        seconds.append(time.perf_counter() - started)
    middle = statistics.median(seconds)
    per_second = rows * tokens / middle
    parameters = sum(weight.numel() for _, weight in trainer.named_weights())
    layers, width = SHAPES[shape]["layers"], SHAPES[shape]["hidden"]
    # 6 a parameter and token, and causal attention's two products (arXiv 2204.02311, appendix B,
    # halved since the mask leaves half of them); what is computed again does not count.
    flops = 6 * parameters + 6 * layers * width * tokens
    return {
        "seconds": [round(one, 3) for one in seconds],
        "tokens_per_s": round(per_second),
        "mfu": None if peak is None else round(per_second * flops / peak, 4),
        "peak_bytes": torch.cuda.max_memory_allocated(0),
        "loss": first["loss"],
        "grad_norm": first["grad_norm"],
    }


def publication(found: Found) -> None:
    """Publication of a policy's weights in bfloat16, against a pinned copy of the same bytes."""
    needs("transformers", "pydantic")
    from rolemesh.engine.weights.published import Publication

    shape = shape_that_fits()
    found["shape"] = shape
    with scratch() as folder:
        trainer = make_trainer(write_shape(folder / "model", shape), recompute="full")
    weights = dict(trainer.named_weights())
    layout = trainer.weights_layout.in_dtype("bfloat16")
    seconds: dict[str, list[float]] = {"publication": [], "pinned_copy": []}
    num_bytes = 0
    rounded = torch.empty(0)
    for _ in range(4):
        torch.cuda.synchronize(0)
        started = time.perf_counter()
        published = Publication(layout, 0, weights, policy_version=0, shares_memory=True)
        torch.cuda.synchronize(0)
        seconds["publication"].append(time.perf_counter() - started)
        num_bytes = published.num_bytes
        published.close()
    rounded = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    for _ in range(4):
        torch.cuda.synchronize(0)
        started = time.perf_counter()
        pinned.copy_(rounded, non_blocking=True)
        torch.cuda.synchronize(0)
        seconds["pinned_copy"].append(time.perf_counter() - started)
    rates = {
        name: num_bytes / statistics.median(times[1:]) / 1e9 for name, times in seconds.items()
    }
    found["num_bytes"], found["gb_per_s"] = num_bytes, rates
    found["publication_over_pinned_copy"] = rates["pinned_copy"] / rates["publication"]
