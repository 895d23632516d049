"""Experience from process to process, by transport, against a plain copy and ordinary gRPC.

    python tests/benchmarks/experience_transfer.py [--mebibytes 256] [--repetitions 7]

A producer in a process of its own holds one batch; this process pulls all of it:
    memcpy         torch copies the same columns inside this process
    shm            fetch_rows, which maps the producer's segment and copies the rows out
    grpc_raw       fetch_rows as a stream of hand-made 1 MiB messages into one buffer
    grpc_tls       the same between members with identities, as a judge in compose pulls rows
    grpc_protobuf  the generated stub and servicer with the same 1 MiB chunks into one buffer
Repetitions are interleaved, so that a slow moment of the machine meets all five. The result of
every transport is compared with the batch before anything is timed. Prints one JSON line.
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
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import torch

from rolemesh.engine.experience import (
    Column,
    ColumnKind,
    Experience,
    offsets_of,
    payload_layout,
    read_payload,
)
from rolemesh.rpc.channel import SERVER_OPTIONS, MeshChannel, open_channel
from rolemesh.rpc.experience.payload import header_of, layout_of, payload_chunks
from rolemesh.rpc.members.authority import Authority
from rolemesh.rpc.members.identity import Identity, server_credentials
from rolemesh.services.runtime.experience.fetch import (
    ExperienceServicer,
    arrays_of,
    fetch_rows,
)
from rolemesh.services.runtime.experience.store import ExperienceStore
from rolemesh.services.runtime.server.operations import OperationLedger
from rolemesh.v1 import experience_pb2, experience_pb2_grpc

TOKENS_A_ROW = 1024
BYTES_A_TOKEN = 8 + 4 + 4
"""int64 tokens, float32 log-probs and values."""
HOST_ID = "benchmark"
DEADLINE_S = 120.0


def make_batch(mebibytes: int) -> Experience:
    """Rows of about 1,024 tokens until the batch has that size."""
    num_rows = max(1, (mebibytes << 20) // (TOKENS_A_ROW * BYTES_A_TOKEN))
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(
        TOKENS_A_ROW // 2, TOKENS_A_ROW * 3 // 2, (num_rows,), generator=generator
    )
    offsets = offsets_of(lengths)
    num_tokens = int(offsets[-1])
    tokens = torch.randint(0, 50_000, (num_tokens,), generator=generator)
    logprobs = torch.randn(num_tokens, generator=generator)
    return Experience(
        {
            "tokens": Column(ColumnKind.SEQUENCE, tokens, offsets),
            "logprobs": Column(ColumnKind.COMPLETION, logprobs, offsets),
            "values": Column(ColumnKind.COMPLETION, logprobs + 1, offsets),
        }
    )


class GeneratedServicer(experience_pb2_grpc.ExperienceServiceServicer):
    """What one would write without a second thought."""

    def __init__(self, batch: Experience) -> None:
        self._batch = batch
        self._layout = payload_layout(batch)

    async def Fetch(
        self, request: experience_pb2.FetchRequest, context: Any
    ) -> AsyncIterator[experience_pb2.FetchResponse]:
        yield experience_pb2.FetchResponse(header=header_of(self._layout))
        for pieces in payload_chunks(self._layout, arrays_of(self._batch)):
            yield experience_pb2.FetchResponse(chunk=b"".join(pieces))


async def produce(mebibytes: int, identity: Path) -> None:
    """The producer's process: one line with the addresses, then serves until its input closes."""
    batch = make_batch(mebibytes)
    shared = ExperienceStore(1 << 40, shared_memory=True, shared_memory_threshold_bytes=1)
    held = shared.put("run", 0, batch)
    ours, generated = grpc.aio.server(options=SERVER_OPTIONS), grpc.aio.server()
    ExperienceServicer(shared, OperationLedger(), HOST_ID).add_to(ours)
    experience_pb2_grpc.add_ExperienceServiceServicer_to_server(
        GeneratedServicer(held.experience),  # type: ignore[abstract]
        generated,
    )
    ports = [server.add_insecure_port("127.0.0.1:0") for server in (ours, generated)]
    ports.append(ours.add_secure_port("127.0.0.1:0", server_credentials(identity)))
    await ours.start()
    await generated.start()
    print(json.dumps({"ports": ports, "experience_id": held.experience_id}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await ours.stop(0)
    await generated.stop(0)
    shared.close()


async def pull_generated(channel: grpc.aio.Channel, num_rows: int) -> Experience:
    """The generated stub, into one buffer like ours."""
    layout, payload, filled = None, torch.empty(0, dtype=torch.uint8), 0
    request = experience_pb2.FetchRequest(row_stop=num_rows)
    stub = experience_pb2_grpc.ExperienceServiceStub(channel)
    async for part in stub.Fetch(request, timeout=DEADLINE_S):
        if part.WhichOneof("part") == "header":
            layout = layout_of(part.header)
            payload = torch.empty(layout.num_bytes, dtype=torch.uint8)
            target = payload.numpy().data
        else:
            chunk = part.chunk
            target[filled : filled + len(chunk)] = chunk
            filled += len(chunk)
    assert layout is not None
    return read_payload(layout, payload)


async def pull_ours(channel: MeshChannel, shard: experience_pb2.Shard, host_id: str) -> Experience:
    names = ["tokens", "logprobs", "values"]
    fetched = await fetch_rows(channel, shard, names, range(shard.num_rows), host_id)
    return fetched.experience


def copy_columns(batch: Experience) -> Experience:
    return Experience(
        {
            name: Column(column.kind, column.values.clone(), column.offsets.clone())
            for name, column in batch.columns.items()
            if column.offsets is not None
        }
    )


def same(left: Experience, right: Experience) -> bool:
    return all(
        torch.equal(column.values, right[name].values)
        and torch.equal(column.lengths(), right[name].lengths())
        for name, column in left.columns.items()
    )


@contextmanager
def producer(mebibytes: int, identity: Identity) -> Iterator[dict[str, Any]]:
    """The producer's process, for as long as the block lasts."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "actor.pem")
        place.touch(mode=0o600)
        place.write_bytes(identity.pem())
        with _process(mebibytes, place) as announced:
            yield announced


@contextmanager
def _process(mebibytes: int, identity: Path) -> Iterator[dict[str, Any]]:
    process = subprocess.Popen(
        [sys.executable, __file__, f"--produce={identity}", f"--mebibytes={mebibytes}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        yield json.loads(process.stdout.readline())
    finally:
        process.stdin.close()
        process.wait(30)


async def measure(
    announced: dict[str, Any], mebibytes: int, repetitions: int, identity: Identity
) -> dict[str, Any]:
    batch = make_batch(mebibytes)
    ours, generated, encrypted = (f"127.0.0.1:{port}" for port in announced["ports"])
    shard = experience_pb2.Shard(
        experience_id=announced["experience_id"],
        num_rows=batch.num_rows,
        address=ours,
        role="producer",
    )
    async with (
        open_channel(ours) as mesh,
        open_channel(encrypted, identity=identity) as members,
        grpc.aio.insecure_channel(generated) as plain,
    ):

        async def memcpy() -> Experience:
            return copy_columns(batch)

        ways: dict[str, Callable[[], Awaitable[Experience]]] = {
            "memcpy": memcpy,
            "shm": lambda: pull_ours(mesh, shard, HOST_ID),
            "grpc_raw": lambda: pull_ours(mesh, shard, ""),
            "grpc_tls": lambda: pull_ours(members, shard, ""),
            "grpc_protobuf": lambda: pull_generated(plain, batch.num_rows),
        }
        for name, pull in ways.items():
            if not same(batch, await pull()):
                raise SystemExit(f"{name} brought something else")
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(repetitions):
            for name, pull in ways.items():
                started = time.perf_counter()
                await pull()
                rates[name].append(batch.num_bytes / 1e9 / (time.perf_counter() - started))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "benchmark": "experience_transfer",
        "config": {"bytes": batch.num_bytes, "rows": batch.num_rows, "repetitions": repetitions},
        "gb_per_s": {
            name: {
                "median": round(medians[name], 3),
                "min": round(min(values), 3),
                "max": round(max(values), 3),
            }
            for name, values in rates.items()
        },
        "ratio": {
            "shm_over_memcpy": round(medians["shm"] / medians["memcpy"], 3),
            "shm_over_grpc_protobuf": round(medians["shm"] / medians["grpc_protobuf"], 2),
            "grpc_tls_over_grpc_raw": round(medians["grpc_tls"] / medians["grpc_raw"], 2),
            "grpc_raw_over_grpc_protobuf": round(medians["grpc_raw"] / medians["grpc_protobuf"], 2),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "grpcio": grpc.__version__,
        },
        "machine": {"cpus": os.cpu_count(), "arch": platform.machine()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mebibytes", type=int, default=256)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--produce", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.produce is not None:
        asyncio.run(produce(arguments.mebibytes, arguments.produce))
        return
    authority = Authority.make()
    with producer(arguments.mebibytes, authority.issue("actor")) as announced:
        own = authority.issue("reward")
        measured = measure(announced, arguments.mebibytes, arguments.repetitions, own)
        print(json.dumps(asyncio.run(measured)))


if __name__ == "__main__":
    main()
