"""Messages between ranks of one host through POSIX shared memory, without a GPU."""

from __future__ import annotations

import numpy as np
import torch

from rolemesh.engine.transport.rings.ring import RingTransport
from rolemesh.engine.transport.rings.ring_slots import NUM_SLOTS, Copying, Slots
from rolemesh.engine.transport.slots.shm import PeerSegment, Segment, host_identity

SLOT_BYTES = 1 << 20
"""Small enough that what the sender wrote is still in the cache when the receiver reads it."""


def shm_ring_transport(
    rank: int, world_size: int, *, slot_bytes: int = SLOT_BYTES
) -> RingTransport:
    """A rank's end; `connect` it with the offers of all ranks.

    Args:
        rank: This rank.
        world_size: Ranks in all, at least 2.
        slot_bytes: bytes of one slot, the same on all ranks. Memory: 2 slots a peer.

    Raises:
        ValueError: Fewer than 2 ranks, or a slot of no bytes.
        OSError: Shared memory is full or not available.
    """
    if world_size < 2 or slot_bytes < 1:
        raise ValueError(
            f"world_size is {world_size} and slot_bytes {slot_bytes}: give at least 2 and 1"
        )
    slots = HostSlots(rank, world_size, slot_bytes)
    return RingTransport(rank, world_size, slots, slot_bytes=slot_bytes)


class HostSlots(Slots):
    """Slots in a shared memory segment of this rank."""

    name = "shared memory"

    def __init__(self, rank: int, world_size: int, slot_bytes: int) -> None:
        self._rank = rank
        self._shape = (world_size, NUM_SLOTS, slot_bytes)
        self._num_bytes = world_size * NUM_SLOTS * slot_bytes
        self._segment = Segment.create(self._num_bytes)
        self._own = np.frombuffer(self._segment.buffer, dtype=np.uint8).reshape(self._shape)
        self._peers: dict[int, PeerSegment] = {}
        self._theirs: dict[int, np.ndarray[tuple[int, ...], np.dtype[np.uint8]]] = {}

    @property
    def handle(self) -> str:
        """The segment's name."""
        return self._segment.name

    @property
    def place(self) -> str:
        """The host."""
        return host_identity()

    def open(self, peer: int, handle: str) -> None:
        """Maps a peer's segment."""
        segment = PeerSegment(handle, self._num_bytes)
        self._peers[peer] = segment
        self._theirs[peer] = np.frombuffer(segment.view, dtype=np.uint8).reshape(self._shape)

    def all_opened(self) -> None:
        """Removes the segment's name."""
        self._segment.forget_name()

    def write(self, peer: int, slot: int, source: torch.Tensor) -> Copying | None:
        """Copies at once; source: uint8 [bytes]."""
        np.copyto(self._own[peer, slot, : source.numel()], source.numpy())
        return None

    def read(self, peer: int, slot: int, target: torch.Tensor) -> Copying | None:
        """Copies at once; target: uint8 [bytes]."""
        np.copyto(target.numpy(), self._theirs[peer][self._rank, slot, : target.numel()])
        return None

    def close(self) -> None:
        """Unmaps, and removes the name where it still exists."""
        for segment in self._peers.values():
            segment.close()
        self._theirs.clear()
        self._segment.unlink()
