"""The estimate of a trainer's memory against what it really takes on a CPU: one JSON line.

    PYTHONPATH=tests python tests/benchmarks/fit_measured.py [--model .models/SmolLM2-135M-Instruct]

The same trainer makes two updates of two passes each, in a process of its own. Two measures:
    allocator_gib  most bytes that torch's CPU allocator had given out at once, by the events of its
                   profiler (support/allocations.py); no code of the engine counts
    resident_gib   growth of the process's resident memory (VmHWM), with whatever libraries keep
`estimate_gib` comes of tensors without values (`engine/fit/rank_memory.py`, for a CPU). The model
is loaded from its folder; its copy there is not counted.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path

import torch
from support.allocations import allocator_peak

from rolemesh.engine.fit.rank_memory import RankWork, estimated, work_rows
from rolemesh.engine.hardware.memory import PhaseMemory
from rolemesh.engine.layout.ranks import HybridLayout, TrainLayout
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.specs import ModelSpec, OptimizerSpec, PpoPolicyLossSpec
from rolemesh.engine.train.trainer import Trainer

_STATUS = Path("/proc/self/status")


def main() -> None:
    """Estimates, trains, and compares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path(".models/SmolLM2-135M-Instruct"))
    parser.add_argument("--tokens", type=int, default=512, help="of a row")
    parser.add_argument("--pass-tokens", type=int, default=1024)
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    arguments = parser.parse_args()
    work = RankWork(
        kind="policy",
        model=ModelSpec(
            path=arguments.model,
            micro_batch_tokens=arguments.pass_tokens,
            recompute=arguments.recompute,
        ),
        layout=HybridLayout(TrainLayout()),
        optimizer=OptimizerSpec(),
        loss=PpoPolicyLossSpec(),
        row_tokens=arguments.tokens,
        prompt_tokens=arguments.tokens // 4,
    )
    begun = time.monotonic()
    estimate = estimated(work, "cpu").peak
    estimate_s = time.monotonic() - begun
    before = resident()
    with PhaseMemory() as memory:
        allocator = allocator_peak(lambda: train(work))
    gib = 2**30
    print(
        json.dumps(
            {
                "benchmark": "fit_measured",
                "model": arguments.model.name,
                "row_tokens": arguments.tokens,
                "pass_tokens": arguments.pass_tokens,
                "recompute": arguments.recompute,
                "estimate_gib": round(estimate / gib, 3),
                "allocator_gib": round(allocator / gib, 3),
                "resident_gib": round((memory.peak_bytes - before) / gib, 3),
                "error": round(estimate / allocator - 1, 4),
                "estimate_s": round(estimate_s, 1),
                "torch": torch.__version__,
                "machine": platform.machine(),
            }
        )
    )


def train(work: RankWork) -> None:
    """Makes a trainer, and two updates."""
    batch, plan = work_rows(work)
    assert work.optimizer is not None
    assert work.loss is not None
    trainer = Trainer.policy(work.model, work.optimizer, mesh=RankMesh.single())
    for _ in range(2):
        trainer.update(batch, work.loss, plan)


def resident() -> int:
    """Resident memory now, in bytes."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
