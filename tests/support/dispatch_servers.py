"""Servers in a process of their own for the benchmark of dispatch.

    python tests/support/dispatch_servers.py lean|real ARGUMENT...

    lean CALL_S NUMBER     NUMBER + 1 servers that answer after CALL_S seconds on average; the first
                           one is bare grpc.aio, the others have what a service has
    real ROWS TOKENS       a service whose answers are so many rows of so many tokens

Prints the ports as one JSON list, then serves until its input closes. Services import torch, which
the benchmark's own process must not: it stands for the coordinator. Hence the imports inside.
"""

from __future__ import annotations

import asyncio
import json
import sys
import zlib
from collections.abc import AsyncIterator
from typing import Any

import grpc

from rolemesh.rpc.channel import SERVER_OPTIONS
from rolemesh.v1 import (
    experience_pb2,
    operation_pb2,
    value_pb2,
    value_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)


class LeanServicer(value_pb2_grpc.ValueServiceServicer, worker_pb2_grpc.WorkerServiceServicer):
    """Answers without computing anything, after a random time."""

    def __init__(self, call_s: float) -> None:
        self._call_s = call_s

    async def GetStatus(self, request: Any, context: Any) -> worker_pb2.GetStatusResponse:
        return worker_pb2.GetStatusResponse(run_id="run", policy_version=3)

    async def ComputeValues(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async for message in answers(request, self._call_s):
            yield message


async def answers(request: Any, mean_s: float) -> AsyncIterator[Any]:
    """What a service says to one call: a sign of life, and the result after a random time."""
    key = request.key
    yield value_pb2.ComputeValuesResponse(progress=operation_pb2.Progress(stage="compute"))
    # Cheap: where services are simulated, this runs in the process that is measured.
    share = zlib.crc32(f"{key.operation}/{key.sequence}".encode()) / 2**32
    await asyncio.sleep(mean_s * (0.5 + share))
    shard = experience_pb2.Shard(experience_id=key.operation, num_rows=1, address="127.0.0.1:1")
    group = experience_pb2.ColumnGroup(
        columns=[experience_pb2.ColumnSchema(name="values")], shards=[shard]
    )
    reference = experience_pb2.ExperienceRef(run_id="run", num_rows=1, groups=[group])
    yield value_pb2.ComputeValuesResponse(
        result=experience_pb2.ExperienceResult(experience=reference)
    )


async def serve_lean(call_s: float, number: int) -> None:
    """Many servers on one loop."""
    from rolemesh.services.runtime.server.interceptor import ServiceInterceptor
    from rolemesh.services.runtime.server.metrics import ServiceMetrics

    interceptor = ServiceInterceptor("toy", 0, ServiceMetrics("toy", 0))
    servers, ports = [grpc.aio.server()], []
    for _ in range(number):
        servers.append(grpc.aio.server(interceptors=[interceptor], options=SERVER_OPTIONS))
    for server in servers:
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(LeanServicer(call_s), server)
        value_pb2_grpc.add_ValueServiceServicer_to_server(LeanServicer(call_s), server)
        ports.append(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
    print(json.dumps(ports), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for server in servers:
        await server.stop(0)


async def serve_real(num_rows: int, tokens_a_row: int) -> None:
    """One service with the real runtime and experience store."""
    import torch

    from rolemesh.engine.experience import Column, ColumnKind, Experience
    from rolemesh.engine.specs import RoleSpec
    from rolemesh.services.runtime.calls.role import InitializeResult, Role
    from rolemesh.services.runtime.server.config import ServiceConfig
    from rolemesh.services.runtime.service_server import ServiceServer

    class ToyRole(Role):
        name = "toy"
        spec_class = RoleSpec

        def initialize(self, *_: Any) -> InitializeResult:
            return InitializeResult(policy_version=0, num_parameters=0, facts={})

        def register(self, server: grpc.aio.Server, runtime: Any) -> list[str]:
            class Values(value_pb2_grpc.ValueServiceServicer):
                def ComputeValues(self, request: Any, context: Any) -> AsyncIterator[Any]:
                    async def work(call: Any) -> experience_pb2.ExperienceResult:
                        rows = [torch.zeros(tokens_a_row, dtype=torch.int64)] * num_rows
                        made = Experience(
                            {"tokens": Column.ragged(ColumnKind.SEQUENCE, rows, torch.int64)}
                        )
                        return experience_pb2.ExperienceResult(
                            experience=runtime.publish(request.key, made),
                            report=call.report({}, made.num_tokens),
                        )

                    return runtime.keyed(request, value_pb2.ComputeValuesResponse, work)

            value_pb2_grpc.add_ValueServiceServicer_to_server(Values(), server)
            return ["rolemesh.v1.ValueService"]

        def policy_version(self) -> int:
            return 0

        def sleep(self) -> int:
            return 0

        def wake(self) -> int:
            return 0

        def close(self) -> None:
            pass

    server = ServiceServer(ToyRole(), ServiceConfig(role="toy"))
    port = int((await server.start()).rpartition(":")[2])
    print(json.dumps([port]), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(work_timeout_s=5.0)


def main() -> None:
    kind, *numbers = sys.argv[1:]
    if kind == "lean":
        asyncio.run(serve_lean(float(numbers[0]), int(numbers[1])))
    else:
        asyncio.run(serve_real(*map(int, numbers)))


if __name__ == "__main__":
    main()
