"""Measures what the coordinator adds to a call, and what grows with calls, tokens and services.

    python tests/benchmarks/dispatch.py [--only latency|load|at_once|traffic] [--rounds 3]

latency  one call after another over loopback, to one process that serves it twice. bare: grpc.aio
         on both ends; ours: MeshChannel and ServiceServer's interceptor (deadline, request id,
         traffic, metrics, error catalogue). Blocks are interleaved.
load     milliseconds from ready (the call whose columns a node reads has been recorded) to sent
         (gRPC asks for the request's bytes), of nodes of the real StepGraph, Journal and embedded
         store. A root call, which all services' first calls read, then a chain of calls for each
         service, each of a random time. at_once: those first calls, all ready in one instant;
         one_by_one: the others. 64 services: gRPC servers with ports of their own in one process.
         1,000 services: simulated inside this process by timers, without sockets, after a Python
         serialization of the request. Beside it the processor's
         time of this thread since the root call was answered, which other programs on the machine
         do not lengthen.
at_once  that of the 1,000 alone, with one call each.
traffic  bytes that the coordinator sends and receives a step, and its memory after the steps, over
         a real service (its runtime and experience store) in a process of its own, at 1, 10 and
         100 times the tokens with equal calls, and at 10 times the calls with equal tokens.

Prints one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import psutil

from rolemesh.coordinator.dataflow.calls.connection import RoleConnection
from rolemesh.coordinator.dataflow.calls.role_calls import ServiceNodes, StepContext
from rolemesh.coordinator.dataflow.futures import ExperienceFuture, NodeKind
from rolemesh.coordinator.dataflow.graph import StepGraph
from rolemesh.coordinator.dataflow.journal import Journal
from rolemesh.coordinator.dataflow.loop.collector import collect_seldom
from rolemesh.coordinator.dataflow.pools import Pools
from rolemesh.coordinator.recipe.roles.placement import PoolSpec
from rolemesh.coordinator.state.redis import RedisStateStore
from rolemesh.coordinator.state.server.embedded import EmbeddedValkey
from rolemesh.rpc.calls.result_call import ResultCall
from rolemesh.rpc.channel import ChannelTraffic, open_channel
from rolemesh.v1 import value_pb2, worker_pb2, worker_pb2_grpc

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import dispatch_servers

METHOD = "/rolemesh.v1.ValueService/ComputeValues"
WARMUP_CALLS = 100
LATENCY_CALLS, LATENCY_BLOCKS = 300, 7
NUM_SERVICES, CALLS_A_SERVICE, CALL_S = 64, 20, 0.5
NUM_SIMULATED, CALLS_A_SIMULATED, SIMULATED_CALL_S = 1_000, 5, 4.0
"""Real calls take seconds to minutes: these ask more of the coordinator than they would."""
NUM_ROWS, TOKENS_A_ROW, CALLS_A_STEP, NUM_STEPS = 64, 20, 8, 20
MIB = 1 << 20


# --- the other process ------------------------------------------------------------------------


@contextmanager
def addresses(*arguments: object) -> Iterator[list[str]]:
    """A server's process, for as long as the block lasts, and its addresses."""
    process = subprocess.Popen(
        [sys.executable, dispatch_servers.__file__, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        yield [f"127.0.0.1:{port}" for port in json.loads(process.stdout.readline())]
    finally:
        process.stdin.close()
        process.wait(30)


# --- one call after another -------------------------------------------------------------------


async def block(stub: Any, calls: int) -> list[float]:
    """Milliseconds of each call."""
    request = worker_pb2.GetStatusRequest()
    taken = []
    for _ in range(calls):
        started = time.perf_counter()
        await stub.GetStatus(request)
        taken.append((time.perf_counter() - started) * 1e3)
    return taken


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def latency(bare: str, ours: str) -> dict[str, Any]:
    blocks: dict[str, list[list[float]]] = {"bare": [], "ours": []}
    async with grpc.aio.insecure_channel(bare) as plain, open_channel(ours) as mesh:
        by_name = {
            "bare": worker_pb2_grpc.WorkerServiceStub(plain),
            "ours": worker_pb2_grpc.WorkerServiceStub(mesh),
        }
        for stub in by_name.values():
            await block(stub, WARMUP_CALLS)
        for _ in range(LATENCY_BLOCKS):
            for name, stub in by_name.items():
                blocks[name].append(await block(stub, LATENCY_CALLS))
    found: dict[str, Any] = {}
    for name, measured in blocks.items():
        everything = [value for one in measured for value in one]
        medians = [statistics.median(one) for one in measured]
        found[name] = {
            "p50": percentile(everything, 0.50),
            "p99": percentile(everything, 0.99),
            "p50_min": min(medians),
            "p50_max": max(medians),
        }
    ratio = {key: found["ours"][key] / found["bare"][key] for key in ("p50", "p99")}
    return {"latency_ms": found, "ratio": ratio}


# --- many services ----------------------------------------------------------------------------


@asynccontextmanager
async def journal() -> AsyncIterator[Journal]:
    """A journal in an embedded store, as a run has it."""
    with tempfile.TemporaryDirectory() as folder:
        async with EmbeddedValkey(Path(folder)) as server:
            store = RedisStateStore(server.url)
            yield Journal(store, "run", await store.next_epoch("run"))
            await store.close()


class Sent(NamedTuple):
    """When a call was sent, in seconds."""

    wall: float
    """On the clock time.monotonic()."""
    cpu: float
    """Processor's time of this thread."""

    @classmethod
    def now(cls) -> Sent:
        return cls(time.monotonic(), time.thread_time())


async def load(
    names: Sequence[str],
    journal: Journal,
    step: int,
    num_calls: int,
    stream: Callable[[str, value_pb2.ComputeValuesRequest], AsyncIterator[Any]],
    sent: Mapping[tuple[str, int], Sent],
) -> dict[str, list[float]]:
    """Milliseconds from ready to sent, of all nodes of one step.

    Args:
        names: Services.
        journal: Of the run.
        step: Number of the step.
        num_calls: Calls that each service gets after each other.
        stream: Makes a call.
        sent: By operation and sequence, when the call was sent; filled by `stream`.
    """
    traffic = ChannelTraffic()
    shared = RoleConnection("service", "127.0.0.1:1", traffic)
    dataflow = StepGraph(step, Pools({name: PoolSpec(roles=(name,)) for name in names}))
    offset = time.time() - time.monotonic()
    answered: list[float] = []
    """Processor's time at which each call came to its end, the root call's first."""
    context = StepContext(
        step=step,
        algorithm=None,  # type: ignore[arg-type]
        dataflow=dataflow,
        journal=journal,
        connections=dict.fromkeys(names, shared),
        sampler=None,  # type: ignore[arg-type]
        on_phase=lambda *_: None,
    )

    def node(name: str, reads: Any) -> Any:
        calls = ServiceNodes(context, name)

        async def call(_: Any, key: Any, reference: Any, on_progress: Any) -> Any:
            request = value_pb2.ComputeValuesRequest(key=key, experience=reference)
            result = await ResultCall[Any](stream(name, request), name).result(on_progress)
            answered.append(time.thread_time())
            return result

        part = calls.node(NodeKind.INFER, "compute_values", call, reads, ("values",))
        return ExperienceFuture(dataflow, (part,))

    async with dataflow:
        root = node(names[0], None)
        for name in names:
            last = root
            for _ in range(num_calls):
                last = node(name, last)
    await shared.close()
    found: dict[str, list[float]] = {"at_once": [], "at_once_cpu": [], "one_by_one": []}
    for made in dataflow.nodes[1:]:
        (read,) = made.inputs
        ready = (dataflow.nodes[read].ended_at or 0.0) - offset
        at = sent[made.name, made.sequence]
        found["one_by_one" if read else "at_once"].append((at.wall - ready) * 1e3)
        if not read:
            found["at_once_cpu"].append((at.cpu - answered[0]) * 1e3)
    return found


def told(rounds: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, Any]:
    """Percentiles over all rounds, and the spread of the rounds' own p99."""
    found = {}
    for name in ("at_once", "at_once_cpu", "one_by_one"):
        if not rounds[0][name]:
            continue
        everything = [value for one in rounds for value in one[name]]
        p99s = [percentile(one[name], 0.99) for one in rounds]
        found[name] = {
            "calls": len(everything),
            "p50": percentile(everything, 0.50),
            "p99": percentile(everything, 0.99),
            "p99_by_round": p99s,
        }
    return found


async def load_of_services(targets: Sequence[str], rounds: int) -> dict[str, Any]:
    sent: dict[tuple[str, int], Sent] = {}

    def serialized(request: value_pb2.ComputeValuesRequest) -> bytes:
        sent[request.key.operation, request.key.sequence] = Sent.now()
        return request.SerializeToString()

    names = [f"service-{number}" for number in range(len(targets))]
    channels = [open_channel(target) for target in targets]
    methods = {
        name: channel.unary_stream(
            METHOD,
            request_serializer=serialized,
            response_deserializer=value_pb2.ComputeValuesResponse.FromString,
        )
        for name, channel in zip(names, channels, strict=True)
    }
    for channel in channels:
        await channel.channel_ready()
    async with journal() as record:
        # The first step makes what lasts: connections, caches.
        await load(names, record, 0, 1, lambda n, r: aiter(methods[n](r)), sent)
        found = [
            await load(
                names, record, step, CALLS_A_SERVICE, lambda n, r: aiter(methods[n](r)), sent
            )
            for step in range(1, rounds + 1)
        ]
    for channel in channels:
        await channel.close()
    return told(found)


async def load_of_simulated(rounds: int, calls: int) -> dict[str, Any]:
    sent: dict[tuple[str, int], Sent] = {}

    async def stream(_: str, request: value_pb2.ComputeValuesRequest) -> AsyncIterator[Any]:
        sent[request.key.operation, request.key.sequence] = Sent.now()
        request.SerializeToString()
        async for message in dispatch_servers.answers(request, SIMULATED_CALL_S):
            yield message

    names = [f"service-{number}" for number in range(NUM_SIMULATED)]
    async with journal() as record:
        found = [await load(names, record, step, calls, stream, sent) for step in range(rounds + 1)]
    # The first step makes what lasts.
    return told(found[1:])


# --- bytes and memory -------------------------------------------------------------------------


async def traffic(address: str, calls_a_step: int) -> dict[str, Any]:
    """Bytes a step, and this process's memory after the steps."""
    counted = ChannelTraffic()
    connection = RoleConnection("toy", address, counted)
    await connection.wait_healthy(60)
    pools, process = Pools({"main": PoolSpec(roles=("toy",))}), psutil.Process()
    async with journal() as record:
        await connection.client.initialize(record.next_key(0, "toy.initialize"), {}, 0)
        gc.collect()
        before, memory = counted.total, process.memory_info().rss
        tokens = 0
        for step in range(1, NUM_STEPS + 1):
            dataflow = StepGraph(step, pools)
            context = StepContext(
                step=step,
                algorithm=None,  # type: ignore[arg-type]
                dataflow=dataflow,
                journal=record,
                connections={"toy": connection},
                sampler=None,  # type: ignore[arg-type]
                on_phase=lambda *_: None,
            )
            calls = ServiceNodes(context, "toy")

            async def call(client: Any, key: Any, reference: Any, on_progress: Any) -> Any:
                return await client.compute_values(key, reference).result(on_progress)

            async with dataflow:
                last = None
                for _ in range(calls_a_step):
                    part = calls.node(NodeKind.INFER, "compute_values", call, last, ("tokens",))
                    last = ExperienceFuture(dataflow, (part,))
            tokens = sum(made.num_tokens for made in dataflow.nodes)
            await connection.client.release("run", record.epoch, through_step=step)
        gc.collect()
        now = counted.total
        grown = process.memory_info().rss - memory
    await connection.close()
    return {
        "calls_a_step": (now.calls - before.calls) / NUM_STEPS,
        "tokens_a_step": tokens,
        "sent_bytes_a_step": (now.sent_bytes - before.sent_bytes) / NUM_STEPS,
        "received_bytes_a_step": (now.received_bytes - before.received_bytes) / NUM_STEPS,
        "rss_mib": process.memory_info().rss / MIB,
        "rss_growth_mib": grown / MIB,
    }


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner) for inner in value]
    return round(value, 3) if isinstance(value, float) else value


def measure(only: str | None, rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    # As a run does.
    collect_seldom()
    if only in (None, "traffic"):
        # First: the process is small then, and what it takes on is seen. The first of all brings
        # what is loaded once, and is not told.
        found["traffic"] = []
        for number, (tokens, calls) in enumerate(((1, 1), (1, 1), (10, 1), (100, 1), (1, 10))):
            with addresses("real", NUM_ROWS, TOKENS_A_ROW * tokens) as (address,):
                one = asyncio.run(traffic(address, CALLS_A_STEP * calls))
            if number:
                found["traffic"].append({"tokens": f"{tokens}x", "calls": f"{calls}x", **one})
    simulated = f"{NUM_SIMULATED} simulated services"
    if only == "at_once":
        return {"ready_to_sent_ms": {simulated: asyncio.run(load_of_simulated(rounds, 1))}}
    with addresses("lean", CALL_S, NUM_SERVICES) as targets:
        if only in (None, "latency"):
            found |= asyncio.run(latency(*targets[:2]))
        if only in (None, "load"):
            found["ready_to_sent_ms"] = {
                f"{NUM_SERVICES} services": asyncio.run(load_of_services(targets[1:], rounds))
            }
    if only in (None, "load"):
        found["ready_to_sent_ms"][simulated] = asyncio.run(
            load_of_simulated(rounds, CALLS_A_SIMULATED)
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("latency", "load", "at_once", "traffic"))
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    load_before = os.getloadavg()[0]
    result = {
        "benchmark": "dispatch",
        "config": {"only": arguments.only, "rounds": arguments.rounds},
        **measure(arguments.only, arguments.rounds),
        "versions": {"python": platform.python_version(), "grpcio": grpc.__version__},
        "machine": {
            "cpus": os.cpu_count(),
            "arch": platform.machine(),
            "load_average": [load_before, os.getloadavg()[0]],
        },
    }
    print(json.dumps(rounded(result)))


if __name__ == "__main__":
    main()
