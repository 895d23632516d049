"""Memory of a rank that trains a public model, without a GPU: a JSON line for each case.

    PYTHONPATH=tests python tests/benchmarks/fit_tables.py [--model 7B] [--tokens 4096]

The real trainer makes two passes and an optimizer step on tensors without values
(`engine/fit/rank_memory.py`); the sampler is arithmetic. Takes 2 to 10 minutes a case.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from support.public_models import CONFIGS, config_folder

from rolemesh.engine.fit.rank_memory import RankWork, estimated
from rolemesh.engine.fit.sampler import sampler_memory
from rolemesh.engine.layout.families import DecoderShape
from rolemesh.engine.layout.ranks import HybridLayout, TrainLayout
from rolemesh.engine.specs import ModelSpec, OptimizerSpec, PpoPolicyLossSpec, VllmSpec

CASES = {
    "7B": ("Qwen2.5-7B-Instruct", TrainLayout(dp=8, fsdp=8), 1),
    "32B": ("Qwen2.5-32B-Instruct", TrainLayout(dp=16, fsdp=16), 4),
    "70B": ("Meta-Llama-3-70B-Instruct", TrainLayout(tp=8, dp=8, fsdp=8), 8),
}
"""By size: the model, the ranks that train it, and slices of its sampler."""

TOKENS = (4096, 32768)


def main() -> None:
    """Estimates the cases that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=CASES, action="append")
    parser.add_argument("--tokens", type=int, choices=TOKENS, action="append")
    arguments = parser.parse_args()
    for size in arguments.model or CASES:
        for tokens in arguments.tokens or TOKENS:
            print(json.dumps(case(size, tokens)), flush=True)


def case(size: str, tokens: int) -> dict[str, object]:
    """One model with rows of so many tokens, one row in a pass."""
    name, layout, slices = CASES[size]
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        found = estimated(
            RankWork(
                kind="policy",
                model=ModelSpec(
                    path=config_folder(Path(directory), name),
                    recompute="full",
                    micro_batch_tokens=tokens,
                ),
                layout=HybridLayout(layout),
                optimizer=OptimizerSpec(),
                loss=PpoPolicyLossSpec(),
                row_tokens=tokens,
                prompt_tokens=tokens // 4,
            )
        )
    sampler = sampler_memory(
        DecoderShape.from_config(CONFIGS[name]), VllmSpec(max_model_len=tokens), slices
    )
    gib = 2**30
    return {
        "benchmark": "fit_tables",
        "model": name,
        "ranks": layout.world_size,
        "layout": layout.flag(),
        "tokens": tokens,
        "rest_gib": round(found.rest / gib, 2),
        "peak_gib": round(found.peak / gib, 2),
        "peak_phase": found.peak_phase,
        **{f"{purpose}_gib": round(held / gib, 2) for purpose, held in found.at_peak.items()},
        "sampler_least_gib": round(sampler.least / gib, 2),
        "took_s": round(time.monotonic() - begun, 1),
    }


if __name__ == "__main__":
    main()
