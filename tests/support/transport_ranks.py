"""Ranks of a transport: as threads of this process, or as one of the pool's processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from support.fake_nccl import FakeFabric, FakeNccl, FakeQueue, FakeRuntime
from support.local_transport import LocalHub
from support.rank_processes import RankContext

from rolemesh.engine.layout.ranks import HybridLayout, TrainLayout
from rolemesh.engine.transport.base import Transport
from rolemesh.engine.transport.groups.gloo import GlooTransport
from rolemesh.engine.transport.groups.nccl import NcclTransport
from rolemesh.engine.transport.groups.torch_pairs import HostMemoryTransport, TorchPairsTransport
from rolemesh.engine.transport.rings.cuda_ipc import cuda_ipc_transport
from rolemesh.engine.transport.rings.process_memory import process_memory_transport
from rolemesh.engine.transport.rings.ring import RingTransport
from rolemesh.engine.transport.rings.shm_ring import shm_ring_transport

CONNECT_S = 60.0
SLOT_BYTES = 4096
"""Far smaller than the large messages of the tests, which so go round the ring many times."""

THREADED = ["local", "memory", "shm", "nccl", "cuda_ipc"]
"""Transports whose ranks can be threads; the last two over fakes."""


def run_threads(world_size: int, function: Callable[[int], Any]) -> list[Any]:
    """`function(rank)` in a thread for each rank; what they return, or the first error."""
    results: list[Any] = [None] * world_size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = function(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


class Cluster:
    """One threaded transport for each rank, connected."""

    def __init__(self, kind: str, world_size: int) -> None:
        self.fabric = FakeFabric()
        self.queues = [FakeQueue() for _ in range(world_size)]
        self.transports: list[Transport]
        if kind == "local":
            hub = LocalHub(world_size)
            self.transports = [hub.transport(rank) for rank in range(world_size)]
            return
        made = [self._make(kind, rank, world_size) for rank in range(world_size)]
        offers = [transport.offer for transport in made]
        run_threads(world_size, lambda rank: made[rank].connect(offers, timeout_s=CONNECT_S))
        self.transports = list(made)

    def _make(self, kind: str, rank: int, world_size: int) -> RingTransport | NcclTransport:
        if kind == "memory":
            return process_memory_transport(rank, world_size)
        if kind == "shm":
            return shm_ring_transport(rank, world_size, slot_bytes=SLOT_BYTES)
        if kind == "nccl":
            nccl = FakeNccl(self.fabric)
            return NcclTransport(rank, world_size, queue=self.queues[rank], nccl=nccl)
        return cuda_ipc_transport(
            rank,
            world_size,
            queue=self.queues[rank],
            device_uuid="GPU-0",
            slot_bytes=SLOT_BYTES,
            runtime=FakeRuntime(),
        )

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(transport, *args)` on all ranks at once."""
        return run_threads(
            len(self.transports), lambda rank: function(self.transports[rank], *args)
        )

    def close(self) -> None:
        for transport in self.transports:
            transport.close()


@contextmanager
def cluster(kind: str, world_size: int) -> Iterator[Cluster]:
    """A cluster that is closed at the end."""
    ranks = Cluster(kind, world_size)
    try:
        yield ranks
    finally:
        ranks.close()


@contextmanager
def process_transport(context: RankContext, kind: str, *, name: str = "") -> Iterator[Transport]:
    """The transport of a rank that is a process: "shm", "memory", "gloo", "host memory" or "pairs".

    The last is what torch's NCCL carries on GPUs, over gloo here.
    """
    with ExitStack() as stack:
        if kind not in ("shm", "memory"):
            layout = HybridLayout(TrainLayout(dp=context.world_size))
            mesh = stack.enter_context(context.connect(layout, name=f"mesh{name}"))
            if kind == "pairs":
                pairs = TorchPairsTransport(mesh, torch.device("cpu"), backend="gloo")
                pairs.connect((), timeout_s=CONNECT_S)
                yield stack.enter_context(pairs)
            else:
                made = GlooTransport if kind == "gloo" else HostMemoryTransport
                yield stack.enter_context(made(mesh))
        else:
            make = process_memory_transport if kind == "memory" else shm_ring_transport
            transport = make(context.rank, context.world_size)
            stack.enter_context(transport)
            offers = context.tell(transport.offer, f"offers{name}")
            transport.connect(offers, timeout_s=CONNECT_S)
            yield transport
