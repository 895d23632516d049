"""A GRPO step with exact and with fast numerics, in turns: seconds of each phase.

    .venv/bin/python tests/benchmarks/numerics_step.py [--model FOLDER] [--steps 3] [--rounds 1]

The work of grpo_against_trl.py without the peer: a real run of the command line over real services,
12 prompts x 4 completions, one optimizer step. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from pathlib import Path

from grpo_against_trl import recipe
from peers.same_work import write_prompts
from peers.side_by_side import Record, phase_shares, ratio, rounded, run_ours, summary

SIDES = ("bfloat16", "fast")
"""What `run_ours` calls them: exact numerics with bfloat16 weights, and fast ones."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path(".models/SmolLM2-135M-Instruct"))
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--prompt-tokens", type=int, default=45)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each run")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--micro-batch-tokens", type=int, default=4096)
    options = parser.parse_args()
    options.model, options.kl, options.sampler = options.model.resolve(), 0.0, "vllm"
    steps: dict[str, list[Record]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as name:
        questions = Path(name) / "questions.jsonl"
        tokens = write_prompts(
            options.model,
            options.prompts,
            options.prompt_tokens,
            questions=questions,
            rendered=Path(name) / "prompts.jsonl",
        )
        options.max_model_len = -(-(max(tokens) + options.new_tokens + 1) // 64) * 64
        for number in range(options.rounds):
            for side in reversed(SIDES) if number % 2 else SIDES:
                steps[side] += run_ours(options, recipe, questions, side)["steps"]
    result = {
        "benchmark": "numerics_step",
        "config": {name: str(value) for name, value in vars(options).items()},
        "sides": {side: summary(made) for side, made in steps.items()},
        "phases": {side: phase_shares(made) for side, made in steps.items()},
        "fast_against_exact": ratio(steps["fast"], steps["bfloat16"]),
        "machine": {
            "cpus": os.cpu_count(),
            "arch": platform.machine(),
            "load_average": os.getloadavg(),
        },
    }
    print(json.dumps(rounded(result)))


if __name__ == "__main__":
    main()
