"""Carries out a plan over a transport: weights leave one layout and arrive in another.

The next bucket is packed while one travels, and one travels while the last one is unpacked. A
target tensor exists from its first element on and is handed over as soon as it is whole.
"""

from __future__ import annotations

import hashlib
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import torch

from rolemesh.engine.layout.manifest import (
    ManifestError,
    RankShard,
    WeightLayout,
    num_elements,
)
from rolemesh.engine.transport.base import (
    Deadline,
    Exchange,
    Message,
    TransferFailedError,
    Transport,
)
from rolemesh.engine.weights.messages import (
    TORCH_DTYPES,
    Parcel,
    Round,
    buffer_bytes,
    checksums,
    copy_within,
    make_parcels,
    pack,
    put,
)
from rolemesh.engine.weights.plan import Bucket, Copy, Plan

_HEADER = struct.Struct("<8sq32s?")
_MAGIC = b"rolemesh"


class TransferMismatchError(ValueError):
    """Ranks were about to exchange different things: names the peer and what differs.

    Nothing was moved. All ranks see it, and the transport can go on.
    """


def plan_digest(plan: Plan) -> bytes:
    """32 bytes, equal for equal plans: what travels between which ranks, as what, in which order.

    Args:
        plan: its local copies do not count: each rank's are its own.
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
    and two for what comes in, each of a bucket, and target tensors that are not whole yet.

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
            plan: the same on all ranks.
            rank: this rank.
            transport: between the ranks of the plan.
            timeout_s: seconds for each bucket to arrive.
            device: of the source tensors, of the buffers and of the target tensors.
            checks_bytes: send a CRC-32 of every piece and hold the arrived bytes to it. Costs a
                pass over the bytes on the host on either side. The same on all ranks.

        Raises:
            ValueError: the transport is another rank's, or smaller than the plan.
            ManifestError: a target tensor would hold two element types.
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
        self._digest = plan_digest(plan)
        self._rounds = [
            round_
            for number, bucket in enumerate(plan.buckets)
            if (round_ := self._round(bucket, f"bucket {number + 1} of {len(plan.buckets)}"))
        ]
        self._source = _shard(plan.source, rank)
        self._target = _shard(plan.target, rank)
        self._source_dtypes = _tensor_dtypes(plan.source, self._source)
        self._target_dtypes = _tensor_dtypes(plan.target, self._target)
        self._local: defaultdict[str, list[Copy]] = defaultdict(list)
        self._duplicates: defaultdict[str, list[Copy]] = defaultdict(list)
        self._num_parts: defaultdict[str, int] = defaultdict(int)
        if rank < plan.world_size:
            for copy in plan.local[rank]:
                self._local[copy.target_tensor].append(copy)
            for copy in plan.duplicates[rank]:
                self._duplicates[copy.source_tensor].append(copy)
                self._num_parts[copy.target_tensor] += 1
        for round_ in self._rounds:
            for parcel in round_.receives:
                for part in parcel.parts:
                    self._num_parts[part.copy.target_tensor] += 1
        covered: defaultdict[str, int] = defaultdict(int)
        for piece in self._target.pieces:
            covered[piece.tensor] += num_elements(piece.box)
        self._is_padded = {
            name: covered[name] < torch.Size(shape).numel()
            for name, shape in self._target.shapes.items()
        }

    def run(
        self, tensors: Mapping[str, torch.Tensor], *, policy_version: int = 0
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Transfers once. Every rank of the plan calls it and takes all that comes.

        Args:
            tensors: the source layout's tensors of this rank, by name. Read until the end.
            policy_version: of the weights; all ranks must name the same.

        Yields:
            Name and tensor of the target layout, each as soon as it is whole, then no longer held
            here. Rows of padding are 0.

        Raises:
            TransferMismatchError: ranks have different plans or policy versions.
            ManifestError: a source tensor is missing or is not what the layout says.
            TransferFailedError: a peer vanished or was late, or bytes arrived changed. What was
                yielded is one part of the weights and must not be used.
        """
        is_sound = False
        try:
            self._check_sources(tensors)
            self._greet(policy_version)
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
        arriving = _Arriving(self, tensors)
        outgoing = [self._buffer(round_.sends for round_ in self._rounds) for _ in range(2)]
        incoming = [self._buffer(round_.receives for round_ in self._rounds) for _ in range(2)]
        rounds = self._rounds
        under_way = _Sent(self, rounds[0], outgoing[0], incoming[0], tensors) if rounds else None
        if under_way is not None:
            under_way.start()
        yield from arriving.without_transfer()
        for number in range(len(rounds)):
            assert under_way is not None  # one for each round
            following = None
            if number + 1 < len(rounds):
                turn = (number + 1) % 2
                following = _Sent(self, rounds[number + 1], outgoing[turn], incoming[turn], tensors)
            arriving.prepare(rounds[number])
            under_way.wait()
            if following is not None:
                following.start()
            yield from arriving.unpack(rounds[number], incoming[number % 2])
            under_way = following

    def _greet(self, policy_version: int) -> None:
        """Holds the others' plan and version to this rank's, before anything moves."""
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
        for name, shape in self._source.shapes.items():
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
    ) -> None:
        self._transfer = transfer
        self._round = round_
        self._exchanges: list[Exchange] = []
        self._sends = [Message(parcel.peer, parcel.of(outgoing)) for parcel in round_.sends]
        self._receives = [Message(parcel.peer, parcel.of(incoming)) for parcel in round_.receives]
        pack(round_.sends, outgoing, tensors)
        self._sums: list[torch.Tensor] = []

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
                raise TransferFailedError(
                    f"{copy.box} of {copy.parameter} arrived with other bytes than were sent",
                    rank=self._transfer._rank,
                    peer=parcel.peer,
                    transport=self._transfer._transport.name,
                    waited_for=self._round.label,
                    seconds=deadline.elapsed_s,
                )


class _Arriving:
    """Target tensors that are not whole yet, in one run."""

    def __init__(self, transfer: WeightTransfer, tensors: Mapping[str, torch.Tensor]) -> None:
        self._transfer = transfer
        self._tensors = tensors
        self._num_parts = dict(transfer._num_parts)
        self._begun: dict[str, torch.Tensor] = {}

    def without_transfer(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors of which this rank holds everything itself."""
        for name in self._transfer._target.shapes:
            if name not in self._transfer._num_parts:
                yield name, self._take(name)

    def prepare(self, round_: Round) -> None:
        """Begins the tensors that a round brings something for."""
        for parcel in round_.receives:
            for part in parcel.parts:
                self._begin(part.copy.target_tensor)

    def unpack(self, round_: Round, incoming: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Puts what a round brought into its tensors; those that are whole then."""
        for parcel in round_.receives:
            for part in parcel.parts:
                name = part.copy.target_tensor
                put(self._begun[name], part, parcel.of(incoming))
                yield from self._count(name)

    def _count(self, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        """One more part of a tensor is there."""
        self._num_parts[name] -= 1
        if self._num_parts[name]:
            return
        for copy in self._transfer._duplicates.get(name, ()):
            self._begin(copy.target_tensor)
            copy_within(copy, self._begun[name], self._begun[copy.target_tensor])
            yield from self._count(copy.target_tensor)
        yield name, self._take(name)

    def _begin(self, name: str) -> torch.Tensor:
        if name not in self._begun:
            transfer = self._transfer
            make = torch.zeros if transfer._is_padded[name] else torch.empty
            tensor = make(
                tuple(transfer._target.shapes[name]),
                dtype=transfer._target_dtypes[name],
                device=transfer._device,
            )
            for copy in transfer._local[name]:
                copy_within(copy, self._tensors[copy.source_tensor], tensor)
            self._begun[name] = tensor
        return self._begun[name]

    def _take(self, name: str) -> torch.Tensor:
        self._begin(name)
        return self._begun.pop(name)


def _shard(layout: WeightLayout, rank: int) -> RankShard:
    return layout.ranks[rank] if rank < len(layout.ranks) else RankShard((), {})


def _tensor_dtypes(layout: WeightLayout, shard: RankShard) -> dict[str, torch.dtype]:
    """Element type of each tensor of a rank."""
    dtypes: dict[str, torch.dtype] = {}
    for piece in shard.pieces:
        dtype = TORCH_DTYPES[layout.dtype or layout.manifest[piece.parameter].dtype]
        if dtypes.setdefault(piece.tensor, dtype) != dtype:
            raise ManifestError(
                f"tensor {piece.tensor!r} would hold {dtypes[piece.tensor]} and, with "
                f"{piece.parameter!r}, {dtype}: give the layout one dtype"
            )
    for name in shard.shapes:
        # The last rank of an FSDP group may hold no rows of a parameter.
        if name not in dtypes:
            known = layout.dtype or (
                layout.manifest[name].dtype if name in layout.manifest else None
            )
            if known is None:
                raise ManifestError(
                    f"tensor {name!r} holds no parameter: give the layout a dtype, or leave it out"
                )
            dtypes[name] = TORCH_DTYPES[known]
    return dtypes
