"""Weights from the ranks of one service straight to those of another, device to device, by plan.

The ranks of both are numbered through: 0 to P - 1 give, P and following take. On GPUs they meet by
NCCL. On CPUs of one host shared memory takes its place: the same plan and the same calls over
another transport, to prove them; fetching from a publication is faster there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import torch

from rolemesh.engine.layout.families import DecoderShape
from rolemesh.engine.layout.manifest import DtypeName, Manifest, RankShard
from rolemesh.engine.layout.ranks import GenerateLayout, HybridLayout, LayoutError, TrainLayout
from rolemesh.engine.transport.cuda_queue import CudaQueue
from rolemesh.engine.transport.groups.nccl import NcclTransport
from rolemesh.engine.transport.rendezvous import check_offers, decode_offer, encode_offer
from rolemesh.engine.transport.rings.ring import RingTransport
from rolemesh.engine.transport.rings.shm_ring import shm_ring_transport
from rolemesh.engine.transport.selection import (
    Surroundings,
    TransportUnavailableError,
    Way,
    possible_ways,
)
from rolemesh.engine.weights.exchanges.published import source_layout, target_layout
from rolemesh.engine.weights.plan import Plan, make_plan
from rolemesh.engine.weights.transfer import WeightTransfer, plan_digest

CONNECT_TIMEOUT_S = 60.0
"""Longest wait for all ranks of both services to connect."""

TRANSFER_TIMEOUT_S = 120.0
"""Longest wait for the other ranks to come to a transfer, and for one bucket of weights."""

_MEETING = -1
"""In the place of a version while the ranks compare their plans."""

_LOOPBACK = "lo"


MAX_RANKS = 512
"""Of both services together. A plan's size grows with them, and the other layout is told by a
message."""


def exchange_plan(
    manifest: Manifest,
    shape: DecoderShape | None,
    train: TrainLayout,
    generate: TrainLayout,
    dtype: DtypeName,
) -> Plan:
    """What travels between the ranks of two services; both ends make the same plan of it.

    Args:
        manifest: Of the model, as either end knows it.
        shape: Of the model; needed where either end has parts of it.
        train: Layout of the giving service, which holds float32.
        generate: Layout of the taking service.
        dtype: Element type in which weights travel and are taken.

    Raises:
        ManifestError: Another model's parameters, or a model without a plan.
        LayoutError: The model cannot be cut so, or the ranks are more than MAX_RANKS.
        UnsupportedFamilyError: The takers hold slices that this family does not have.
    """
    if train.world_size + generate.world_size > MAX_RANKS:
        raise LayoutError(
            f"the two services have {train.world_size} and {generate.world_size} ranks: at most "
            f"{MAX_RANKS} exchange weights directly"
        )
    # The order of parameters decides the order on the way, and each end has its own.
    ordered = {name: manifest[name] for name in sorted(manifest)}
    source = source_layout(ordered, train, "float32", shape)
    hybrid = HybridLayout(generate, GenerateLayout(pp=generate.pp, tp=generate.tp))
    target = target_layout(ordered, hybrid, dtype, shape)
    nothing = (RankShard((), {}),) * train.world_size
    return make_plan(source, replace(target, ranks=(*nothing, *target.ranks)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """What a rank says about itself. All fields are compared, or used, by every other rank."""

    device: str
    uuid: str
    host: str
    shares_device: int
    """1 where NCCL was told to let several ranks have one device; the fields above as in
    `Surroundings`."""
    network: str
    """Equal for ranks that reach each other over loopback."""
    interface: str
    """Network interface that NCCL is kept to; "" for any."""
    cumem: str
    """How NCCL takes device memory (NCCL_CUMEM_ENABLE); "" where that is left to it. Ranks that
    differ fail when they connect (SkyRL's pull request 143)."""
    transport: str
    """The offer of its transport."""

    @classmethod
    def of(cls, surroundings: Surroundings, network: str, offer: bytes) -> _Member:
        return cls(
            device=surroundings.device,
            uuid=surroundings.uuid,
            host=surroundings.host,
            shares_device=int(surroundings.nccl_shares_devices),
            network=network,
            interface=os.environ.get("NCCL_SOCKET_IFNAME", ""),
            cumem=os.environ.get("NCCL_CUMEM_ENABLE", ""),
            transport=offer.decode(),
        )

    @property
    def surroundings(self) -> Surroundings:
        return Surroundings(
            device=self.device,
            uuid=self.uuid,
            host=self.host,
            nccl_shares_devices=bool(self.shares_device),
        )


_KINDS: dict[str, type[str] | type[int]] = {
    field.name: int if field.name == "shares_device" else str for field in fields(_Member)
}


def _network_identity() -> str:
    """Equal for processes of one host and one network namespace."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id}/{os.readlink('/proc/self/ns/net')}"


class ExchangeEnd:
    """One rank's end of an exchange. Used by one thread at a time; `abort` by any.

    Invariant: a rank connects only after it has held all offers to the same rules as every other
    rank, so either all try or none does. After a transfer that failed the end is of no more use,
    and its peers fail within TRANSFER_TIMEOUT_S.

    Example, a rank of the giving service (a taking one calls `receive` meanwhile)::

        end = ExchangeEnd(plan, rank, device)
        end.connect(offers_of_all_ranks)  # each rank's end.offer
        end.send(dict(trainer.named_weights()), policy_version=7)
        end.close()
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        device: torch.device,
        *,
        surroundings: Surroundings | None = None,
        transport: NcclTransport | RingTransport | None = None,
    ) -> None:
        """Makes a transport that is not connected yet.

        Args:
            plan: Of `exchange_plan`.
            rank: Of this rank within the exchange.
            device: Where its weights lie.
            surroundings: A stand-in for this rank's.
            transport: A stand-in for the one that the device asks for.

        Raises:
            OSError: Cupy or its NCCL is not installed, or shared memory is full.
        """
        self.plan = plan
        self._device = device
        self._surroundings = surroundings or Surroundings.of(device)
        self._network = _network_identity()
        self._transport = transport or _make(rank, plan.world_size, device)
        self._transfer = WeightTransfer(
            plan, rank, self._transport, timeout_s=TRANSFER_TIMEOUT_S, device=device
        )

    @property
    def way(self) -> Way:
        """Name of the transport."""
        return "NCCL" if self._surroundings.device == "cuda" else "shared memory"

    @property
    def offer(self) -> bytes:
        """What the other ranks need to know; its holder can take this rank's place."""
        member = _Member.of(self._surroundings, self._network, self._transport.offer)
        return encode_offer("exchange", asdict(member))

    @property
    def plan_digest(self) -> bytes:
        """32 bytes, equal for equal plans."""
        return plan_digest(self.plan)

    @property
    def received_bytes(self) -> int:
        """Weights that this rank has taken from others so far."""
        return self._transport.received_bytes

    @property
    def sent_bytes(self) -> int:
        """Weights that this rank has given to others so far."""
        return self._transport.sent_bytes

    def connect(self, offers: Sequence[bytes], *, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        """Connects the ranks and compares their plans. All ranks call it together.

        Args:
            offers: Of all ranks, by their numbers.
            timeout_s: Seconds for all to come.

        Raises:
            OfferInvalidError: An offer is unusable, or versions differ; on all ranks alike.
            TransportUnavailableError: The ranks have no way to each other; on all alike.
            TransferFailedError: A rank did not come.
            TransferMismatchError: The plans differ; on all ranks alike.
        """
        check_offers(offers, self.plan.world_size)
        decoded = [
            decode_offer(offer, "exchange", _KINDS, rank=rank) for rank, offer in enumerate(offers)
        ]
        self._check_ways([_Member(**theirs) for theirs in decoded])
        self._transport.connect(
            [theirs["transport"].encode() for theirs in decoded], timeout_s=timeout_s
        )
        self._transfer.greet(_MEETING)

    def _check_ways(self, members: Sequence[_Member]) -> None:
        ways = possible_ways([member.surroundings for member in members])
        if self.way not in ways:
            why = (
                "all ranks are on one GPU, which NCCL refuses"
                if self.way == "NCCL"
                else "ranks without a GPU are on different hosts, users or containers"
            )
            raise TransportUnavailableError(f"{self.way} cannot join the services: {why}")
        kept = [rank for rank, one in enumerate(members) if one.interface == _LOOPBACK]
        if self.way == "NCCL" and kept and len({one.network for one in members}) > 1:
            # NCCL's start would wait for ever, and could not be taken back.
            raise TransportUnavailableError(
                f"the services are on different hosts or containers, but NCCL is kept to loopback "
                f"on rank {kept[0]}: start them with NCCL_SOCKET_IFNAME=<interface of their "
                "network>"
            )
        if self.way == "NCCL" and len(given := {one.cumem for one in members}) > 1:
            raise TransportUnavailableError(
                f"NCCL_CUMEM_ENABLE is {' and '.join(repr(one) for one in sorted(given))} on "
                "different ranks: start both services with the same value, or without it"
            )

    def send(self, weights: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        """Gives weights to the takers, which call `receive` at the same time.

        Args:
            weights: Of this rank by name, float32, shaped as its training shard; read until then.
            policy_version: Of the weights.

        Raises:
            TransferMismatchError: The takers want another version. The end can go on.
            ManifestError: The weights are not those of the plan. The end is of no more use.
            TransferFailedError: A rank vanished or was late. The end is of no more use.
        """
        self._run(weights, policy_version)

    def receive(self, *, policy_version: int) -> list[tuple[str, torch.Tensor]]:
        """Takes weights that `send` gives: this rank's tensors, on its device.

        Raises:
            TransferMismatchError: The givers have another version. The end can go on.
            TransferFailedError: A rank vanished or was late. The end is of no more use.
        """
        return self._run({}, policy_version)

    def _run(
        self, weights: Mapping[str, torch.Tensor], policy_version: int
    ) -> list[tuple[str, torch.Tensor]]:
        tensors = list(self._transfer.run(weights, policy_version=policy_version))
        if self._device.type == "cuda":
            # Unpacking is queued on this thread's stream; another thread uses the tensors.
            torch.cuda.current_stream(self._device).synchronize()
        return tensors

    def abort(self) -> None:
        """Ends a transfer under way. From any thread, safe to repeat."""
        self._transport.abort()

    def close(self) -> None:
        """Lets go of everything, without waiting for other ranks. Safe to repeat."""
        # A peer may be gone: NCCL's orderly end would wait for it.
        self._transport.abort()
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _make(rank: int, world_size: int, device: torch.device) -> Any:
    if device.type == "cuda":
        return NcclTransport(rank, world_size, queue=CudaQueue(device))
    return shm_ring_transport(rank, world_size)
