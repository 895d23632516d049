"""Measures what each primitive costs through the SDK, beside a direct call of the engine.

    PYTHONPATH=tests python tests/benchmarks/sdk_latency.py [--repetitions 30]

One tiny model and one spec, twice: in this process, called directly, and in an actor's process,
called through `AsyncMesh` over loopback. Both have one thread; calls of the two alternate, so that
what else the machine does meets both. Prints one JSON line: medians in milliseconds, what the SDK
adds, and how many times as long it takes. Calls of the SDK include key, wire, ledger, publication
of results and, where they take experience, its pull; a direct call is handed what it needs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.learning_runs import service_processes
from support.learning_tasks import model_of, write_task
from support.updates import forward_backward

from rolemesh.coordinator.sdk import AsyncMesh, ColumnData, Columns
from rolemesh.engine.algorithms.estimators.estimation import Controllers, estimate_advantages
from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.models.scoring import compute_logprobs
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.specs import GrpoSpec, PpoPolicyLossSpec, SamplingSpec
from rolemesh.services.actor.servicers import ActorRole
from rolemesh.services.runtime.servicers.asked_prompts import asked_prompts
from rolemesh.v1 import rollout_pb2

PROMPTS = ["abcdefgh"] * 8
SAMPLES = 4
NEW_TOKENS = 16
NUM_WARMUPS = 3


def no_progress(stage: str, done: int, total: int) -> None:
    """Nobody listens."""


class Direct:
    """The engine in this process."""

    def __init__(self, spec: dict[str, Any], folder: Path) -> None:
        self.role = ActorRole()
        self.role.initialize(
            ActorRole.spec_class.model_validate(spec), 1, no_progress, RankMesh.single()
        )
        self.folder = folder
        self.step = 0
        self.batch = self.sample()
        rewards = torch.linspace(0, 1, self.batch.num_rows)
        self.batch |= Experience({"rewards": Column(ColumnKind.ROW, rewards)})
        self.batch |= self.advantages()

    def sample(self) -> Experience:
        self.step += 1
        given = [rollout_pb2.GivenPrompt(text=text, prompt_id=i) for i, text in enumerate(PROMPTS)]
        request = rollout_pb2.GenerateRequest(given=rollout_pb2.GivenPrompts(prompts=given))
        sampling = SamplingSpec(samples_per_prompt=SAMPLES, max_new_tokens=NEW_TOKENS)
        return self.role.generate(
            asked_prompts(request, SAMPLES),
            sampling,
            self.step,
            no_progress,
            lineage=0,
            only=range(len(PROMPTS)),
        )

    def logprobs(self) -> Experience:
        return compute_logprobs(
            self.role.policy, self.batch.require(["tokens", "prompt_lengths"]), temperature=1.0
        )

    def advantages(self) -> Experience:
        spec = GrpoSpec()
        estimated, _ = estimate_advantages(self.batch, spec, Controllers.from_spec(spec), None)
        return estimated

    def forward_backward(self) -> None:
        forward_backward(self.role.trainer, self.batch, PpoPolicyLossSpec())

    def optim_step(self) -> None:
        self.role.trainer.optim_step()

    def save_state(self) -> None:
        self.role.trainer.save(self.folder / "direct")

    def load_state(self) -> None:
        self.role.trainer.load(self.folder / "direct")
        self.role.weights_replaced()


async def measure(mesh: AsyncMesh, direct: Direct, repetitions: int) -> dict[str, Any]:
    """Seconds of each primitive, both ways, by name."""
    actor = mesh["actor"]
    state = direct.folder / "sdk"
    batch = await actor.sample(PROMPTS, samples_per_prompt=SAMPLES, max_new_tokens=NEW_TOKENS)
    rewards = Columns({"rewards": ColumnData.row(np.linspace(0, 1, batch.num_rows), np.float32)})
    batch |= await actor.put(rewards)
    batch |= await actor.compute_advantages(batch, "grpo")

    async def sample() -> None:
        mesh.begin_step()
        await actor.sample(PROMPTS, samples_per_prompt=SAMPLES, max_new_tokens=NEW_TOKENS)

    pairs: dict[str, tuple[Callable[[], Awaitable[Any]], Callable[[], Any] | None]] = {
        "status": (actor.status, None),
        "put": (lambda: actor.put(rewards), None),
        "fetch": (lambda: mesh.fetch(batch, ["tokens", "logprobs"]), None),
        "sample": (sample, direct.sample),
        "compute_logprobs": (lambda: actor.compute_logprobs(batch, "scored"), direct.logprobs),
        "compute_advantages": (
            lambda: actor.compute_advantages(batch, "grpo"),
            direct.advantages,
        ),
        "forward_backward": (
            lambda: actor.forward_backward(batch, "ppo_policy"),
            direct.forward_backward,
        ),
        "optim_step": (actor.optim_step, direct.optim_step),
        "save_state": (lambda: actor.save_state(str(state)), direct.save_state),
        "load_state": (lambda: actor.load_state(str(state)), direct.load_state),
    }
    seconds: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in pairs}
    for repetition in range(NUM_WARMUPS + repetitions):
        for folder in (state, direct.folder / "direct"):
            shutil.rmtree(folder, ignore_errors=True)
        for name, (through, beside) in pairs.items():
            ways = [(0, through), (1, beside)]
            # What writes first makes the other wait for the disk: they take turns.
            for way, call in ways[:: 1 if repetition % 2 else -1]:
                if call is None:
                    continue
                began = time.perf_counter()
                pending = call()
                if way == 0:
                    await pending
                if repetition >= NUM_WARMUPS:
                    seconds[name][way].append(time.perf_counter() - began)
    return {name: summary(sdk, beside) for name, (sdk, beside) in seconds.items()}


def summary(sdk: list[float], beside: list[float]) -> dict[str, float]:
    """Medians in milliseconds."""
    sdk_ms = 1e3 * statistics.median(sdk)
    if not beside:
        return {"sdk_ms": round(sdk_ms, 3)}
    direct_ms = 1e3 * statistics.median(beside)
    return {
        "sdk_ms": round(sdk_ms, 3),
        "direct_ms": round(direct_ms, 3),
        "added_ms": round(sdk_ms - direct_ms, 3),
        "ratio": round(sdk_ms / direct_ms, 3),
    }


async def main() -> None:
    """Prints the line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=30)
    repetitions = parser.parse_args().repetitions
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        task = write_task(folder, seed=1)
        spec = {
            "model": model_of(task / "model"),
            "optimizer": {"learning_rate": 1e-4},
            "rollout": {"type": "hf", "max_model_len": 128},
            "data": {"type": "jsonl", "path": str(task / "prompts.jsonl")},
        }
        direct = Direct(spec, folder)
        with service_processes(folder, ("actor",)) as addresses:
            async with AsyncMesh(addresses, run_id="latency") as mesh:
                await mesh["actor"].initialize(spec, run_seed=1)
                found = await measure(mesh, direct, repetitions)
    line = {
        "benchmark": "sdk_latency",
        "rows": len(PROMPTS) * SAMPLES,
        "new_tokens": NEW_TOKENS,
        "repetitions": repetitions,
        "primitives": found,
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    asyncio.run(main())
