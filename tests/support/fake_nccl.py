"""`cupy.cuda.nccl`, `cupy.cuda.runtime` and a CUDA stream, played by threads over host memory.

The fake NCCL keeps NCCL's rules: a communicator exists once all ranks asked for it; sends and
receives are queued on a stream by a group's end and run later; between two ranks they pair up in
order and must agree on count and type; an aborted operation ends without an error and without
data. Breaches are noted in `FakeFabric.breaches`.
"""

from __future__ import annotations

import ctypes
import queue
import secrets
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_QUEUES: dict[int, FakeQueue] = {}


class FakeQueue:
    """A CUDA stream: runs work in order, in a thread of its own."""

    def __init__(self) -> None:
        self.pointer = 0x5000 + len(_QUEUES)
        _QUEUES[self.pointer] = self
        self.calls: list[str] = []
        self.num_done = 0
        self._num_queued = 0
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, work: Callable[[], None]) -> None:
        self._num_queued += 1
        self._work.put(work)

    def wait_for_caller(self) -> None:
        self.calls.append("wait_for_caller")

    def mark(self) -> FakeMark:
        self.calls.append("mark")
        return FakeMark(self, self._num_queued)

    def use_device(self) -> None:
        return

    def _run(self) -> None:
        while True:
            self._work.get()()
            self.num_done += 1


@dataclass
class FakeMark:
    queue: FakeQueue
    num_queued: int

    def query(self) -> bool:
        return self.queue.num_done >= self.num_queued


@dataclass(frozen=True)
class Operation:
    """One send or receive as a rank issued it."""

    kind: str
    rank: int
    peer: int
    count: int
    dtype: int
    group: int
    """Number of the rank's group call."""


@dataclass
class FakeFabric:
    """What all ranks' fakes share."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    members: defaultdict[bytes, set[int]] = field(default_factory=lambda: defaultdict(set))
    parcels: defaultdict[tuple[int, int], deque[tuple[Operation, bytes]]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    operations: list[Operation] = field(default_factory=list)
    breaches: list[str] = field(default_factory=list)

    def check_pairing(self) -> None:
        """Holds all calls to the rule that makes grouped calls safe.

        Between two ranks, the sends of one of the sender's groups are the receives of one of the
        receiver's groups, with the same counts in the same order.
        """
        assert self.breaches == []
        pairs = {
            (operation.rank, operation.peer)
            for operation in self.operations
            if operation.kind == "send"
        } | {
            (operation.peer, operation.rank)
            for operation in self.operations
            if operation.kind == "recv"
        }
        for source, target in pairs:
            assert self._groups("send", source, target) == self._groups("recv", target, source)

    def _groups(self, kind: str, rank: int, peer: int) -> list[list[tuple[int, int]]]:
        groups: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for operation in self.operations:
            if (operation.kind, operation.rank, operation.peer) == (kind, rank, peer):
                groups[operation.group].append((operation.count, operation.dtype))
        return [groups[number] for number in sorted(groups)]


class FakeNccl:
    """One rank's module `cupy.cuda.nccl`."""

    NCCL_UINT8 = 1

    def __init__(self, fabric: FakeFabric, *, version: int = 23007) -> None:
        self.fabric = fabric
        self.version = version
        self.group: list[Callable[[], None]] | None = None
        self.num_groups = 0
        self.async_error = ""

    def get_version(self) -> int:
        return self.version

    def get_unique_id(self) -> bytes:
        return secrets.token_bytes(128)

    def groupStart(self) -> None:
        if self.group is not None:
            self.fabric.breaches.append("groupStart within a group")
        self.group = []

    def groupEnd(self) -> None:
        if self.group is None:
            self.fabric.breaches.append("groupEnd without groupStart")
            return
        started, self.group = self.group, None
        self.num_groups += 1
        for start in started:
            start()

    def NcclCommunicator(self, ndev: int, uid: Any, rank: int) -> FakeCommunicator:
        if not isinstance(uid, bytes):
            raise TypeError(f"unique id is {type(uid)}")
        members = self.fabric.members[uid]
        with self.fabric.changed:
            members.add(rank)
            self.fabric.changed.notify_all()
            # As NCCL: without end when a rank does not come.
            while len(members) < ndev:
                self.fabric.changed.wait()
        return FakeCommunicator(self, rank)


class FakeCommunicator:
    """One rank's communicator."""

    def __init__(self, nccl: FakeNccl, rank: int) -> None:
        self.nccl = nccl
        self.rank = rank
        self.is_aborted = False
        self.is_destroyed = False

    def send(self, pointer: int, count: int, dtype: int, peer: int, stream: int) -> None:
        operation = self._note("send", peer, count, dtype)

        def run() -> None:
            data = ctypes.string_at(pointer, count)
            with self.nccl.fabric.changed:
                self.nccl.fabric.parcels[self.rank, peer].append((operation, data))
                self.nccl.fabric.changed.notify_all()

        self._queue(lambda: _QUEUES[stream].submit(run))

    def recv(self, pointer: int, count: int, dtype: int, peer: int, stream: int) -> None:
        self._note("recv", peer, count, dtype)
        fabric = self.nccl.fabric

        def run() -> None:
            parcels = fabric.parcels[peer, self.rank]
            with fabric.changed:
                while not parcels and not self.is_aborted:
                    fabric.changed.wait()
                if self.is_aborted:
                    return
                sent, data = parcels.popleft()
            if (sent.count, sent.dtype) != (count, dtype):
                fabric.breaches.append(f"{sent} is received as {count} of type {dtype}")
            ctypes.memmove(pointer, data, min(count, sent.count))

        self._queue(lambda: _QUEUES[stream].submit(run))

    def check_async_error(self) -> None:
        if self.nccl.async_error:
            raise RuntimeError(self.nccl.async_error)

    def abort(self) -> None:
        with self.nccl.fabric.changed:
            self.is_aborted = True
            self.nccl.fabric.changed.notify_all()

    def destroy(self) -> None:
        self.is_destroyed = True

    def _note(self, kind: str, peer: int, count: int, dtype: int) -> Operation:
        operation = Operation(kind, self.rank, peer, count, dtype, self.nccl.num_groups)
        self.nccl.fabric.operations.append(operation)
        if self.nccl.group is None:
            self.nccl.fabric.breaches.append(f"{operation} outside a group")
        return operation

    def _queue(self, start: Callable[[], None]) -> None:
        if self.nccl.group is not None:
            self.nccl.group.append(start)


_MEMORY: dict[int, Any] = {}
_HANDLES: dict[bytes, int] = {}


class FakeRuntime:
    """One rank's module `cupy.cuda.runtime`: device memory is host memory."""

    def malloc(self, num_bytes: int) -> int:
        buffer = ctypes.create_string_buffer(num_bytes)
        address = ctypes.addressof(buffer)
        _MEMORY[address] = buffer
        return address

    def free(self, address: int) -> None:
        assert address in _MEMORY  # kept: a peer may still look at it

    def ipcGetMemHandle(self, address: int) -> bytes:
        handle = secrets.token_bytes(64)
        _HANDLES[handle] = address
        return handle

    def ipcOpenMemHandle(self, handle: bytes, flags: int) -> int:
        assert flags == 1
        return _HANDLES[handle]

    def ipcCloseMemHandle(self, address: int) -> None:
        assert address in _MEMORY

    def memcpyAsync(self, target: int, source: int, num_bytes: int, kind: int, stream: int) -> None:
        assert kind == 3

        def run() -> None:
            time.sleep(1e-5)  # so that a copy taken for done too early shows
            ctypes.memmove(target, source, num_bytes)

        _QUEUES[stream].submit(run)
