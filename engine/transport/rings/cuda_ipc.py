"""Messages between ranks on one GPU, through a staging buffer that they share by CUDA IPC.

The ring protocol of `engine/transport/rings/ring.py` with its slots in device memory. Handles are
64 raw bytes, opened by the runtime; torch's own way to share CUDA tensors goes through pickle.
Calls only, not verified on a GPU yet.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from rolemesh.engine.transport.cuda_queue import DeviceQueue, Mark
from rolemesh.engine.transport.rendezvous import OfferInvalidError
from rolemesh.engine.transport.rings.ring import RingTransport
from rolemesh.engine.transport.rings.ring_slots import NUM_SLOTS, Copying, Slots

HANDLE_BYTES = 64
"""sizeof(cudaIpcMemHandle_t)."""

SLOT_BYTES = 16 << 20
"""Large enough that a copy takes much longer than its launch and the counters' round trip."""

_DEVICE_TO_DEVICE = 3
_LAZY_PEER_ACCESS = 1


def load_runtime() -> Any:
    """The module `cupy.cuda.runtime`.

    Raises:
        OSError: Cupy is not installed.
    """
    try:
        return importlib.import_module("cupy.cuda.runtime")
    except ImportError as error:
        raise OSError(
            f"cupy is not available ({error}): install rolemesh[gpu], or cupy of the same CUDA "
            "version as torch"
        ) from error


def cuda_ipc_transport(
    rank: int,
    world_size: int,
    *,
    queue: DeviceQueue,
    device_uuid: str,
    slot_bytes: int = SLOT_BYTES,
    runtime: Any | None = None,
) -> RingTransport:
    """A rank's end; `connect` it with the offers of all ranks.

    Args:
        rank: This rank.
        world_size: Ranks in all, at least 2, all on this device.
        queue: Where the copies are queued.
        device_uuid: Tells devices apart: `torch.cuda.get_device_properties(device).uuid`.
        slot_bytes: bytes of one slot, the same on all ranks. Device memory: 2 slots a peer.
        runtime: A stand-in for `cupy.cuda.runtime`.

    Raises:
        ValueError: Fewer than 2 ranks, or a slot of no bytes.
        OSError: Cupy is not installed, or shared memory is not available.
    """
    if world_size < 2 or slot_bytes < 1:
        raise ValueError(
            f"world_size is {world_size} and slot_bytes {slot_bytes}: give at least 2 and 1"
        )
    loaded = load_runtime() if runtime is None else runtime
    slots = CudaSlots(rank, world_size, slot_bytes, queue, device_uuid, loaded)
    return RingTransport(rank, world_size, slots, slot_bytes=slot_bytes)


class _CudaCopying(Copying):
    def __init__(self, mark: Mark) -> None:
        self._mark = mark

    def is_done(self) -> bool:
        return self._mark.query()


class CudaSlots(Slots):
    """Slots in device memory of this rank.

    Memory comes from cudaMalloc itself: an IPC handle names a whole allocation, and torch's
    expandable segments have none. A chunk counts as written, or taken, when the copy's event has
    passed, so that no rank ever waits for an event of another process.
    """

    name = "CUDA IPC"

    def __init__(
        self,
        rank: int,
        world_size: int,
        slot_bytes: int,
        queue: DeviceQueue,
        device_uuid: str,
        runtime: Any,
    ) -> None:
        self._rank = rank
        self._slot_bytes = slot_bytes
        self._queue = queue
        self._device_uuid = device_uuid
        self._runtime = runtime
        queue.use_device()
        self._own: int = runtime.malloc(world_size * NUM_SLOTS * slot_bytes)
        self._handle = bytes(runtime.ipcGetMemHandle(self._own))
        self._theirs: dict[int, int] = {}
        self._is_closed = False

    @property
    def handle(self) -> str:
        """The cudaIpcMemHandle_t in hex."""
        return self._handle.hex()

    @property
    def place(self) -> str:
        """The device."""
        return self._device_uuid

    def open(self, peer: int, handle: str) -> None:
        """Maps a peer's memory."""
        try:
            raw = bytes.fromhex(handle)
        except ValueError as error:
            raise OfferInvalidError(f"rank {peer}'s handle is not hex: {error}") from error
        if len(raw) != HANDLE_BYTES:
            raise OfferInvalidError(
                f"rank {peer}'s handle has {len(raw)} bytes, not {HANDLE_BYTES}"
            )
        self._theirs[peer] = self._runtime.ipcOpenMemHandle(raw, _LAZY_PEER_ACCESS)

    def start(self) -> None:
        """Copies of the round come after what the caller has queued."""
        self._queue.wait_for_caller()

    def write(self, peer: int, slot: int, source: torch.Tensor) -> Copying | None:
        """Queues the copy; source: uint8 [bytes]."""
        return self._copy(self._address(self._own, peer, slot), source.data_ptr(), source.numel())

    def read(self, peer: int, slot: int, target: torch.Tensor) -> Copying | None:
        """Queues the copy; target: uint8 [bytes]."""
        address = self._address(self._theirs[peer], self._rank, slot)
        return self._copy(target.data_ptr(), address, target.numel())

    def close(self) -> None:
        """Unmaps and frees."""
        if self._is_closed:
            return
        self._is_closed = True
        for address in self._theirs.values():
            self._runtime.ipcCloseMemHandle(address)
        self._runtime.free(self._own)

    def _address(self, base: int, peer: int, slot: int) -> int:
        return base + (peer * NUM_SLOTS + slot) * self._slot_bytes

    def _copy(self, target: int, source: int, num_bytes: int) -> Copying:
        self._queue.use_device()
        self._runtime.memcpyAsync(target, source, num_bytes, _DEVICE_TO_DEVICE, self._queue.pointer)
        return _CudaCopying(self._queue.mark())
