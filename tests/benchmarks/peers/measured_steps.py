"""Parts that both peers share: the work, the clock over their steps, the reward.

Runs in the peers' environment, without rolemesh.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import re
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

PRECISIONS = ("float32", "bfloat16", "bfloat16-weights")
"""float32 throughout; float32 weights under bfloat16 autocast (TRL's default, and what rolemesh's
compute_dtype bfloat16 keeps: float32 weights and optimizer); weights and optimizer in bfloat16."""

NUM_WARMUP_STEPS = 1

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def arithmetic_reward(text: str, answer: str) -> float:
    """What rolemesh's reward source "arithmetic" gives with its defaults."""
    text = text.strip()
    if text == answer:
        return 1.0
    if _NUMBER.fullmatch(text):
        return 0.1
    numbers = _NUMBER.findall(text)
    if numbers and numbers[-1] == answer:
        return 0.2 * len(answer) / len(text)
    return 0.0


@dataclass(frozen=True)
class Work:
    """What a peer is asked to do."""

    model: Path
    prompts: Sequence[tuple[str, str]]
    """Rendered text and answer of each prompt; every step takes all of them."""
    samples: int
    new_tokens: int
    steps: int
    """Measured ones; one more is made before them."""
    precision: str
    rows_per_pass: int
    """Trajectories in one forward and backward pass."""
    learning_rate: float
    kl: float
    adapter: int
    """Rank of the LoRA adapter that is trained; 0: all weights are."""
    seed: int

    @property
    def num_rows(self) -> int:
        """Trajectories of a step."""
        return len(self.prompts) * self.samples

    @property
    def num_passes(self) -> int:
        """Forward and backward passes of a step."""
        return self.num_rows // self.rows_per_pass

    @property
    def weights_dtype(self) -> torch.dtype:
        """Type that weights are loaded in."""
        return torch.bfloat16 if self.precision == "bfloat16-weights" else torch.float32

    @property
    def is_autocast(self) -> bool:
        """Whether matrix products are bfloat16 with float32 weights."""
        return self.precision == "bfloat16"


def read_work(description: str) -> Work:
    """The work that the command line describes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True, help='JSON lines: "text", "answer"')
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--new-tokens", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--precision", choices=PRECISIONS, required=True)
    parser.add_argument("--rows-per-pass", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--kl", type=float, required=True, help="weight of the KL; 0: no reference")
    parser.add_argument("--adapter", type=int, default=0, help="rank; 0: all weights are trained")
    parser.add_argument("--seed", type=int, default=0)
    arguments = vars(parser.parse_args())
    lines = [json.loads(line) for line in arguments["prompts"].read_text().splitlines()]
    arguments["prompts"] = [(line["text"], line["answer"]) for line in lines]
    work = Work(**arguments)
    if work.num_rows % work.rows_per_pass:
        parser.error(f"--rows-per-pass {work.rows_per_pass} does not divide {work.num_rows} rows")
    return work


class StepClock(TrainerCallback):
    """Seconds from the end of a step to the end of the next, and what was sampled in it.

    From end to end nothing is left out: loading of data, sampling, rewards, update, logging.
    """

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self._started = 0.0
        self._sampled = {"samples": 0, "prompt_tokens": 0, "completion_tokens": 0}
        self._rewards: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._started = time.perf_counter()

    def count(
        self, prompt_tokens: int, completion_lengths: Sequence[int], rewards: Sequence[float]
    ) -> None:
        """Notes what was sampled; prompt tokens count once for each sample."""
        self._sampled["samples"] += len(completion_lengths)
        self._sampled["prompt_tokens"] += prompt_tokens
        self._sampled["completion_tokens"] += sum(completion_lengths)
        self._rewards += rewards

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        ended = time.perf_counter()
        self.steps.append(
            {
                "seconds": ended - self._started,
                **self._sampled,
                "reward": sum(self._rewards) / max(1, len(self._rewards)),
            }
        )
        self._started = ended
        self._sampled = dict.fromkeys(self._sampled, 0)
        self._rewards = []


def report(peer: str, work: Work, clock: StepClock) -> None:
    """Prints one JSON line: the measured steps, and on what they ran."""
    made, wanted = len(clock.steps), work.steps + NUM_WARMUP_STEPS
    if made != wanted or any(step["samples"] != work.num_rows for step in clock.steps):
        raise SystemExit(f"{peer} made {made} steps of {wanted}: {clock.steps}")
    packages = ["trl", "torch", "transformers", "accelerate", *(["peft"] if work.adapter else [])]
    versions = {name: importlib.metadata.version(name) for name in packages}
    result = {
        "peer": peer,
        "precision": work.precision,
        "threads": torch.get_num_threads(),
        # ru_maxrss is in KiB on Linux.
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "warmup": clock.steps[:NUM_WARMUP_STEPS],
        "steps": clock.steps[NUM_WARMUP_STEPS:],
        "versions": {"python": platform.python_version(), **versions},
    }
    print(json.dumps(result), file=sys.stdout, flush=True)
