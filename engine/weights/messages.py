"""Messages between two ranks in one round: pieces of weights, packed.

Packing and unpacking only: who sends what is `plan`'s, when is `transfer`'s.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from rolemesh.engine.layout.manifest import ITEM_BYTES, DtypeName
from rolemesh.engine.layout.payload import aligned
from rolemesh.engine.weights.plan import Copy, Plan

TORCH_DTYPES: Mapping[DtypeName, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Element types by their names in manifests."""


@dataclass(frozen=True, slots=True)
class Part:
    """A copy in a message."""

    copy: Copy
    """What it is."""
    dtype: torch.dtype
    """Element type on the way."""
    start: int
    """First byte in the message."""
    stop: int
    """Byte after the last."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """What goes to or comes from one peer in one round."""

    peer: int
    """Rank."""
    parts: tuple[Part, ...]
    """In the order in which they lie in the message."""
    start: int
    """Where the message begins in the round's buffer."""
    num_bytes: int
    """Of the message."""

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        """uint8 [num_bytes] of the round's buffer."""
        return buffer[self.start : self.start + self.num_bytes]


@dataclass(frozen=True, slots=True)
class Round:
    """One rank's side of a bucket."""

    label: str
    """For error messages."""
    sends: tuple[Parcel, ...]
    """One for each peer that is sent something."""
    receives: tuple[Parcel, ...]
    """One for each peer that sends something."""


def make_parcels(plan: Plan, copies_by_peer: Mapping[int, Sequence[Copy]]) -> tuple[Parcel, ...]:
    """Lays out a message for each peer, one behind the other in the round's buffer.

    Both ends come to the same layout of a message from the plan alone.

    Args:
        plan: says in which element type a parameter travels.
        copies_by_peer: of one round, in the plan's order.
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
            parts.append(Part(copy, TORCH_DTYPES[plan.wire_dtype(copy.parameter)], at, stop))
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
        parcels: of one round.
        outgoing: uint8, the round's buffer.
        tensors: the source layout's, of this rank.
    """
    for parcel in parcels:
        message = parcel.of(outgoing)
        for part in parcel.parts:
            source = tensors[part.copy.source_tensor]
            held = source[_slices(part.copy.source_origin, part.copy)]
            message[part.start : part.stop].view(part.dtype).view(held.shape).copy_(held)


@torch.no_grad()
def put(tensor: torch.Tensor, part: Part, message: torch.Tensor) -> None:
    """Writes a part of a message to its place in a target tensor."""
    into = tensor[_slices(part.copy.target_origin, part.copy)]
    into.copy_(message[part.start : part.stop].view(part.dtype).view(into.shape))


@torch.no_grad()
def copy_within(copy: Copy, source: torch.Tensor, target: torch.Tensor) -> None:
    """Carries out a copy between two tensors of one rank."""
    part = source[_slices(copy.source_origin, copy)]
    target[_slices(copy.target_origin, copy)].copy_(part)


def checksums(parcel: Parcel, message: torch.Tensor) -> torch.Tensor:
    """uint8 [4 * parts], on the CPU: CRC-32 of the bytes of each part."""
    data = message.cpu().numpy().data
    sums = [zlib.crc32(data[part.start : part.stop]) for part in parcel.parts]
    return torch.frombuffer(bytearray(struct.pack(f"<{len(sums)}I", *sums)), dtype=torch.uint8)


def _slices(origin: tuple[int, ...], copy: Copy) -> tuple[slice, ...]:
    """Where a copy lies in the tensor in which its box begins at `origin`."""
    return tuple(
        slice(at, at + stop - start) for at, (start, stop) in zip(origin, copy.box, strict=True)
    )
