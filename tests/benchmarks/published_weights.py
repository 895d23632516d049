"""Weights from an actor to rollout services, by transport, against a plain copy of the same bytes.

    python tests/benchmarks/published_weights.py [--layers 4] [--repetitions 7]

An actor and two rollout services (transformers back end, float32, one rank each) in processes of
their own:
    memcpy   torch copies the same bytes inside this process
    publish  the actor copies its weights into a segment
    shm      a rollout service maps the segment and loads it
    grpc     a rollout service without shared memory takes a stream and loads it
"fetch" and "load" are phases of the two: only loading holds up decoding. Repetitions take turns, so
that a slow moment of the machine meets all. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.rollout_services import Caller, process_of
from support.tiny_models import write_tiny_llama


def seconds(report: Any, phase: str) -> float:
    """What a phase took."""
    return sum(one.duration.ToNanoseconds() / 1e9 for one in report.phases if one.phase == phase)


async def measure(model: Path, callers: dict[str, Caller], repetitions: int) -> dict[str, Any]:
    """Times by name, in seconds, and the bytes."""
    rollout = {"type": "hf", "max_model_len": 64}
    for name, caller in callers.items():
        trainer = {"compute_dtype": "float32"} if name == "actor" else {}
        await caller.initialize(model={"path": str(model), **trainer}, rollout=rollout)
    times: dict[str, list[float]] = defaultdict(list)
    num_bytes = 0
    for repetition in range(repetitions + 1):
        taken: dict[str, float] = {}
        started = time.perf_counter()
        published = await callers["actor"].publish()
        taken["publish"] = time.perf_counter() - started
        num_bytes = int(published.report.metrics["published_bytes"])
        for name in ("shm", "grpc"):
            started = time.perf_counter()
            answer = await callers[name].take(published.weights)
            taken[name] = time.perf_counter() - started
            for phase in ("fetch", "load"):
                taken[f"{name}_{phase}"] = seconds(answer.report, phase)
            assert list(answer.report.fetched_bytes) == [name]
        source = torch.zeros(num_bytes, dtype=torch.uint8)
        started = time.perf_counter()
        source.clone()
        taken["memcpy"] = time.perf_counter() - started
        # The first time maps pages and opens connections.
        if repetition:
            for name, value in taken.items():
                times[name].append(value)
    sums = {
        name: (await caller.checksums()).checksums
        for name, caller in callers.items()
        if name != "actor"
    }
    assert sums["shm"] == sums["grpc"]
    return {"num_bytes": num_bytes, "times": times}


async def run(layers: int, repetitions: int) -> dict[str, Any]:
    """Starts the services and measures."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = write_tiny_llama(
            Path(folder) / "model",
            num_layers=layers,
            hidden_size=1024,
            num_heads=32,
            num_kv_heads=8,
            max_position_embeddings=128,
        )
        callers = {}
        for name, role, flags in (
            ("actor", "actor", ()),
            ("shm", "rollout", ()),
            ("grpc", "rollout", ("--no-shared-memory",)),
        ):
            home = Path(folder) / name
            home.mkdir()
            address, _ = stack.enter_context(process_of(role, home, *flags))
            callers[name] = Caller(address)
        try:
            return await measure(model, callers, repetitions)
        finally:
            for caller in callers.values():
                await caller.channel.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="See the module docstring.")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=7)
    arguments = parser.parse_args()
    found = asyncio.run(run(arguments.layers, arguments.repetitions))
    summary = {
        name: {
            "median_s": round(statistics.median(values), 4),
            "min_s": round(min(values), 4),
            "max_s": round(max(values), 4),
        }
        for name, values in found["times"].items()
    }
    print(
        json.dumps(
            {
                "benchmark": "published_weights",
                "config": vars(arguments),
                "num_bytes": found["num_bytes"],
                "results": summary,
                "machine": {
                    "cpus": os.cpu_count(),
                    "load": round(os.getloadavg()[0], 1),
                    "platform": platform.platform(),
                },
                "versions": {"python": platform.python_version(), "torch": torch.__version__},
            }
        )
    )


if __name__ == "__main__":
    main()
