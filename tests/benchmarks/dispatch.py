"""What our channel and interceptor add to a unary call: latency over loopback, p50 and p99.

    python tests/benchmarks/dispatch.py [--calls 300] [--repetitions 7]

One process serves WorkerService.GetStatus twice, this one calls it, one call after another:
    bare  grpc.aio on both ends, no interceptor, no deadline
    ours  MeshChannel and ServiceServer: deadline, request id, traffic, metrics, error catalogue
Both servicers return the same message without looking anything up. Blocks of calls are
interleaved, so that a slow moment of the machine meets both. Prints one JSON line; the percentiles
are over all calls, the spread is over the blocks' own percentiles.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from rolemesh.rpc.channel import SERVER_OPTIONS, open_channel
from rolemesh.services.runtime.interceptor import ServiceInterceptor
from rolemesh.services.runtime.metrics import ServiceMetrics
from rolemesh.v1 import worker_pb2, worker_pb2_grpc

WARMUP_CALLS = 100


class Status(worker_pb2_grpc.WorkerServiceServicer):
    async def GetStatus(
        self, request: worker_pb2.GetStatusRequest, context: Any
    ) -> worker_pb2.GetStatusResponse:
        return worker_pb2.GetStatusResponse(run_id="run", policy_version=3)


async def serve() -> None:
    """The server's process: one line with the addresses, then serves until its input closes."""
    interceptor = ServiceInterceptor("toy", 0, ServiceMetrics("toy", 0))
    bare = grpc.aio.server()
    ours = grpc.aio.server(interceptors=[interceptor], options=SERVER_OPTIONS)
    ports = []
    for server in (bare, ours):
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(Status(), server)
        ports.append(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
    print(json.dumps(ports), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for server in (bare, ours):
        await server.stop(0)


@contextmanager
def server_ports() -> Iterator[list[int]]:
    """The server's process, for as long as the block lasts."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        yield json.loads(process.stdout.readline())
    finally:
        process.stdin.close()
        process.wait(30)


async def block(stub: Any, calls: int) -> list[float]:
    """Milliseconds of each call."""
    request = worker_pb2.GetStatusRequest()
    taken = []
    for _ in range(calls):
        started = time.perf_counter()
        await stub.GetStatus(request)
        taken.append((time.perf_counter() - started) * 1e3)
    return taken


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def measure(ports: list[int], calls: int, repetitions: int) -> dict[str, Any]:
    blocks: dict[str, list[list[float]]] = {"bare": [], "ours": []}
    bare, ours = (f"127.0.0.1:{port}" for port in ports)
    async with grpc.aio.insecure_channel(bare) as plain, open_channel(ours) as mesh:
        by_name = {
            "bare": worker_pb2_grpc.WorkerServiceStub(plain),
            "ours": worker_pb2_grpc.WorkerServiceStub(mesh),
        }
        for stub in by_name.values():
            await block(stub, WARMUP_CALLS)
        for _ in range(repetitions):
            for name, stub in by_name.items():
                blocks[name].append(await block(stub, calls))
    latency = {}
    for name, measured in blocks.items():
        everything = [value for one in measured for value in one]
        medians = [statistics.median(one) for one in measured]
        latency[name] = {
            "p50": round(percentile(everything, 0.50), 3),
            "p99": round(percentile(everything, 0.99), 3),
            "p50_min": round(min(medians), 3),
            "p50_max": round(max(medians), 3),
        }
    return {
        "benchmark": "dispatch",
        "config": {"calls": calls, "repetitions": repetitions},
        "latency_ms": latency,
        "ratio": {
            key: round(latency["ours"][key] / latency["bare"][key], 2) for key in ("p50", "p99")
        },
        "versions": {"python": platform.python_version(), "grpcio": grpc.__version__},
        "machine": {"cpus": os.cpu_count(), "arch": platform.machine()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve())
        return
    with server_ports() as ports:
        print(json.dumps(asyncio.run(measure(ports, arguments.calls, arguments.repetitions))))


if __name__ == "__main__":
    main()
