"""Memory of a rank that trains a public model, without a GPU: a JSON line for each case.

    PYTHONPATH=tests python tests/benchmarks/fit_tables.py [--model 7B] [--tokens 4096]
        [--of-layers 4 8] [--tp 4] [--model-options '{"sequence_parallel": true}']
        [--numerics fast]

The real trainer makes two passes and an optimizer step on tensors without values
(`engine/fit/rank_memory.py`); the sampler is arithmetic. Takes 2 to 10 minutes a case. With
--of-layers it makes models of so many layers, and draws the line through both to all layers: every
layer adds the same. --tp makes slices of the case's ranks, and FSDP cuts over the others;
--model-options are further keys of the model's spec.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from support.public_models import CONFIGS, config_folder

from rolemesh.engine.fit.rank_memory import RankMemory, RankWork, estimated
from rolemesh.engine.fit.sampler import sampler_memory
from rolemesh.engine.layout.families import DecoderShape
from rolemesh.engine.layout.ranks import HybridLayout, TrainLayout
from rolemesh.engine.specs import ModelSpec, Numerics, OptimizerSpec, PpoPolicyLossSpec, VllmSpec

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
    parser.add_argument("--of-layers", type=int, nargs=2)
    parser.add_argument("--tp", type=int)
    parser.add_argument("--model-options", type=json.loads, default={})
    parser.add_argument("--numerics", choices=get_args(Numerics), default="exact")
    arguments = parser.parse_args()
    for size in arguments.model or CASES:
        for tokens in arguments.tokens or TOKENS:
            way = Way(size, tokens, arguments.tp, arguments.model_options, arguments.numerics)
            print(json.dumps(case(way, arguments.of_layers)), flush=True)


@dataclass(frozen=True)
class Way:
    """What is trained, and how."""

    size: str
    """A key of CASES."""
    tokens: int
    """Of a row."""
    tp: int | None
    """Slices; None: as the case says."""
    model_options: dict[str, Any]
    numerics: Numerics

    @property
    def layout(self) -> TrainLayout:
        """Of the case, or of its ranks in so many slices."""
        layout = CASES[self.size][1]
        if self.tp is None:
            return layout
        dp = layout.world_size // self.tp
        return TrainLayout(tp=self.tp, dp=dp, fsdp=dp)


def memory(way: Way, num_layers: int) -> RankMemory:
    """A model of so many layers, one row in a pass."""
    name, tokens = CASES[way.size][0], way.tokens
    with tempfile.TemporaryDirectory() as directory:
        return estimated(
            RankWork(
                kind="policy",
                model=ModelSpec.model_validate(
                    {
                        "path": config_folder(Path(directory), name, num_hidden_layers=num_layers),
                        "recompute": "full",
                        "micro_batch_tokens": tokens,
                        **way.model_options,
                    }
                ),
                numerics=way.numerics,
                layout=HybridLayout(way.layout),
                optimizer=OptimizerSpec(),
                loss=PpoPolicyLossSpec(),
                row_tokens=tokens,
                prompt_tokens=tokens // 4,
            )
        )


def line(fewer: int, more: int, layers: tuple[int, int], wanted: int) -> int:
    """What a straight line through two numbers of layers gives for a third."""
    return round(fewer + (more - fewer) * (wanted - layers[0]) / (layers[1] - layers[0]))


def case(way: Way, of_layers: list[int] | None) -> dict[str, object]:
    """One model with rows of so many tokens."""
    name, _, slices = CASES[way.size]
    layout, tokens = way.layout, way.tokens
    num_layers = CONFIGS[name]["num_hidden_layers"]
    begun = time.monotonic()
    if of_layers is None:
        found = memory(way, num_layers)
    else:
        fewer, more = (memory(way, number) for number in of_layers)
        ends = (of_layers[0], of_layers[1])
        found = RankMemory(
            at_rest={
                purpose: line(held, more.at_rest[purpose], ends, num_layers)
                for purpose, held in fewer.at_rest.items()
            },
            at_peak={
                purpose: line(held, more.at_peak[purpose], ends, num_layers)
                for purpose, held in fewer.at_peak.items()
            },
            peak_phase=more.peak_phase,
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
        "numerics": way.numerics,
        "model_options": way.model_options,
        "of_layers": of_layers or num_layers,
        "rest_gib": round(found.rest / gib, 2),
        "peak_gib": round(found.peak / gib, 2),
        "peak_phase": found.peak_phase,
        **{f"{purpose}_gib": round(held / gib, 2) for purpose, held in found.at_peak.items()},
        "sampler_least_gib": round(sampler.least / gib, 2),
        "took_s": round(time.monotonic() - begun, 1),
    }


if __name__ == "__main__":
    main()
