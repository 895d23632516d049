"""Carries out a plan over a transport: weights leave one layout and arrive in another.

The next bucket is packed while one travels, and one travels while the last one is unpacked. A
target tensor exists from its first element on and is handed over as soon as it is whole. Over a
transport that takes views nothing is packed or unpacked: boxes go from tensor to tensor.
"""

from __future__ import annotations

import hashlib
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import torch

from rolemesh.engine.layout.manifest import ManifestError
from rolemesh.engine.transport.base import Deadline, Exchange, Message, Transport
from rolemesh.engine.weights.assembly import Assembly
from rolemesh.engine.weights.copies import Copy
from rolemesh.engine.weights.messages import (
    Parcel,
    Round,
    buffer_bytes,
    byte_view,
    checksums,
    lend,
    make_parcels,
    pack,
)
from rolemesh.engine.weights.plan import Bucket, Plan
from rolemesh.engine.weights.sharded_tensors import part, tensor_dtypes

_HEADER = struct.Struct("<8sq32s?")
_MAGIC = b"rolemesh"


class TransferMismatchError(ValueError):
    """Ranks were about to exchange different things: names the peer and what differs.

    Nothing was moved. All ranks see it, and the transport can go on.
    """


def plan_digest(plan: Plan) -> bytes:
    """32 bytes, equal for equal plans: what travels between which ranks, as what, in which order.

    Args:
        plan: Its local copies do not count: each rank's are its own.
    """
    digest = hashlib.sha256()
    for bucket in plan.buckets:
        digest.update(b"bucket")
        for copy in bucket.copies:
            digest.update(repr((copy, plan.wire_dtype(copy.parameter))).encode())
    return digest.digest()


class WeightTransfer:
    """One rank's side of a plan, for as many transfers as one likes. Owned by one thread.

    All ranks of the plan run it together. Extra memory while it runs: two buffers for what goes out
    and two for what comes in, each of a bucket (not where the transport takes views, except for
    casts), and target tensors that are not whole yet.

    Example::

        transfer = WeightTransfer(plan, rank, transport, timeout_s=60)
        for name, tensor in transfer.run(weights, policy_version=7):
            sampler.place(name, tensor)
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        transport: Transport,
        *,
        timeout_s: float,
        device: torch.device | str = "cpu",
        checks_bytes: bool = False,
    ) -> None:
        """Sorts out what this rank sends, receives and copies.

        Args:
            plan: The same on all ranks.
            rank: This rank.
            transport: Between the ranks of the plan.
            timeout_s: Seconds for each bucket to arrive.
            device: Of the source tensors, of the buffers and of the target tensors.
            checks_bytes: Send a CRC-32 of every piece and hold the arrived bytes to it. Costs a
                pass over the bytes on the host on either side. The same on all ranks.

        Raises:
            ValueError: The transport is another rank's, or smaller than the plan.
            ManifestError: A target tensor would hold two element types.
        """
        if transport.rank != rank or transport.world_size < plan.world_size:
            raise ValueError(
                f"transport is that of rank {transport.rank} of {transport.world_size}, the plan "
                f"is for rank {rank} of {plan.world_size}: give a transport between its ranks"
            )
        self._plan = plan
        self._rank = rank
        self._transport = transport
        self._timeout_s = timeout_s
        self._device = torch.device(device)
        self._checks_bytes = checks_bytes
        # A sum is taken of bytes that nothing changes any more: of packed ones.
        self._lends = transport.takes_views and not checks_bytes
        self._digest = plan_digest(plan)
        self._rounds = [
            round_
            for number, bucket in enumerate(plan.buckets)
            if (round_ := self._round(bucket, f"bucket {number + 1} of {len(plan.buckets)}"))
        ]
        takes_part = rank < plan.world_size
        self._own = plan.local[rank] if takes_part else ()
        self._duplicates = plan.duplicates[rank] if takes_part else ()
        self._source_shapes = plan.source.shard(rank).shapes
        self._source_dtypes = tensor_dtypes(plan.source, rank)
        tensor_dtypes(plan.target, rank)  # refuses what could not be assembled, before it is sent

    def run(
        self, tensors: Mapping[str, torch.Tensor], *, policy_version: int = 0
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Transfers once. Every rank of the plan calls it and takes all that comes.

        Args:
            tensors: This rank's, by name, of the source layout's shapes and element types. Read
                until the end.
            policy_version: Of the weights; all ranks must name the same.

        Yields:
            Name and tensor of the target layout, each as soon as it is whole, then no longer held
            here. Rows of padding are 0.

        Raises:
            TransferMismatchError: Ranks have different plans or policy versions.
            ManifestError: A source tensor is missing or is not what the layout says.
            TransferFailedError: A peer vanished or was late, or bytes arrived changed. What was
                yielded is one part of the weights and must not be used.
        """
        is_sound = False
        try:
            self._check_sources(tensors)
            self.greet(policy_version)
            yield from self._move(tensors)
            is_sound = True
        except TransferMismatchError:
            is_sound = True
            raise
        finally:
            # Also when the caller stops half-way: the others wait for this rank.
            if not is_sound:
                self._transport.abort()

    def _move(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        arriving = Assembly(
            self._plan.target,
            self._rank,
            device=self._device,
            own=self._own,
            tensors=tensors,
            duplicates=self._duplicates,
        )
        outgoing = [self._buffer(round_.sends for round_ in self._rounds) for _ in range(2)]
        incoming = [self._buffer(round_.receives for round_ in self._rounds) for _ in range(2)]
        rounds = self._rounds

        def sent(number: int) -> _Sent:
            turn = number % 2
            return _Sent(self, rounds[number], outgoing[turn], incoming[turn], tensors, arriving)

        under_way = sent(0) if rounds else None
        if under_way is not None:
            under_way.start()
        yield from arriving.whole()
        for number in range(len(rounds)):
            assert under_way is not None  # one for each round
            following = sent(number + 1) if number + 1 < len(rounds) else None
            if following is not None and self._lends:
                # It takes no buffer that the round under way fills.
                following.start()
            for parcel in rounds[number].receives if not self._lends else ():
                for carried in parcel.parts:
                    arriving.begin(carried.copy.target_tensor)
            under_way.wait()
            if following is not None and not self._lends:
                following.start()
            for parcel in rounds[number].receives:
                message = parcel.of(incoming[number % 2])
                for carried in parcel.parts:
                    wanted = carried.copy.wanted
                    if carried.copy in under_way.placed:
                        arriving.arrived(wanted)
                    else:
                        arriving.put(wanted, carried.values(message))
                    yield from arriving.whole()
            under_way = following

    def greet(self, policy_version: int) -> None:
        """Holds the others' plan and version to this rank's, before anything moves.

        `run` begins with it. All ranks call it together.

        Raises:
            TransferMismatchError: Ranks have different plans or policy versions.
            TransferFailedError: A rank vanished or was late.
        """
        own = _HEADER.pack(_MAGIC, policy_version, self._digest, self._checks_bytes)
        peers = [peer for peer in range(self._plan.world_size) if peer != self._rank]
        if self._rank >= self._plan.world_size:
            return
        out = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(self._device)
        into = {peer: torch.empty_like(out) for peer in peers}
        self._transport.exchange(
            [Message(peer, out) for peer in peers],
            [Message(peer, buffer) for peer, buffer in into.items()],
            label="the header of a weight transfer",
            is_control=True,
        ).wait(self._timeout_s)
        for peer, buffer in into.items():
            theirs = _HEADER.unpack(bytes(buffer.cpu().numpy().data))
            for field, mine, other in zip(
                ("a header of another kind", "policy_version", "plan", "checks_bytes"),
                _HEADER.unpack(own),
                theirs,
                strict=True,
            ):
                if mine != other:
                    shown = [
                        value.hex() if isinstance(value, bytes) else value
                        for value in (other, mine)
                    ]
                    raise TransferMismatchError(
                        f"rank {peer} has {field} {shown[0]}, rank {self._rank} {shown[1]}: all "
                        "ranks of a transfer need the same; nothing was moved"
                    )

    def _check_sources(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, shape in self._source_shapes.items():
            tensor = tensors.get(name)
            if tensor is None:
                raise ManifestError(
                    f"rank {self._rank} lacks source tensor {name!r}: give every tensor of its "
                    "layout"
                )
            expected = self._source_dtypes[name]
            if tuple(tensor.shape) != tuple(shape) or tensor.dtype != expected:
                raise ManifestError(
                    f"source tensor {name!r} of rank {self._rank} is {tensor.dtype} "
                    f"{list(tensor.shape)}; its layout says {expected} {list(shape)}"
                )
            if tensor.device.type != self._device.type:
                raise ManifestError(
                    f"source tensor {name!r} of rank {self._rank} lies on {tensor.device}: move it "
                    f"to {self._device}, or transfer there"
                )

    def _round(self, bucket: Bucket, label: str) -> Round | None:
        sends: defaultdict[int, list[Copy]] = defaultdict(list)
        receives: defaultdict[int, list[Copy]] = defaultdict(list)
        for copy in bucket.copies:
            if copy.source == self._rank:
                sends[copy.target].append(copy)
            elif copy.target == self._rank:
                receives[copy.source].append(copy)
        if not sends and not receives:
            return None
        return Round(label, make_parcels(self._plan, sends), make_parcels(self._plan, receives))

    def _buffer(self, rounds: Iterable[tuple[Parcel, ...]]) -> torch.Tensor:
        """uint8, large enough for the messages of any of the rounds."""
        return torch.empty(buffer_bytes(rounds), dtype=torch.uint8, device=self._device)


class _Sent:
    """A round whose messages are packed, then under way."""

    def __init__(
        self,
        transfer: WeightTransfer,
        round_: Round,
        outgoing: torch.Tensor,
        incoming: torch.Tensor,
        tensors: Mapping[str, torch.Tensor],
        arriving: Assembly,
    ) -> None:
        self._transfer = transfer
        self._round = round_
        self._exchanges: list[Exchange] = []
        self._sums: list[torch.Tensor] = []
        self.placed: set[Copy] = set()
        """What is received into its place in a target tensor."""
        if transfer._lends:
            self._sends = lend(round_.sends, outgoing, tensors)
            self._receives = self._places(incoming, arriving)
            return
        self._sends = [Message(parcel.peer, parcel.of(outgoing)) for parcel in round_.sends]
        self._receives = [Message(parcel.peer, parcel.of(incoming)) for parcel in round_.receives]
        pack(round_.sends, outgoing, tensors)

    def _places(self, incoming: torch.Tensor, arriving: Assembly) -> list[Message]:
        """Where the parts of the round go: to their places, or (for a cast) to the buffer."""
        messages = []
        for parcel in self._round.receives:
            for carried in parcel.parts:
                wanted = carried.copy.wanted
                place = part(arriving.begin(wanted.tensor), wanted.origin, wanted.box)
                into = byte_view(place, carried.dtype)
                if into is None:
                    into = parcel.of(incoming)[carried.start : carried.stop]
                else:
                    self.placed.add(carried.copy)
                messages.append(Message(parcel.peer, into))
        return messages

    def start(self) -> None:
        transport, label = self._transfer._transport, self._round.label
        self._exchanges.append(transport.exchange(self._sends, self._receives, label=label))
        if not self._transfer._checks_bytes:
            return
        device = self._transfer._device
        sums = [
            Message(message.peer, checksums(parcel, message.buffer).to(device))
            for parcel, message in zip(self._round.sends, self._sends, strict=True)
        ]
        self._sums = [
            torch.empty(4 * len(parcel.parts), dtype=torch.uint8, device=device)
            for parcel in self._round.receives
        ]
        receives = [
            Message(parcel.peer, buffer)
            for parcel, buffer in zip(self._round.receives, self._sums, strict=True)
        ]
        self._exchanges.append(
            transport.exchange(sums, receives, label=f"checksums of {label}", is_control=True)
        )

    def wait(self) -> None:
        deadline = Deadline(self._transfer._timeout_s)
        for exchange in self._exchanges:
            exchange.wait(max(deadline.remaining_s, 1e-3))
        for parcel, message, sums in zip(
            self._round.receives, self._receives, self._sums, strict=False
        ):
            actual = checksums(parcel, message.buffer)
            wrong = (actual != sums.cpu()).view(-1, 4).any(1).nonzero().flatten()
            if wrong.numel():
                copy = parcel.parts[int(wrong[0])].copy
                raise self._transfer._transport.failure(
                    f"{copy.box} of {copy.parameter} arrived with other bytes than were sent",
                    parcel.peer,
                    self._round.label,
                    seconds=deadline.elapsed_s,
                )
