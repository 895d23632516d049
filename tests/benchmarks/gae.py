"""GAE over packed ragged tokens against loops over tokens, side by side in one process.

    python tests/benchmarks/gae.py [--rows 64] [--tokens 32768] [--repetitions 7] [--threads 1]

Three ways over the same float32 batch, with lengths equal ("full") or spread ("ragged"):
    engine       rolemesh.engine.algorithms.estimators.advantages.gae
    python_loop  one Python step a token, over lists of floats
    step_loop    one Python step a position, all rows at once, over a padded [B, T] tensor
Repetitions are interleaved, so that a slow moment of the machine meets all three. All must agree
before anything is timed. Prints one JSON line; `ratio` is python_loop over engine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable

import torch

from rolemesh.engine.algorithms.estimators.advantages import gae
from rolemesh.engine.experience import offsets_of

GAMMA, LAM = 0.999, 0.95
LOOP_REPETITIONS = 3
"""The loops are slow and steady: fewer repetitions of them do."""
TOLERANCE = 1e-3
"""The step loop accumulates in float32; this only guards against a different formula."""


class Batch:
    """One batch, packed and as each loop wants it."""

    def __init__(self, lengths: list[int]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.lengths = lengths
        self.offsets = offsets_of(torch.tensor(lengths))
        num_tokens = int(self.offsets[-1])
        self.rewards = torch.randn(num_tokens, generator=generator)
        self.values = torch.randn(num_tokens, generator=generator)
        self.mask = torch.ones(num_tokens, dtype=torch.bool)
        self.reward_list, self.value_list = self.rewards.tolist(), self.values.tolist()
        edges = self.offsets.tolist()
        self.edges = list(itertools.pairwise(edges))
        self.padded_rewards, self.padded_values, self.padded_mask = (
            torch.nn.utils.rnn.pad_sequence(x.split(lengths), batch_first=True)
            for x in (self.rewards, self.values, torch.ones(num_tokens))
        )

    def engine(self) -> torch.Tensor:
        advantages, _ = gae(
            self.rewards, self.values, self.mask, self.offsets, gamma=GAMMA, lam=LAM
        )
        return advantages

    def python_loop(self) -> torch.Tensor:
        rewards, values = self.reward_list, self.value_list
        advantages, returns = [0.0] * len(rewards), [0.0] * len(rewards)
        decay = GAMMA * LAM
        for first, stop in self.edges:
            next_value = advantage = 0.0
            for t in range(stop - 1, first - 1, -1):
                value = values[t]
                advantage = rewards[t] + GAMMA * next_value - value + decay * advantage
                advantages[t] = advantage
                returns[t] = advantage + value
                next_value = value
        torch.tensor(returns)
        return torch.tensor(advantages)

    def step_loop(self) -> torch.Tensor:
        rewards, values, mask = self.padded_rewards, self.padded_values, self.padded_mask
        advantage = torch.zeros(len(rewards))
        next_value = torch.zeros(len(rewards))
        reversed_advantages = []
        for t in range(rewards.shape[1] - 1, -1, -1):
            value = values[:, t]
            delta = rewards[:, t] + GAMMA * next_value - value
            advantage = (delta + GAMMA * LAM * advantage) * mask[:, t]
            reversed_advantages.append(advantage)
            next_value = value
        advantages = torch.stack(reversed_advantages[::-1], dim=1)
        _ = advantages + values  # returns
        return advantages[mask.bool()]


def measure(batch: Batch, repetitions: int) -> dict[str, list[float]]:
    """Seconds of each repetition of each way, after one untimed round that checks the results."""
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "engine": batch.engine,
        "python_loop": batch.python_loop,
        "step_loop": batch.step_loop,
    }
    expected = batch.python_loop()
    for way in (batch.engine, batch.step_loop):
        torch.testing.assert_close(way(), expected, rtol=TOLERANCE, atol=TOLERANCE)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repetition in range(repetitions):
        for name, way in ways.items():
            if name == "engine" or repetition < LOOP_REPETITIONS:
                start = time.perf_counter()
                way()
                seconds[name].append(time.perf_counter() - start)
    return seconds


def main() -> None:
    """Measures both batches and prints one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="torch threads; a loop has one")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    rows, tokens = arguments.rows, arguments.tokens
    batches = {
        "full": [tokens] * rows,
        # From one token to all of them, in equal steps.
        "ragged": [1 + (tokens - 1) * row // max(rows - 1, 1) for row in range(rows)],
    }
    medians: dict[str, dict[str, float]] = {}
    spreads: dict[str, dict[str, list[float]]] = {}
    for name, lengths in batches.items():
        seconds = measure(Batch(lengths), arguments.repetitions)
        medians[name] = {way: statistics.median(times) for way, times in seconds.items()}
        spreads[name] = {way: [min(times), max(times)] for way, times in seconds.items()}
    result = {
        "benchmark": "gae",
        "config": {"rows": rows, "tokens": tokens, "gamma": GAMMA, "lam": LAM, "dtype": "float32"},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "machine": {
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
        },
        "repetitions": {
            "engine": arguments.repetitions,
            "loops": min(arguments.repetitions, LOOP_REPETITIONS),
        },
        "median_s": medians["full"],
        "spread_s": spreads["full"],
        "ratio": medians["full"]["python_loop"] / medians["full"]["engine"],
        "ratio_step_loop": medians["full"]["step_loop"] / medians["full"]["engine"],
        "ragged": {
            "median_s": medians["ragged"],
            "spread_s": spreads["ragged"],
            "ratio": medians["ragged"]["python_loop"] / medians["ragged"]["engine"],
            "ratio_step_loop": medians["ragged"]["step_loop"] / medians["ragged"]["engine"],
        },
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
