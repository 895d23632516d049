"""The shared memory of a rank's publications, used again from one version to the next.

A new segment's pages have to be made and, for a GPU, locked, which takes about as long as the copy
into it. So the memory of a version that nobody reads any more serves a later one.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from rolemesh.engine.hardware.pinned_memory import pin
from rolemesh.engine.transport.slots.shm import Segment

MOST_SPARE = 2
"""Segments that wait: a sampler may still read the newest one's predecessor."""


@dataclass(frozen=True, slots=True)
class HeldSegment:
    """A segment that this process writes to, locked for a GPU's copies where it has one."""

    segment: Segment
    num_bytes: int
    device: torch.device
    unpin: Callable[[], None]

    def drop(self) -> None:
        """Gives the memory to the system, once no other process maps it."""
        self.unpin()
        self.segment.unlink()


class PublicationMemory:
    """Segments for one rank's publications. Thread-safe.

    Invariant: a segment whose contents another process may read is never written to. Who maps one
    holds a lock on it as long as any view lives, and a segment gets a new name before it is looked
    whether anybody does: a peer that comes late with the old name finds nothing.

    Example::

        memory = PublicationMemory()
        held = memory.take(1 << 20, torch.device("cuda", 0))
        held.segment.tensor().copy_(...)
        memory.give_back(held)  # for the next version
        memory.close()
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spare: list[HeldSegment] = []
        self._is_open = True
        # At the end of the process, after those of publications, which were made later.
        weakref.finalize(self, _drop_all, self._spare)

    def take(self, num_bytes: int, device: torch.device) -> HeldSegment:
        """A segment that nobody reads: one of before, or a new one.

        Args:
            num_bytes: Its size.
            device: From which will be copied.

        Raises:
            OSError: Shared memory is full.
        """
        with self._lock:
            self._is_open = True
            for held in list(self._spare):
                if (held.num_bytes, held.device) != (num_bytes, device):
                    self._spare.remove(held)
                    held.drop()
                elif held.segment.renew():
                    self._spare.remove(held)
                    return held
        segment = Segment.create(num_bytes)
        try:
            return HeldSegment(segment, num_bytes, device, pin(segment.tensor(), device))
        except BaseException:
            segment.unlink()
            raise

    def give_back(self, held: HeldSegment) -> None:
        """Takes a segment whose version is dropped, and which this process reads no more."""
        with self._lock:
            self._spare.append(held)
            while len(self._spare) > (MOST_SPARE if self._is_open else 0):
                self._spare.pop(0).drop()

    def close(self) -> None:
        """Gives all memory back, also what is given back later, until the next `take`."""
        with self._lock:
            self._is_open = False
            _drop_all(self._spare)


def _drop_all(spare: list[HeldSegment]) -> None:
    while spare:
        spare.pop().drop()
