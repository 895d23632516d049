"""Messages between two ranks in one round: pieces of weights, packed.

This module only packs and unpacks. `plan` decides which rank sends what, `transfer` decides when.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from rolemesh.engine.layout.manifest import ITEM_BYTES
from rolemesh.engine.layout.payload import aligned
from rolemesh.engine.transport.base import Message
from rolemesh.engine.weights.copies import Copy
from rolemesh.engine.weights.plan import Plan
from rolemesh.engine.weights.sharded_tensors import TORCH_DTYPES, part


@dataclass(frozen=True, slots=True)
class CopySpan:
    """A copy in a message."""

    copy: Copy
    """What it is."""
    dtype: torch.dtype
    """Element type on the way."""
    start: int
    """First byte in the message."""
    stop: int
    """Byte after the last."""

    def values(self, message: torch.Tensor) -> torch.Tensor:
        """The view of a message, uint8 [bytes], that holds the box; shaped as the box."""
        sizes = tuple(stop - start for start, stop in self.copy.box)
        return message[self.start : self.stop].view(self.dtype).view(sizes)


@dataclass(frozen=True, slots=True)
class Parcel:
    """What goes to or comes from one peer in one round."""

    peer: int
    """The other rank."""
    parts: tuple[CopySpan, ...]
    """What the message holds, in this order."""
    start: int
    """Where the message begins in the round's buffer."""
    num_bytes: int
    """Length of the message."""

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        """uint8 [num_bytes] of the round's buffer."""
        return buffer[self.start : self.start + self.num_bytes]


@dataclass(frozen=True, slots=True)
class Round:
    """One rank's side of a bucket."""

    label: str
    """Name of the round in error messages."""
    sends: tuple[Parcel, ...]
    """One for each peer that is sent something."""
    receives: tuple[Parcel, ...]
    """One for each peer that sends something."""


def make_parcels(plan: Plan, copies_by_peer: Mapping[int, Sequence[Copy]]) -> tuple[Parcel, ...]:
    """Lays out a message for each peer, one behind the other in the round's buffer.

    Both ends come to the same layout of a message from the plan alone.

    Args:
        plan: Says in which element type a parameter travels.
        copies_by_peer: Of one round, in the plan's order.
    """
    parcels = []
    start = 0
    for peer, copies in copies_by_peer.items():
        parts = []
        at = 0
        # Wide elements first (otherwise in the plan's order), so that each piece is aligned
        # to its own element type.
        for copy in sorted(copies, key=lambda copy: -ITEM_BYTES[plan.wire_dtype(copy.parameter)]):
            stop = at + plan.wire_bytes(copy)
            parts.append(CopySpan(copy, TORCH_DTYPES[plan.wire_dtype(copy.parameter)], at, stop))
            at = stop
        parcels.append(Parcel(peer, tuple(parts), start, at))
        start += aligned(at)  # in the buffer only: the gap is not sent
    return tuple(parcels)


def buffer_bytes(rounds: Iterable[Sequence[Parcel]]) -> int:
    """Size of a buffer that holds the messages of any of the rounds."""
    sizes = [parcel.start + parcel.num_bytes for parcels in rounds for parcel in parcels]
    return max(sizes, default=0)


@torch.no_grad()
def pack(
    parcels: Sequence[Parcel], outgoing: torch.Tensor, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Puts parts into messages, in the element type of the way.

    Args:
        parcels: Of one round.
        outgoing: uint8 [bytes], the round's buffer.
        tensors: Of this rank by name, floating, shaped as the source layout says.
    """
    for parcel in parcels:
        for carried in parcel.parts:
            carried.values(parcel.of(outgoing)).copy_(_held(carried.copy, tensors))


@torch.no_grad()
def lend(
    parcels: Sequence[Parcel], outgoing: torch.Tensor, tensors: Mapping[str, torch.Tensor]
) -> list[Message]:
    """Messages that are the parts themselves where they lie, one each; for transports with views.

    Only what travels in another element type than it is held in, or is held column by column, is
    packed. Arguments as of `pack`; the tensors must stay as they are until the messages arrived.
    """
    messages = []
    for parcel in parcels:
        for carried in parcel.parts:
            held = _held(carried.copy, tensors)
            lent = byte_view(held, carried.dtype)
            if lent is None:
                carried.values(parcel.of(outgoing)).copy_(held)
                lent = parcel.of(outgoing)[carried.start : carried.stop]
            messages.append(Message(parcel.peer, lent))
    return messages


def byte_view(held: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """A tensor of any shape as a view of uint8 that may travel as `dtype`; None if none could."""
    if held.dtype != dtype or (held.dim() and held.stride(-1) != 1):
        return None
    view = held.detach()
    return (view if view.dim() else view.reshape(1)).view(torch.uint8)


def _held(copy: Copy, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return part(tensors[copy.source_tensor], copy.source_origin, copy.box)


def checksums(parcel: Parcel, message: torch.Tensor) -> torch.Tensor:
    """uint8 [4 * parts], on the CPU: CRC-32 of the bytes of each part."""
    data = message.cpu().numpy().data
    sums = [zlib.crc32(data[carried.start : carried.stop]) for carried in parcel.parts]
    return torch.frombuffer(bytearray(struct.pack(f"<{len(sums)}I", *sums)), dtype=torch.uint8)
