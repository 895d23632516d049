"""Measures a training step of a mixture of experts beside that of its dense twin, in turns.

    python tests/benchmarks/experts_step.py [--experts 64] [--chosen 8] [--inner 128] [--hidden 512]
        [--layers 4] [--rows 16] [--row-tokens 256] [--compute-dtype float32] [--repetitions 5]

The twin is a Qwen3 whose MLP is as wide as the experts that a token goes through, so that both
multiply as much for each token; the mixture (Qwen3-MoE) has all experts to hold, and a router. A
step is forward and backward of a supervised loss over the rows, and AdamW's step over all
parameters. Both models are in one process and take turns. Prints one JSON line: seconds are
medians of `passes` and `optimizer`; `ratio` is mixture over twin, of each and of the whole.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.tiny_families import write_tiny_decoder

from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.hardware.devices import device_of
from rolemesh.engine.specs import ModelSpec, OptimizerSpec, SftLossSpec
from rolemesh.engine.train.plan import UpdatePlan
from rolemesh.engine.train.trainer import Trainer

VOCABULARY = 2048


def rows_of(options: argparse.Namespace) -> Experience:
    """Rows of random tokens, of which the first is the prompt."""
    generator = torch.Generator().manual_seed(1)
    number, length = options.rows, options.row_tokens
    tokens = torch.randint(3, VOCABULARY, (number, length), generator=generator)
    mask = torch.ones(number * (length - 1), dtype=torch.bool)
    offsets = torch.arange(number + 1) * (length - 1)
    return Experience(
        {
            "tokens": Column.ragged(ColumnKind.SEQUENCE, list(tokens), torch.int64),
            "prompt_lengths": Column(ColumnKind.ROW, torch.ones(number, dtype=torch.int64)),
            "loss_mask": Column(ColumnKind.COMPLETION, mask, offsets),
        }
    )


def trainer_of(folder: Path, options: argparse.Namespace, family: str, **sizes: Any) -> Trainer:
    """A model of random weights, trained whole."""
    write_tiny_decoder(
        folder,
        family,
        vocab_size=VOCABULARY,
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=options.hidden // 8,
        max_position_embeddings=4096,
        initializer_range=0.02,
        **sizes,
    )
    return Trainer.policy(
        ModelSpec(path=folder, compute_dtype=options.compute_dtype), OptimizerSpec()
    )


def timed(call: Callable[[], Any]) -> dict[str, float]:
    """Seconds by the clock and of processors."""
    begun, used = time.perf_counter(), time.process_time()
    call()
    return {"seconds": time.perf_counter() - begun, "cpu": time.process_time() - used}


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (
        *(("experts", 64), ("chosen", 8), ("inner", 128), ("hidden", 512), ("layers", 4)),
        *(("rows", 16), ("row-tokens", 256), ("repetitions", 5)),
        ("threads", os.cpu_count() or 1),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--compute-dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    batch = rows_of(options)
    lengths = batch["tokens"].lengths().tolist()
    found: dict[str, list[tuple[dict[str, float], dict[str, float]]]] = {"mixture": [], "twin": []}
    with tempfile.TemporaryDirectory() as name:
        sides = {
            "mixture": trainer_of(
                Path(name) / "mixture",
                options,
                "qwen3_moe",
                num_experts=options.experts,
                num_experts_per_tok=options.chosen,
                moe_intermediate_size=options.inner,
                norm_topk_prob=True,
            ),
            "twin": trainer_of(
                Path(name) / "twin",
                options,
                "qwen3",
                intermediate_size=options.inner * options.chosen,
            ),
        }
    for _ in range(options.repetitions + 1):
        for side, trainer in sides.items():
            plan = UpdatePlan.of_update(
                lengths, trainer.mesh.dp, epochs=1, mini_batch_rows=len(lengths), seed=1
            )
            passes = timed(lambda: trainer.forward_backward(batch, SftLossSpec(), plan))  # noqa: B023
            found[side].append((passes, timed(trainer.optim_step)))
    medians = {
        side: {
            part: {
                key: statistics.median(one[place][key] for one in told[1:])
                for key in ("seconds", "cpu")
            }
            for place, part in enumerate(("passes", "optimizer"))
        }
        for side, told in found.items()
    }
    for told in medians.values():
        told["step"] = {
            key: told["passes"][key] + told["optimizer"][key] for key in ("seconds", "cpu")
        }
    parameters = {
        side: sum(one.numel() for _, one in trainer.named_weights())
        for side, trainer in sides.items()
    }
    print(
        json.dumps(
            {
                "benchmark": "experts_step",
                "config": vars(options),
                "parameters": parameters,
                **{
                    side: {
                        part: {key: round(value, 3) for key, value in one.items()}
                        for part, one in told.items()
                    }
                    for side, told in medians.items()
                },
                "ratio": {
                    part: round(
                        medians["mixture"][part]["seconds"] / medians["twin"][part]["seconds"], 2
                    )
                    for part in ("passes", "optimizer", "step")
                },
                "versions": {"python": platform.python_version(), "torch": torch.__version__},
                "machine": {
                    "cores": os.cpu_count(),
                    "multiplies_bfloat16": device_of("cpu").multiplies_bfloat16,
                },
            }
        )
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
