"""The transport between the ranks of a mesh: the fastest that all of them can use.

Ranks say where they are, choose by the same rule, and try what they chose together: all connect, or
all try the next one. They talk over the mesh itself, in JSON, so no store is carried around.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

import torch

from rolemesh.engine.parallel.agreement import gather_facts, try_together
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.transport.base import Deadline, Transport
from rolemesh.engine.transport.cuda_queue import CudaQueue
from rolemesh.engine.transport.groups.gloo import GlooTransport
from rolemesh.engine.transport.groups.nccl import NcclTransport
from rolemesh.engine.transport.groups.torch_pairs import HostMemoryTransport, TorchPairsTransport
from rolemesh.engine.transport.rings.cuda_ipc import cuda_ipc_transport
from rolemesh.engine.transport.rings.process_memory import process_memory_transport
from rolemesh.engine.transport.rings.ring import RingTransport
from rolemesh.engine.transport.rings.shm_ring import SLOT_BYTES, shm_ring_transport
from rolemesh.engine.transport.slots.shm import host_identity

CONNECT_TIMEOUT_S = 120.0
"""Longest wait for all ranks to connect."""

RING_BYTES = 64 << 20
"""Most shared memory of one rank: with more ranks the slots become smaller."""

NCCL_SHARES_DEVICES = "NCCL_MULTI_RANK_GPU_ENABLE"
"""Environment variable of NCCL >= 2.30: "1" lets several ranks have one device."""

Way: TypeAlias = Literal[
    "process memory",
    "shared memory",
    "gloo",
    "CUDA IPC",
    "NCCL",
    "torch's NCCL",
    "gloo through host memory",
]
"""A transport by its name."""

_Connected: TypeAlias = RingTransport | NcclTransport | TorchPairsTransport

WorkT = TypeVar("WorkT")

_LOG = logging.getLogger(__name__)
# What a rank says to the others lies in host memory, also where the weights do not.
_HOST = torch.device("cpu")


class TransportUnavailableError(RuntimeError):
    """Ranks that need a transport have none: says which were tried, and what stood in the way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a rank tells the others about where it is."""

    device: str
    """Type of the device on which the weights lie: "cpu" or "cuda"."""
    uuid: str
    """Identity of that device; "" for a CPU."""
    host: str
    """Equal for ranks that can share host memory in the way rings need; "" where none can."""
    nccl_shares_devices: bool
    """Whether NCCL was told to let several ranks have one device."""

    @classmethod
    def of(cls, device: torch.device) -> Surroundings:
        """This rank's."""
        try:
            # Rings rely on the order in which x86-64 keeps its stores.
            host = host_identity() if platform.machine() == "x86_64" else ""
        except OSError:
            host = ""
        uuid = ""
        if device.type == "cuda":
            uuid = str(torch.cuda.get_device_properties(device).uuid)
        return cls(
            device=device.type,
            uuid=uuid,
            host=host,
            nccl_shares_devices=os.environ.get(NCCL_SHARES_DEVICES) == "1",
        )


def possible_ways(ranks: Sequence[Surroundings]) -> tuple[Way, ...]:
    """What ranks in such surroundings can try, best first; the same on every rank.

    Args:
        ranks: At least two, by rank.

    Raises:
        TransportUnavailableError: There is nothing to try.
    """
    kinds = [rank.device for rank in ranks]
    if len(set(kinds)) > 1 or kinds[0] not in ("cpu", "cuda"):
        raise TransportUnavailableError(
            f"the weights of ranks 0 to {len(ranks) - 1} lie on {', '.join(kinds)}: give all ranks "
            "a GPU, or none"
        )
    can_ring = ranks[0].host != "" and len({rank.host for rank in ranks}) == 1
    if kinds[0] == "cpu":
        return ("process memory", "shared memory", "gloo") if can_ring else ("gloo",)
    holders: dict[str, list[int]] = {}
    for number, rank in enumerate(ranks):
        holders.setdefault(rank.uuid, []).append(number)
    nccl: tuple[Way, ...] = ()
    if len(holders) == len(ranks) or all(rank.nccl_shares_devices for rank in ranks):
        nccl = ("NCCL",)
    if len(holders) == 1 and can_ring:
        return ("CUDA IPC", *nccl, "gloo through host memory")
    if not nccl:
        uuid, shared = next(pair for pair in holders.items() if len(pair[1]) > 1)
        raise TransportUnavailableError(
            f"ranks {', '.join(map(str, shared))} share device {uuid}, which NCCL refuses: give "
            "each rank a device of its own, or all the same one on one host, or set "
            f"{NCCL_SHARES_DEVICES}=1 on all ranks (NCCL 2.30 and newer)"
        )
    if len(holders) < len(ranks):
        return (*nccl, "gloo through host memory")
    return (*nccl, "torch's NCCL", "gloo through host memory")


def make_transport(
    mesh: RankMesh, device: torch.device, *, timeout_s: float = CONNECT_TIMEOUT_S
) -> Transport:
    """Connects the ranks of a mesh; all of them call it together.

    On CPUs within one x86-64 host: out of the sender's own memory, or through shared memory where
    that is not allowed; else gloo. On GPUs: NCCL through cupy, or CUDA IPC where all ranks share
    one device; without cupy torch's own NCCL, and at last gloo with copies in host memory. What
    cannot be used after all (a full /dev/shm, a cupy without libnccl on one rank) is left by all
    ranks for the next in that order.

    Args:
        mesh: Of several ranks. Its process groups take tensors in host memory ("gloo",
            "cpu:gloo,cuda:nccl").
        device: On which this rank's weights lie.
        timeout_s: Seconds for all ranks to connect by one transport.

    Returns:
        A connected transport. `close` it before the mesh.

    Raises:
        TransportUnavailableError: The ranks' devices fit no transport; on all ranks alike.
        RuntimeError: A rank vanished while they spoke.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    own = asdict(Surroundings.of(device))
    ways = possible_ways([Surroundings(**theirs) for theirs in _tell(own, mesh)])
    *first, last = ways
    for way in first:
        try:
            connected = _connected(partial(_make, way, mesh, device), mesh, timeout_s)
            _LOG.info("weights move between the ranks by %s", connected.name)
            return connected
        except TransportUnavailableError as error:
            _LOG.warning("%s cannot be used between the ranks: %s", way, error)
    # A group of the mesh's own kind: what would refuse it has refused the mesh.
    kind = GlooTransport if last == "gloo" else HostMemoryTransport
    _LOG.info("weights move between the ranks by %s", last)
    return kind(mesh, timeout_s=timeout_s)


def _make(way: Way, mesh: RankMesh, device: torch.device) -> _Connected:
    rank, size = mesh.rank, mesh.world.size
    if way == "process memory":
        return process_memory_transport(rank, size)
    if way == "shared memory":
        slot_bytes = min(SLOT_BYTES, RING_BYTES // (2 * size))
        return shm_ring_transport(rank, size, slot_bytes=slot_bytes)
    if way == "torch's NCCL":
        return TorchPairsTransport(mesh, device)
    queue = CudaQueue(device)
    if way == "NCCL":
        return NcclTransport(rank, size, queue=queue)
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return cuda_ipc_transport(rank, size, queue=queue, device_uuid=uuid)


def _connected(make: Callable[[], _Connected], mesh: RankMesh, timeout_s: float) -> Transport:
    """Makes and connects a transport on all ranks, or raises on all and leaves nothing."""
    deadline = Deadline(timeout_s)
    with ExitStack() as closing_all:

        def offer() -> tuple[_Connected, str]:
            made = make()
            closing_all.callback(made.close)
            return made, made.offer.decode()

        def connect() -> tuple[None, str]:
            try:
                transport.connect(
                    [theirs.encode() for theirs in offers],
                    timeout_s=max(deadline.remaining_s, 1e-3),
                )
            except BaseException:
                # Others may be waiting for this rank to connect.
                transport.close()
                raise
            return None, ""

        transport, offers = _together(offer, mesh)
        _together(connect, mesh)
        closing_all.pop_all()
    return transport


_FAILURES = (OSError, RuntimeError, ValueError)
"""What makes a transport unusable: a library or memory is missing, peers do not fit or come."""


def _together(work: Callable[[], tuple[WorkT, str]], mesh: RankMesh) -> tuple[WorkT, list[str]]:
    """What this rank's work gave and all ranks' facts, unless any rank failed: then all raise."""
    results, failure, answers = try_together(work, partial(_tell, mesh=mesh))
    if failure is not None and not isinstance(failure, _FAILURES):
        raise failure
    failed = [rank for rank, answer in enumerate(answers) if "error" in answer]
    if failed:
        first = answers[failed[0]]
        more = f" ({len(failed)} ranks cannot)" if len(failed) > 1 else ""
        raise TransportUnavailableError(
            f"rank {failed[0]}: {first['error'] or first['classes'][0]}{more}"
        ) from failure
    return results[0], [answer["facts"] for answer in answers]


def _tell(facts: dict[str, Any], mesh: RankMesh) -> list[dict[str, Any]]:
    return gather_facts(facts, mesh.world, _HOST)
