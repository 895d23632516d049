"""Bytes that a rank receives when training weights become generation weights: planner only.

    python tests/benchmarks/reshard_bytes.py [--ranks 128] [--models 7B 13B 34B 70B]

Llama models in bfloat16 in the settings of arXiv 2409.19256, Fig. 14. No weight is made; plans are
made for all ranks and their bytes counted:
    hybridflow    interval grouping, our plan (mean and largest over ranks); beside it Table 2's
                  (d_g - 1) / (tp) M
    consecutive   grouping of neighbours, our plan: it too sends only what is missing
    hybridflow_v  what that baseline gathers over the training TP x PP group: (tp - 1) / (tp) M
    full_gather   what DS-Chat gathers over all ranks: (tpd - 1) / (tpd) M
M is the bytes of all parameters, counted, not the nominal size. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.planned_bytes import planned_received

from rolemesh.engine.layout.boxes import generate_layout, train_layout
from rolemesh.engine.layout.families import DecoderShape
from rolemesh.engine.layout.ranks import GenerateLayout, HybridLayout, TrainLayout
from rolemesh.engine.weights.plan import Plan, make_plan

SETTINGS = {
    "7B": ((4096, 11008, 32, 32, 32), (1, 8), (1, 2)),
    "13B": ((5120, 13824, 40, 40, 40), (1, 8), (1, 4)),
    "34B": ((8192, 22016, 48, 64, 8), (4, 8), (1, 8)),
    "70B": ((8192, 28672, 80, 64, 8), (8, 8), (1, 8)),
}
"""Model: (hidden, inner, layers, heads, key-value heads), (p, t), (p_g, t_g)."""


def decoder(hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> DecoderShape:
    return DecoderShape.from_config(
        {
            "model_type": "llama",
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "vocab_size": 32_000,
        }
    )


def planned(shape: DecoderShape, layout: HybridLayout) -> Plan:
    return make_plan(
        train_layout(shape, layout.train, "bfloat16"), generate_layout(shape, layout, "bfloat16")
    )


def received_gb(plan: Plan) -> dict[str, float]:
    """Mean and largest over ranks, in 1e9 bytes."""
    received = [planned_received(plan, rank) / 1e9 for rank in range(plan.world_size)]
    return {"mean": round(statistics.mean(received), 3), "max": round(max(received), 3)}


def measure(model: str, ranks: int) -> dict[str, Any]:
    sizes, (p, t), (p_g, t_g) = SETTINGS[model]
    shape = decoder(*sizes)
    layout = HybridLayout(
        TrainLayout(pp=p, tp=t, dp=ranks // (p * t)), GenerateLayout(pp=p_g, tp=t_g)
    )
    total = sum(entry.num_bytes for entry in shape.manifest("bfloat16").values()) / 1e9
    started = time.process_time()
    plan = planned(shape, layout)
    seconds = time.process_time() - started
    neighbours = replace(layout, generate=replace(layout.generate, grouping="consecutive"))
    return {
        "model_gb": round(total, 3),
        "train": f"{p}-{t}-{layout.train.dp}",
        "generate": f"{p_g}-{t_g}-{layout.micro_dp}-{layout.train.dp}",
        "hybridflow_gb": received_gb(plan),
        "table_2_gb": round((layout.micro_dp - 1) / (t * p) * total, 3),
        "consecutive_gb": received_gb(planned(shape, neighbours)),
        "hybridflow_v_gb": round((t * p - 1) / (t * p) * total, 3),
        "full_gather_gb": round((ranks - 1) / ranks * total, 3),
        "rounds": len(plan.buckets),
        "plan_cpu_s": round(seconds, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=128)
    parser.add_argument("--models", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    arguments = parser.parse_args()
    for model in arguments.models:
        p, t = SETTINGS[model][1]
        if arguments.ranks % (p * t):
            parser.error(f"--ranks {arguments.ranks}: {model} takes a multiple of {p * t}")
    result = {
        "benchmark": "reshard_bytes",
        "config": {"ranks": arguments.ranks, "dtype": "bfloat16", "vocab_size": 32_000},
        "models": {model: measure(model, arguments.ranks) for model in arguments.models},
        "versions": {"python": platform.python_version()},
        "machine": {"cpus": os.cpu_count(), "arch": platform.machine()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
