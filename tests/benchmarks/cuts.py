"""A cut of a trainer, saved and restored, against a plain copy of the same bytes.

    python tests/benchmarks/cuts.py [--model .models/SmolLM2-135M-Instruct] [--repetitions 7]

The model is in float32, with the moments of AdamW:
    memcpy      torch copies the same bytes inside this process, tensor by tensor
    first_save  the first cut makes, reserves and touches both slots
    save        a later cut, into warm pages
    restore     the weights are written in place, the moments are made anew
save and memcpy take turns, so that a slow moment of the machine meets both. With --checkpoints N,
also the seconds that two steps with a checkpoint take longer than two without, N times each in
turns: in the foreground, and from a cut beside them (it is whole when the second step is). Prints
one JSON line.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.token_batches import token_batch
from support.updates import update_whole

from rolemesh.engine.specs import ModelSpec, OptimizerSpec, SftLossSpec
from rolemesh.engine.train.cuts.slots import CutSlots
from rolemesh.engine.train.optimizers.host_moments import STATE_NAMES
from rolemesh.engine.train.trainer import Trainer
from rolemesh.engine.transport.slots.slot_files import SlotOwner
from rolemesh.engine.transport.slots.slots import remove_slots


def timed(work: Callable[[], object]) -> float:
    """Seconds that it takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(trainer: Trainer, slots: CutSlots, repetitions: int) -> tuple[int, dict[str, float]]:
    """Bytes of a cut, and medians in seconds by name."""
    saved: list[int] = []

    def save() -> None:
        saved.append(trainer.save_cut(slots, len(saved), {}, lambda *_: None))

    times: dict[str, list[float]] = defaultdict(list)
    times["first_save"].append(timed(save))
    sources = [weight for _, weight in trainer.named_weights()]
    sources += [state for name in STATE_NAMES for state in trainer.optimizer_state(name).values()]
    targets = [torch.zeros_like(source) for source in sources]

    def copy() -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)

    save()
    copy()
    for _ in range(repetitions):
        times["save"].append(timed(save))
        times["memcpy"].append(timed(copy))
    targets.clear()
    sources.clear()
    last = len(saved) - 1
    for _ in range(2):
        times["restore"].append(timed(lambda: trainer.restore_cut(slots, last)))
    return saved[-1], {name: statistics.median(taken) for name, taken in times.items()}


def measure_checkpoints(
    trainer: Trainer, slots: CutSlots, folder: Path, repetitions: int
) -> dict[str, float]:
    """Median seconds of two steps without a checkpoint, and what one adds to them."""
    batch, target = token_batch(), folder / "checkpoint"

    def silent(stage: str, done: int, total: int) -> None:
        pass

    def two_steps(kind: str) -> None:
        # A run saves a cut in any case.
        trainer.save_cut(slots, 0, {}, silent)
        with ThreadPoolExecutor(1) as thread:
            written = None
            if kind == "foreground":
                trainer.save(target)
            elif kind == "background":
                written = thread.submit(trainer.hold_cut(slots, 0).write, target, None, silent)
            for _ in range(2):
                update_whole(trainer, batch, SftLossSpec(), epochs=1, mini_batch_rows=8, seed=1)
            if written is not None:
                written.result()

    times: dict[str, list[float]] = defaultdict(list)
    kinds = ("none", "foreground", "background")
    for number in range(repetitions):
        for place in range(len(kinds)):
            kind = kinds[(number + place) % len(kinds)]
            times[kind].append(timed(functools.partial(two_steps, kind)))
            shutil.rmtree(target, ignore_errors=True)
    medians = {kind: statistics.median(taken) for kind, taken in times.items()}
    return {
        "two_steps": round(medians["none"], 3),
        **{kind: round(medians[kind] - medians["none"], 3) for kind in kinds[1:]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=Path(".models/SmolLM2-135M-Instruct"))
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--checkpoints", type=int, default=0)
    arguments = parser.parse_args()
    model = ModelSpec(path=arguments.model, compute_dtype="float32")
    trainer = Trainer.policy(model, OptimizerSpec())
    update_whole(trainer, token_batch(), SftLossSpec(), epochs=1, mini_batch_rows=8, seed=1)
    owner = SlotOwner(f"benchmark-{os.getpid()}", "actor", 0, 1)
    slots = CutSlots(owner, trainer.mesh.layout.train.flag())
    try:
        num_bytes, seconds = measure(trainer, slots, arguments.repetitions)
        checkpoint = {}
        if arguments.checkpoints:
            with tempfile.TemporaryDirectory() as folder:
                checkpoint = measure_checkpoints(
                    trainer, slots, Path(folder), arguments.checkpoints
                )
    finally:
        slots.close()
        remove_slots(owner.run_id, owner.role)
    print(
        json.dumps(
            {
                "benchmark": "cuts",
                "model": str(arguments.model),
                "num_bytes": num_bytes,
                "seconds": {name: round(value, 4) for name, value in seconds.items()},
                "save_against_memcpy": round(seconds["save"] / seconds["memcpy"], 2),
                "save_gb_s": round(num_bytes / seconds["save"] / 1e9, 2),
                "checkpoint_seconds": checkpoint,
                "threads": torch.get_num_threads(),
                "load_average": round(os.getloadavg()[0], 1),
                "cpu": platform.processor() or platform.machine(),
                "torch": torch.__version__,
            }
        )
    )


if __name__ == "__main__":
    main()
