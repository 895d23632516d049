"""Measures what each further adapter costs a service whose base is held once.

    PYTHONPATH=tests python tests/benchmarks/shared_base.py [--runs 3] [--rollout vllm]

Starts an actor that may serve several runs, and initialises one run after another with the
quickstart's actor and an adapter of another seed each. Prints one JSON line: resident memory of the
process after each, and for how many seconds each loaded. The limit beside it is a second process,
which would take what the first run takes.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from google.protobuf import json_format, struct_pb2
from support.learning_runs import ServiceOfRole

from rolemesh.engine.hardware.devices import device_of
from rolemesh.rpc.channel import open_channel
from rolemesh.v1 import operation_pb2, worker_pb2, worker_pb2_grpc

RECIPE = Path("recipes/quickstart-lora.yaml")


async def load(address: str, spec: dict[str, Any], number: int) -> tuple[float, int]:
    """Initialises a run; seconds it took, and resident bytes of the service afterwards."""
    async with open_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        key = operation_pb2.OperationKey(
            run_id=f"run-{number}", fencing_epoch=1, operation="initialize"
        )
        started = time.monotonic()
        async for _ in stub.Initialize(
            worker_pb2.InitializeRequest(
                key=key, spec=json_format.ParseDict(spec, struct_pb2.Struct()), run_seed=number
            )
        ):
            pass
        seconds = time.monotonic() - started
        status = await stub.GetStatus(worker_pb2.GetStatusRequest(run_id=key.run_id))
        return seconds, status.resident_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rollout", choices=["vllm", "hf"], default="vllm")
    arguments = parser.parse_args()
    spec = yaml.safe_load(RECIPE.read_text())["actor"]
    spec["model"]["path"] = str(Path(spec["model"]["path"]).resolve())
    spec["rollout"]["type"] = arguments.rollout
    found = []
    with tempfile.TemporaryDirectory() as folder:
        service = ServiceOfRole("actor", Path(folder), "--runs", str(arguments.runs))
        try:
            address = str(service.announced()["address"])
            for number in range(1, arguments.runs + 1):
                spec["model"]["adapter"] = {"rank": 16, "seed": number}
                found.append(asyncio.run(load(address, spec, number)))
        finally:
            service.kill()
    resident = [num_bytes for _, num_bytes in found]
    result = {
        "benchmark": "shared_base",
        "config": {"runs": arguments.runs, "rollout": arguments.rollout},
        "mib_after_each_run": [num_bytes >> 20 for num_bytes in resident],
        "mib_of_each_further_run": [
            (after - before) >> 20 for before, after in itertools.pairwise(resident)
        ],
        "seconds_to_load": [round(seconds, 1) for seconds, _ in found],
        "bfloat16_products": device_of("cpu").multiplies_bfloat16,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
