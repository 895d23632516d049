"""Time to find a mapping on one core, and its growth; one JSON line.

    PYTHONPATH=tests python tests/benchmarks/mapping_search.py [--gpus 8 64 128 1024]
        [--models 7B 70B] [--algorithms ppo safe_rlhf]

All models of a run have one size. `rolemesh`: layouts of this engine on H100; `paper`: those of
arXiv 2409.19256 on A100-80GB, whose search took up to half an hour. Seconds are CPU time of this
process, which has one thread; nothing is kept from one search for the next.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from typing import Any

from support.mapping_jobs import LLAMAS, job, paper_group

from rolemesh.coordinator.mapping.job.layouts import Freedom
from rolemesh.coordinator.mapping.job.systems import ROLEMESH_FAST
from rolemesh.coordinator.mapping.machines.cluster import group_of
from rolemesh.coordinator.mapping.machines.devices import device_of
from rolemesh.coordinator.mapping.search.search import Search


def measured(system: str, algorithm: str, model: str, gpus: int) -> dict[str, Any]:
    """One search."""
    if system == "paper":
        wanted, group = job(algorithm, model), paper_group(gpus)
    else:
        wanted = job(algorithm, model, system=ROLEMESH_FAST, freedom=Freedom())
        group = group_of(device_of("h100"), gpus)
    started = time.process_time()
    found = Search(wanted, [group]).run()
    seconds = time.process_time() - started
    return {
        "system": system,
        "algorithm": algorithm,
        "model": model,
        "gpus": gpus,
        "cpu_s": round(seconds, 2),
        "boxes": found.boxes,
        "plans": found.plans,
        "step_s": round(found.placements[0].period, 2) if found.placements else None,
        "pools": ["+".join(one) for one in found.placements[0].sets] if found.placements else [],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256, 512, 1024])
    parser.add_argument("--models", nargs="+", choices=LLAMAS, default=["7B", "70B"])
    parser.add_argument(
        "--algorithms", nargs="+", choices=("ppo", "remax", "safe_rlhf", "grpo"), default=["ppo"]
    )
    parser.add_argument("--systems", nargs="+", choices=("rolemesh", "paper"), default=["rolemesh"])
    arguments = parser.parse_args()
    searches = [
        measured(system, algorithm, model, gpus)
        for system in arguments.systems
        for algorithm in arguments.algorithms
        for model in arguments.models
        for gpus in arguments.gpus
    ]
    result = {
        "benchmark": "mapping_search",
        "searches": searches,
        "versions": {"python": platform.python_version()},
        "machine": {
            "cpus": os.cpu_count(),
            "arch": platform.machine(),
            "load": round(os.getloadavg()[0], 1),
        },
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
