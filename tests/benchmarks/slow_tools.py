"""Measures episodes whose tools are slow, each of another duration.

    PYTHONPATH=tests python tests/benchmarks/slow_tools.py [--rollout vllm] [--rows 64] [--turns 4]

A tiny model plays episodes with an environment whose answers take 0.2 to 5 s. Prints one JSON line:
the seconds of the generation, beside two limits. The longest trajectory's tools take so long
whatever a sampler does; the slowest tool of each turn, summed, is what a sampler takes that lets
all rows take their turns together.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from support.tiny_models import tiny_tokenizer, write_tiny_llama
from transformers import AutoModelForCausalLM

from rolemesh.engine.data.prompts import Prompt
from rolemesh.engine.rollout.episodes.episodes import EpisodeRunner
from rolemesh.engine.rollout.factory import make_backend
from rolemesh.engine.rollout.sampling import sample_experience
from rolemesh.engine.specs import HfSpec, PythonEnvironmentSpec, SamplingSpec, VllmSpec

SHORTEST_S, LONGEST_S = 0.2, 5.0
TOOL = """
import json, time
from rolemesh.engine.environments.base import Environment, Observation

class Tool(Environment):
    def reset(self, row):
        self._seconds = json.loads(row.metadata)["seconds"]

    def step(self, completion_text):
        time.sleep(self._seconds.pop(0))
        return Observation(text=" said", reward=1.0, done=not self._seconds)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollout", choices=["vllm", "hf"], default="vllm")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    arguments = parser.parse_args()
    draw = random.Random(1)
    seconds = [
        [draw.uniform(SHORTEST_S, LONGEST_S) for _ in range(arguments.turns)]
        for _ in range(arguments.rows)
    ]
    tokenizer = tiny_tokenizer()
    prompts = [
        Prompt(
            prompt_id=row,
            text="Say",
            tokens=tokenizer("Say")["input_ids"],
            answer="",
            metadata=json.dumps({"seconds": own}),
        )
        for row, own in enumerate(seconds)
    ]
    spec: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 64}
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_llama(Path(folder) / "model")
        (Path(folder) / "tool.py").write_text(TOOL)
        kind = VllmSpec if arguments.rollout == "vllm" else HfSpec
        backend = make_backend(kind(**spec), model)
        weights = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        backend.update_weights(weights.named_parameters(), 1)
        environment = PythonEnvironmentSpec(
            environment=f"{folder}/tool.py:Tool", max_turns=arguments.turns, max_turn_tokens=8
        )
        started = time.monotonic()
        batch = sample_experience(
            backend,
            prompts,
            SamplingSpec(max_new_tokens=64),
            run_seed=1,
            step=1,
            tokenizer=tokenizer,
            progress=lambda *_: None,
            episodes=EpisodeRunner(environment, tokenizer, 128),
        )
        taken = time.monotonic() - started
        backend.close()
    longest = max(map(sum, seconds))
    result = {
        "benchmark": "slow_tools",
        "config": vars(arguments),
        "seconds": round(taken, 2),
        "longest_trajectory_s": round(longest, 2),
        "slowest_turns_s": round(sum(map(max, zip(*seconds, strict=True))), 2),
        "over_longest_trajectory": round(taken / longest, 3),
        "turns": batch["environment_rewards"].values.sum().item(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
