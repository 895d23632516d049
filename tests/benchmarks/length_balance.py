"""An optimizer step over two data-parallel ranks, with and without balance by length.

    python tests/benchmarks/length_balance.py [--rows 64] [--longest 512] [--repetitions 5]

The batch is skewed, as completions are: most rows short, a few long, the long ones next to each
other (samples of one hard prompt). Three ways to give each of two ranks its rows:
    balanced     rolemesh.engine.packing.balance.balanced_partition
    contiguous   the first half and the second half
    round_robin  every other row
Each is a step of the same trainer (policy loss, float32, FSDP over two gloo processes of one thread
each on this machine), so a rank waits for the other in each layer. Repetitions are interleaved.
Prints one JSON line. `tokens` is the largest part over the mean; `compute_seconds` the CPU time of
the busier rank's computing thread, which is what a step takes where each rank has a processor of
its own; `wall_seconds` what it took here, where other programs may have had the processors. The
ratios are of compute_seconds, to balanced.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.parallel_training import Job, make_trainer
from support.rank_processes import RankContext, RankPool
from support.tiny_models import write_tiny_llama
from support.token_batches import token_batch
from support.updates import for_whole_batch

from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.layout.ranks import HybridLayout, TrainLayout
from rolemesh.engine.packing.balance import balanced_partition
from rolemesh.engine.specs import PpoPolicyLossSpec
from rolemesh.engine.train.plan import UpdatePlan

RANKS = 2
PROMPT_TOKENS = 16
MICRO_BATCH_TOKENS = 1024


def partitions(lengths: list[int]) -> dict[str, list[list[int]]]:
    """Rows of each rank, by way."""
    rows = list(range(len(lengths)))
    half = len(rows) // RANKS
    return {
        "balanced": balanced_partition(lengths, RANKS),
        "contiguous": [rows[:half], rows[half:]],
        "round_robin": [rows[rank::RANKS] for rank in range(RANKS)],
    }


def skewed_lengths(num_rows: int, longest: int) -> list[int]:
    """Completion lengths: powers of the longest, long ones last."""
    return [max(1, round(longest ** ((row + 1) / num_rows))) for row in range(num_rows)]


def ppo_batch(num_rows: int, longest: int) -> Experience:
    """Rows of those lengths with what the policy loss reads."""
    batch = token_batch(
        prompt_lengths=[PROMPT_TOKENS] * num_rows,
        completion_lengths=skewed_lengths(num_rows, longest),
    )
    column = batch["advantages"]
    logprobs = Column(ColumnKind.COMPLETION, torch.full_like(column.values, -6.0), column.offsets)
    return batch | Experience({"logprobs": logprobs})


def measure(at: RankContext, job: Job, repetitions: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds of each step, wall and computing, by way; the first round is not counted."""
    torch.set_num_threads(1)
    seconds: dict[str, list[tuple[float, float]]] = {}
    with at.connect(HybridLayout(job.layout), timeout_s=600) as mesh:
        trainer = make_trainer(job, at, mesh)
        lengths = job.batch["tokens"].lengths().tolist()
        for repetition in range(repetitions + 1):
            for name, parts in partitions(lengths).items():
                plan = for_whole_batch(UpdatePlan.of_mini_batch(lengths, parts[mesh.dp.index]))
                mesh_is_ready(mesh)
                began, computed = time.perf_counter(), time.thread_time()
                trainer.forward_backward(job.batch, job.loss, plan)
                trainer.optim_step()
                if repetition:
                    seconds.setdefault(name, []).append(
                        (time.perf_counter() - began, time.thread_time() - computed)
                    )
    return seconds


def mesh_is_ready(mesh: Any) -> None:
    """Begins a step at the same moment on all ranks."""
    torch.distributed.barrier(group=mesh.world.process_group)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--longest", type=int, default=512, help="tokens of a completion")
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        job = Job(
            write_tiny_llama(
                Path(folder), num_layers=4, hidden_size=256, num_heads=8, num_kv_heads=4
            ),
            ppo_batch(options.rows, options.longest),
            PpoPolicyLossSpec(),
            layout=TrainLayout(dp=RANKS, fsdp=RANKS),
            model={"micro_batch_tokens": MICRO_BATCH_TOKENS},
        )
        with RankPool(RANKS) as pool:
            ranks = pool.run(measure, RANKS, job, options.repetitions, timeout_s=1800)
    lengths = job.batch["tokens"].lengths().tolist()
    mean = sum(lengths) / RANKS
    # A step is over when its slower rank is done.
    wall, compute = (
        {
            name: [max(step[kind] for step in steps) for steps in zip(*by_rank, strict=True)]
            for name, by_rank in ((name, [rank[name] for rank in ranks]) for name in ranks[0])
        }
        for kind in range(2)
    )
    medians = {name: statistics.median(steps) for name, steps in compute.items()}
    print(
        json.dumps(
            {
                "benchmark": "length_balance",
                "rows": options.rows,
                "longest_tokens": max(lengths),
                "batch_tokens": sum(lengths),
                "repetitions": options.repetitions,
                "tokens": {
                    name: round(max(sum(lengths[row] for row in part) for part in parts) / mean, 3)
                    for name, parts in partitions(lengths).items()
                },
                "compute_seconds": {name: round(median, 3) for name, median in medians.items()},
                "wall_seconds": {
                    name: round(statistics.median(steps), 3) for name, steps in wall.items()
                },
                "spread_compute_seconds": {
                    name: [round(min(steps), 3), round(max(steps), 3)]
                    for name, steps in compute.items()
                },
                "ratio_contiguous": round(medians["contiguous"] / medians["balanced"], 2),
                "ratio_round_robin": round(medians["round_robin"] / medians["balanced"], 2),
                "cpus": os.cpu_count(),
                "machine": platform.machine(),
                "torch": torch.__version__,
            }
        )
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
