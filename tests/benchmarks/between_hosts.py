"""Rows and published weights between two hosts, as a share of what the link between them carries.

    python tests/benchmarks/between_hosts.py [--links 1:1 1:30 10:1 10:30] [--connections 1 8]

Two network namespaces are joined by a cable of so many Gb/s and ms of round trip, which a process
of this machine carries (tests/support/cables.py; needs root). One host has a producer, the other
pulls from it:
    socket   a bare TCP connection into one buffer, or several
    rows     fetch_rows of a batch of experience
    weights  fetch_boxes of a publication, as a rollout service does
in clear and with TLS between members. Ways take turns, so that a slow moment of the machine meets
all. `link_share` is of the link's rate, `socket_share` of what bare sockets carried in the same
run, which the two cores of producer, consumer and cable bound as well. `one_host` has the same
producer and consumer on one host, without a link, and besides through shared memory (`shm`).
Prints one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import grpc
import torch
from experience_transfer import make_batch
from support.cables import Cable
from support.hosts import HostNetwork, are_apart

from rolemesh.engine.layout.boxes import whole_layout
from rolemesh.engine.layout.manifest import Parameter
from rolemesh.engine.layout.ranks import TrainLayout
from rolemesh.engine.weights.copies import Copy
from rolemesh.engine.weights.exchanges.publication_memory import PublicationMemory
from rolemesh.engine.weights.exchanges.published import Publication
from rolemesh.rpc.channel import SERVER_OPTIONS, MeshChannel, open_channel
from rolemesh.rpc.experience import pull
from rolemesh.rpc.members.authority import Authority
from rolemesh.rpc.members.identity import Identity, server_credentials
from rolemesh.services.runtime.experience.fetch import ExperienceServicer, fetch_rows
from rolemesh.services.runtime.experience.published_weights import (
    answer_fetch,
    fetch_boxes,
    reference_to,
)
from rolemesh.services.runtime.experience.store import ExperienceStore
from rolemesh.services.runtime.server.operations import OperationLedger
from rolemesh.v1 import experience_pb2, weights_pb2

NAMES = ["tokens", "logprobs", "values"]
HOST_ID = "of the producer"
READY = "ready "
RESULT = "result "
STARTUP_S = 120.0
MATRIX = (1024, 1024)


# --- the host that has the data --------------------------------------------------------------


def make_publication(mebibytes: int) -> Publication:
    """Matrices of 2 MiB in bfloat16 until the publication has that size."""
    manifest = {
        f"layer.{at}": Parameter(MATRIX, "bfloat16") for at in range(max(1, mebibytes // 2))
    }
    weights = {name: torch.randn(MATRIX).bfloat16() for name in manifest}
    return Publication(
        whole_layout(manifest).in_dtype("bfloat16"),
        0,
        weights,
        policy_version=1,
        memory=PublicationMemory(),
    )


def serve_sockets(host: str, num_bytes: int) -> int:
    """Answers a line with the number of connections with that part of the bytes, from threads.

    Returns the port.
    """
    content, listener = memoryview(bytearray(num_bytes)), socket.create_server((host, 0))

    def answer(connection: socket.socket) -> None:
        with connection:
            parts = int(connection.recv(16))
            connection.sendall(content[: num_bytes // parts])

    def accept() -> None:
        while True:
            threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return int(listener.getsockname()[1])


async def produce(host: str, mebibytes: int, identity: Path) -> None:
    """Says in one line where what lies, then serves until it is ended."""
    batch, publication = make_batch(mebibytes), make_publication(mebibytes)
    store = ExperienceStore(1 << 40, shared_memory=True, shared_memory_threshold_bytes=1)
    held = store.put("run", 0, batch)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    ExperienceServicer(store, OperationLedger(), HOST_ID).add_to(server)

    async def fetch_weights(request: Any, context: object) -> AsyncIterator[bytes]:
        async for message in answer_fetch(publication, request, HOST_ID):
            yield message

    handler: grpc.RpcMethodHandler[Any, Any] = grpc.unary_stream_rpc_method_handler(
        fetch_weights, request_deserializer=weights_pb2.FetchWeightsRequest.FromString
    )
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(
                "rolemesh.v1.WeightsService", {"FetchWeights": handler}
            ),
        )
    )
    clear = f"{host}:{server.add_insecure_port(f'{host}:0')}"
    tls = f"{host}:{server.add_secure_port(f'{host}:0', server_credentials(identity))}"
    await server.start()
    shard = experience_pb2.Shard(
        experience_id=held.experience_id, num_rows=batch.num_rows, role="producer"
    )
    told = {
        "clear": clear,
        "tls": tls,
        "socket": [host, serve_sockets(host, batch.num_bytes)],
        "num_bytes": batch.num_bytes,
        "weights_bytes": publication.num_bytes,
        "shard": shard.SerializeToString().hex(),
        "weights": reference_to(publication, "run", TrainLayout(), [clear])
        .SerializeToString()
        .hex(),
    }
    print(READY + json.dumps(told), flush=True)
    await asyncio.Event().wait()


# --- the host that pulls ---------------------------------------------------------------------


def pull_by_sockets(place: tuple[str, int], num_bytes: int, number: int) -> None:
    """Fills one buffer over so many connections."""
    target = memoryview(bytearray(num_bytes))
    size = num_bytes // number

    def read(at: int) -> None:
        part = target[at * size : (at + 1) * size]
        with socket.create_connection(place) as connection:
            connection.sendall(f"{number}\n".encode())
            while part:
                part = part[connection.recv_into(part) :]

    threads = [threading.Thread(target=read, args=(at,)) for at in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def copies_of(ref: weights_pb2.WeightsRef) -> list[Copy]:
    """All of a publication of one rank."""
    return [
        Copy(one.name, box, 0, one.name, (0, 0), 0, one.name, (0, 0))
        for one in ref.parameters
        for box in [tuple((0, size) for size in one.shape)]
    ]


async def consume(
    told: dict[str, Any],
    identity: Identity,
    connections: list[int],
    repetitions: int,
    on_one_host: bool,
) -> dict[str, list[float]]:
    """Bytes a second of each way, one figure a repetition."""
    shard = experience_pb2.Shard.FromString(bytes.fromhex(told["shard"]))
    ref = weights_pb2.WeightsRef.FromString(bytes.fromhex(told["weights"]))
    copies, num_bytes = copies_of(ref), told["num_bytes"]
    async with AsyncExitStack() as stack:

        def way(
            what: str, kind: str, number: int, channel: MeshChannel
        ) -> Callable[[], Awaitable[int]]:
            host_id, transport = "", pull.grpc_over(number)
            if kind == "shm":
                host_id, transport = HOST_ID, "shm"

            async def rows() -> int:
                fetched = await fetch_rows(channel, shard, NAMES, range(shard.num_rows), host_id)
                assert fetched.transport == transport, fetched.transport
                return fetched.num_bytes

            async def weights() -> int:
                fetched = await fetch_boxes(channel, ref, 0, copies, host_id)
                assert fetched.transport == transport, fetched.transport
                if fetched.transport == "shm":
                    # What is mapped costs nothing before it is read.
                    for box in fetched.boxes:
                        box.clone()
                return fetched.num_bytes

            async def bare() -> int:
                place = tuple(told["socket"])
                await asyncio.to_thread(pull_by_sockets, place, num_bytes, number)
                return num_bytes

            return {"rows": rows, "weights": weights, "socket": bare}[what]

        ways: dict[str, tuple[int, Callable[[], Awaitable[int]]]] = {}
        cases = [
            (what, kind, number)
            for number in connections
            for what, kind in (
                ("socket", "clear"),
                *itertools.product(("rows", "weights"), ("clear", "tls")),
            )
        ]
        if on_one_host:
            cases += [("rows", "shm", 1), ("weights", "shm", 1)]
        for what, kind, number in cases:
            member = identity if kind == "tls" else None
            address = told["tls" if member else "clear"]
            channel = await stack.enter_async_context(open_channel(address, identity=member))
            name = f"{what}_{kind}_{number}".replace("socket_clear", "socket")
            ways[name.replace("shm_1", "shm")] = (number, way(what, kind, number, channel))
        rates: dict[str, list[float]] = defaultdict(list)
        for repetition in range(repetitions + 1):
            for name, (number, run) in ways.items():
                # Each way as if its number were the one that we had chosen.
                pull.MAX_CONNECTIONS = number
                started = time.perf_counter()
                taken = await run()
                # The first time opens connections.
                if repetition:
                    rates[name].append(taken / (time.perf_counter() - started))
        return rates


# --- both ------------------------------------------------------------------------------------


def lines_of(log: Path, beginning: str, is_alive: Callable[[], bool]) -> Iterator[dict[str, Any]]:
    """What a process on a host has told."""
    while True:
        found = [line for line in log.read_text().splitlines() if line.startswith(beginning)]
        if found:
            yield json.loads(found[-1].removeprefix(beginning))
            return
        if not is_alive():
            raise SystemExit(log.read_text())
        time.sleep(0.05)


def measured_rates(
    network: HostNetwork, addresses: Sequence[str], arguments: argparse.Namespace
) -> tuple[dict[str, list[float]], int]:
    """Rates by way from the first host to the last one, and the bytes of the rows."""
    authority = Authority.make()
    with tempfile.TemporaryDirectory() as folder:
        for member in ("actor", "reward"):
            place = Path(folder, f"{member}.pem")
            place.touch(mode=0o600)
            place.write_bytes(authority.issue(member).pem())
        common = [sys.executable, __file__, f"--mebibytes={arguments.mebibytes}"]
        log = Path(folder, "produce.log")
        producer = network.start(
            0, [*common, "--produce", addresses[0], "--identity", f"{folder}/actor.pem"], log
        )
        (told,) = lines_of(log, READY, lambda: producer.process.poll() is None)
        log = Path(folder, "consume.log")
        numbers = [str(number) for number in arguments.connections]
        consumer = network.start(
            len(addresses) - 1,
            [*common, "--consume", json.dumps(told), "--identity", f"{folder}/reward.pem",
             *(["--on-one-host"] if len(addresses) == 1 else []),
             "--repetitions", str(arguments.repetitions), "--connections", *numbers],
            log,
        )  # fmt: skip
        (rates,) = lines_of(log, RESULT, lambda: consumer.process.poll() is None)
        return rates, told["num_bytes"]


def over_link(
    gigabits: float, round_trip_ms: float, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Rates by way over one link, and their shares."""
    with (
        HostNetwork(2) as network,
        Cable(network, bits_per_s=gigabits * 1e9, round_trip_s=round_trip_ms / 1e3) as cable,
    ):
        rates, num_bytes = measured_rates(network, cable.addresses, arguments)
    link = gigabits * 1e9 / 8
    medians = {name: statistics.median(found) for name, found in rates.items()}
    best_socket = max(rate for name, rate in medians.items() if name.startswith("socket"))
    return {
        "gigabits_per_s": gigabits,
        "round_trip_ms": round_trip_ms,
        "bytes": num_bytes,
        "link_share": {name: round(rate / link, 3) for name, rate in medians.items()},
        "socket_share": {name: round(rate / best_socket, 3) for name, rate in medians.items()},
        "spread": {
            name: [round(min(found) / link, 3), round(max(found) / link, 3)]
            for name, found in rates.items()
        },
    }


def within_one_host(arguments: argparse.Namespace) -> dict[str, Any]:
    """Rates by way between two processes of this machine."""
    with HostNetwork(1, are_apart=False) as network:
        rates, num_bytes = measured_rates(network, network.addresses, arguments)
    return {
        "bytes": num_bytes,
        "gigabits_per_s": {
            name: round(statistics.median(found) * 8e-9, 2) for name, found in rates.items()
        },
        "spread": {
            name: [round(min(found) * 8e-9, 2), round(max(found) * 8e-9, 2)]
            for name, found in rates.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--links", nargs="+", default=["1:1", "1:30", "10:1", "10:30"])
    parser.add_argument("--connections", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--mebibytes", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--produce", help=argparse.SUPPRESS)
    parser.add_argument("--consume", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--identity", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--on-one-host", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.produce is not None:
        asyncio.run(produce(arguments.produce, arguments.mebibytes, arguments.identity))
        return
    if arguments.consume is not None:
        identity = Identity.read(arguments.identity)
        rates = asyncio.run(
            consume(
                arguments.consume,
                identity,
                arguments.connections,
                arguments.repetitions,
                arguments.on_one_host,
            )
        )
        print(RESULT + json.dumps(rates), flush=True)
        return
    line: dict[str, Any] = {
        "benchmark": "between_hosts",
        "config": {"mebibytes": arguments.mebibytes, "repetitions": arguments.repetitions},
        "machine": {"cpus": os.cpu_count(), "load": round(os.getloadavg()[0], 1)},
        "versions": {"python": platform.python_version(), "grpcio": grpc.__version__},
    }
    line["one_host"] = within_one_host(arguments)
    if are_apart() and Path("/dev/net/tun").exists():
        links = [link.split(":") for link in arguments.links]
        line["links"] = [over_link(float(rate), float(trip), arguments) for rate, trip in links]
    else:
        line["skipped"] = "this user can make no network namespaces, or there is no /dev/net/tun"
    print(json.dumps(line))


if __name__ == "__main__":
    main()
