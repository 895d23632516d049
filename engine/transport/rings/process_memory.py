"""Messages that a receiver copies straight out of the sender's own memory, on one host.

The ring protocol of `engine/transport/rings/ring.py`, whose slots hold where the bytes lie instead
of the bytes: `process_vm_readv` of Linux copies each byte once, from any memory of a process of
the same user. MPI libraries call the same way cross-memory attach.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from rolemesh.engine.transport.rendezvous import OfferInvalidError
from rolemesh.engine.transport.rings.ring import RingTransport
from rolemesh.engine.transport.rings.ring_slots import Copying, Slots
from rolemesh.engine.transport.slots.shm import PeerSegment, Segment, host_identity

_WHOLE_MESSAGES = 1 << 62
"""Bytes of a chunk: what is only named needs no parts."""

_MAX_DIMS = 8
_WORDS = 2 + 2 * _MAX_DIMS
"""int64 words of a slot: address, bytes of a run, then sizes and strides of the outer dimensions,
filled up with 1 and 0."""

_IOV_MAX = 1024
"""Most runs on each side of one call, a limit of Linux."""
_MOST_BYTES = 1 << 30
"""Most bytes of one call: Linux takes a little less than 2 GiB."""
_PR_SET_PTRACER = 0x59616D61

_READ_ARGUMENTS = (
    ctypes.c_int,
    *(ctypes.c_void_p, ctypes.c_ulong),
    *(ctypes.c_void_p, ctypes.c_ulong),
    ctypes.c_ulong,
)

_LIBC = ctypes.CDLL(None, use_errno=True)


def process_memory_transport(rank: int, world_size: int) -> RingTransport:
    """A rank's end; `connect` it with the offers of all ranks, which fails where one may not read.

    Messages may be views of rows (see `Transport.takes_views`).

    Args:
        rank: This rank.
        world_size: Ranks in all, at least 2.

    Raises:
        ValueError: Fewer than 2 ranks.
        OSError: Shared memory is full or not available, or this is no Linux.
    """
    if world_size < 2:
        raise ValueError(f"world_size is {world_size}: give at least 2")
    slots = MemorySlots(rank, world_size)
    return RingTransport(rank, world_size, slots, slot_bytes=_WHOLE_MESSAGES)


class MemorySlots(Slots):
    """Slots that say where a message lies in the sender's memory.

    Example: a float32 view of 2 rows and 3 of 8 columns at address 4096 stands in its slot as
    address 4096, runs of 12 bytes, outer sizes (2, 1, ...) and strides (32, 0, ...).
    """

    name = "process memory"
    num_slots = 64
    copies_in = False
    takes_views = True

    def __init__(self, rank: int, world_size: int) -> None:
        if not hasattr(_LIBC, "process_vm_readv"):
            raise OSError("process_vm_readv is missing: it is for Linux; use shared memory")
        _LIBC.process_vm_readv.restype = ctypes.c_ssize_t
        _LIBC.process_vm_readv.argtypes = _READ_ARGUMENTS
        self._rank = rank
        self._shape = (world_size, self.num_slots, _WORDS)
        self._num_bytes = 8 * world_size * self.num_slots * _WORDS
        self._segment = Segment.create(self._num_bytes)
        self._own = np.frombuffer(self._segment.buffer, dtype=np.int64).reshape(self._shape)
        self._peers: dict[int, PeerSegment] = {}
        self._theirs: dict[int, npt.NDArray[np.int64]] = {}
        self._pids: dict[int, int] = {}
        # What peers read to see that they may: 16 bytes that no other memory holds by chance.
        self._token = np.frombuffer(bytearray(os.urandom(16)), dtype=np.uint8)
        _allow_reading()

    @property
    def handle(self) -> str:
        """The segment's name, this process, and the place and bytes of the token."""
        address, token = self._token.ctypes.data, self._token.tobytes().hex()
        return f"{self._segment.name} {os.getpid()} {address} {token}"

    @property
    def place(self) -> str:
        """The host, and the namespace in which process ids mean something."""
        return f"{host_identity()} {os.readlink('/proc/self/ns/pid')}"

    def open(self, peer: int, handle: str) -> None:
        """Maps a peer's slots, and tries to read its memory."""
        try:
            name, pid, address, token = handle.split(" ")
            self._pids[peer], at, expected = int(pid), int(address), bytes.fromhex(token)
        except ValueError as error:
            raise OfferInvalidError(f"rank {peer}'s handle {handle!r} is not ours") from error
        segment = PeerSegment(name, self._num_bytes)
        self._peers[peer] = segment
        self._theirs[peer] = np.frombuffer(segment.view, dtype=np.int64).reshape(self._shape)
        found = np.zeros(len(expected), dtype=np.uint8)
        try:
            _read(self._pids[peer], _Runs(at, found.size), _Runs(found.ctypes.data, found.size))
        except OSError as error:
            raise OSError(
                f"this process may not read the memory of rank {peer} (process "
                f"{self._pids[peer]}): {error.strerror}. It needs the same user, and a kernel and "
                "container that allow process_vm_readv between them"
            ) from error
        if found.tobytes() != expected:
            raise OfferInvalidError(
                f"process {self._pids[peer]} is not rank {peer}: other bytes lie at its token"
            )

    def all_opened(self) -> None:
        """Removes the segment's name."""
        self._segment.forget_name()

    def write(self, peer: int, slot: int, source: torch.Tensor) -> Copying | None:
        """Says where the source lies, a view of uint8; nothing is copied."""
        self._own[peer, slot] = _Runs.of(source).words()
        return None

    def read(self, peer: int, slot: int, target: torch.Tensor) -> Copying | None:
        """Copies from the peer's memory at once into a target, a view of uint8."""
        source = _Runs.from_words(self._theirs[peer][self._rank, slot])
        try:
            _read(self._pids[peer], source, _Runs.of(target))
        except ProcessLookupError:
            return _NeverDone()
        return None

    def close(self) -> None:
        """Unmaps, and removes the name where it still exists."""
        for segment in self._peers.values():
            segment.close()
        self._theirs.clear()
        self._segment.unlink()


class _NeverDone(Copying):
    """A copy out of a process that has ended: the ring notices its end, and names the rank."""

    def is_done(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class _Runs:
    """Memory as runs of equal length, in order; all numbers are bytes."""

    address: int
    run: int
    sizes: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()

    @classmethod
    def of(cls, view: torch.Tensor) -> _Runs:
        """Those of a view, uint8 of any shape with unit stride in its last dimension."""
        shape, strides = tuple(view.shape), view.stride()
        run, outer = 1, len(shape)
        while outer and (shape[outer - 1] == 1 or strides[outer - 1] == run):
            outer -= 1
            run *= shape[outer]
        return cls(view.data_ptr(), run, shape[:outer], strides[:outer])

    def words(self) -> npt.NDArray[np.int64]:
        """As int64 [_WORDS]."""
        free = _MAX_DIMS - len(self.sizes)
        if free < 0:
            raise ValueError(f"a view of {len(self.sizes)} dimensions of runs: give {_MAX_DIMS}")
        sizes, strides = (*self.sizes, *[1] * free), (*self.strides, *[0] * free)
        return np.array((self.address, self.run, *sizes, *strides), dtype=np.int64)

    @classmethod
    def from_words(cls, words: npt.NDArray[np.int64]) -> _Runs:
        address, run, *rest = words.tolist()
        dims = sum(size > 1 for size in rest[:_MAX_DIMS])
        return cls(address, run, tuple(rest[:dims]), tuple(rest[_MAX_DIMS : _MAX_DIMS + dims]))

    @property
    def num_bytes(self) -> int:
        return self.run * math.prod(self.sizes)

    def vectors(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """int64 [runs, 2]: address and length of what holds bytes `start` to `stop` of it."""
        if not self.sizes:
            return np.array(((self.address + start, stop - start),), dtype=np.int64)
        first, last = start // self.run, -(-stop // self.run)
        numbers = np.arange(first, last, dtype=np.int64)
        vectors = np.full((len(numbers), 2), self.run, dtype=np.int64)
        vectors[:, 0] = self.address
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            numbers, index = np.divmod(numbers, size)
            vectors[:, 0] += index * stride
        skipped = start - first * self.run
        vectors[0] += (skipped, -skipped)
        vectors[-1, 1] -= last * self.run - stop
        return vectors

    def reach(self, start: int) -> int:
        """Up to which byte one call gets from `start`."""
        return (start // self.run + _IOV_MAX) * self.run


def _read(pid: int, source: _Runs, target: _Runs) -> None:
    """Copies memory of another process into this one's.

    Raises:
        ProcessLookupError: It has ended.
        OSError: It may not be read, or has no such memory.
    """
    at, total = 0, target.num_bytes
    while at < total:
        stop = min(total, source.reach(at), target.reach(at), at + _MOST_BYTES)
        into, out_of = target.vectors(at, stop), source.vectors(at, stop)
        copied = _LIBC.process_vm_readv(
            pid, into.ctypes.data, len(into), out_of.ctypes.data, len(out_of), 0
        )
        if copied <= 0:
            code = ctypes.get_errno() if copied < 0 else errno.EFAULT
            raise OSError(code, os.strerror(code))
        at += copied


def _allow_reading() -> None:
    """Lets the family of this process read its memory, where Yama allows parents only.

    Ranks are children of one agent: its descendants may read from now on, other processes may not
    (ptrace_scope 1, the default of some distributions). Without Yama the call does nothing.
    """
    _LIBC.prctl(
        ctypes.c_int(_PR_SET_PTRACER),
        ctypes.c_ulong(os.getppid()),
        *(ctypes.c_ulong(0) for _ in range(3)),
    )
