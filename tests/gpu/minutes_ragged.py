"""Updates of rows of many lengths in groups that share their prompts, against rows of one length.

Every step of a run has lengths that none before it had. So each batch is measured twice: as it
comes, and again, when whatever is made for a size (cuDNN's plans, the allocator's blocks) is there.
"""

from __future__ import annotations

import importlib
import os
import random
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from minutes_tools import (
    IS_REHEARSAL,
    SHAPE,
    Found,
    make_trainer,
    median_s,
    rows_of,
    seconds_of,
    update,
)

GROUP = 4
NUM_GROUPS = 4
BATCHES = 2
"""New ones, for each way."""


def speed_ragged(found: Found) -> None:
    """By cuDNN's attention on and off, and prompts shared and not."""
    trainer = make_trainer("fast", recompute="none")
    found["micro_batch_tokens"] = trainer.model.spec.micro_batch_tokens
    found["fixed"] = fixed(trainer)
    if IS_REHEARSAL:
        found.unrehearsed("cudnn", "a CPU has another attention: both ways compute the same there")
    ragged: dict[str, Any] = {}
    seed = 1
    for cudnn in ("0", "1"):
        for way in ("shared", "never"):
            ragged[f"cudnn {cudnn}, {way}"] = both_times(trainer, cudnn, way, seed)
            found["ragged"] = ragged
            # Sizes that the next way has not seen either.
            seed += BATCHES
    found["memory"] = memory()
    use(trainer, "0", "shared")
    # What DEVICE_COSTS of engine/packing/pass_cost.py is to say of this device.
    found["sharing_costs"] = importlib.import_module("benchmarks.tree_sharing").constants(
        trainer, 3, SHAPE.vocabulary
    )


def speed_expandable(found: Found) -> None:
    """The default way once more, with segments of the allocator that grow."""
    found["allocator"] = os.environ["PYTORCH_CUDA_ALLOC_CONF"]
    if IS_REHEARSAL:
        found.unrehearsed("expandable segments", "they are a GPU's")
    trainer = make_trainer("fast", recompute="none")
    found["fixed"] = fixed(trainer)
    found["ragged"] = {"cudnn 0, shared": both_times(trainer, "0", "shared", 1)}
    found["memory"] = memory()


def fixed(trainer: Any) -> dict[str, Any]:
    """As many rows of one length, nothing shared."""
    rows = GROUP * NUM_GROUPS
    length = SHAPE.tokens // rows
    batch = rows_of([length // 4] * rows, [length - length // 4] * rows)
    use(trainer, "0", "never")
    seconds = median_s(lambda: update(trainer, batch), warm_ups=2)
    return {"rows": rows, "length": length, "tokens_per_s": round(rows * length / seconds)}


def both_times(trainer: Any, cudnn: str, way: str, seed: int) -> dict[str, Any]:
    """Tokens/s of new batches, and of the same ones again."""
    use(trainer, cudnn, way)
    # What is loaded once, such as kernels of this way, is not a new size.
    update(trainer, ragged_batch(seed + 1000))
    batches = [ragged_batch(seed + number) for number in range(BATCHES)]
    num_tokens = sum(len(batch["tokens"].values) for batch in batches)
    first, second = (
        [seconds_of(partial(update, trainer, batch)) for batch in batches] for _ in range(2)
    )
    passes = [trainer.rank_model.micro_batches(batch) for batch in batches]
    return {
        "tokens": num_tokens,
        "tokens_per_s_first": round(num_tokens / sum(first)),
        "tokens_per_s_second": round(num_tokens / sum(second)),
        "seconds": [[round(one, 3) for one in times] for times in (first, second)],
        "passes": sum(map(len, passes)),
        "passes_that_share": sum(one.shares for some in passes for one in some),
        "computed_tokens": sum(one.num_tokens for some in passes for one in some),
    }


def use(trainer: Any, cudnn: str, way: str) -> None:
    """Chooses for the updates that follow, as variable and recipe do for a service."""
    from rolemesh.engine.hardware.devices import CUDNN_VARIABLE, use_device

    os.environ[CUDNN_VARIABLE] = cudnn
    use_device(trainer.model.device)
    trainer.model.packing = replace(trainer.model.packing, shares=way != "never")


def ragged_batch(seed: int) -> Any:
    """Groups of rows of one prompt; completions from short to half a group's share of the step."""
    numbers = random.Random(seed)
    mean = SHAPE.tokens // (GROUP * NUM_GROUPS)
    prompts, completions = [], []
    for _ in range(NUM_GROUPS):
        prompts += [numbers.randint(mean // 8, mean // 2)] * GROUP
        completions += [numbers.randint(mean // 16, mean * 5 // 4) for _ in range(GROUP)]
    return rows_of(prompts, completions, group=GROUP)


def memory() -> dict[str, int]:
    """What the allocator took for all of it, and how much of that it used."""
    if IS_REHEARSAL:
        return {}
    told = torch.cuda.memory_stats()
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "allocations_retried": told["num_alloc_retries"],
    }
