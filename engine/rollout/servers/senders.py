"""The sending end of a broadcast of weights to the workers of servers.

NCCL through `cupy.cuda.nccl`. Not verified on a GPU: the calls are held to vLLM's order by fakes.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from typing import Any

import torch

from rolemesh.engine.transport.base import Deadline
from rolemesh.engine.transport.cuda_queue import DeviceQueue
from rolemesh.engine.transport.groups.nccl import load_nccl

_POLL_S = 1e-3
_JOIN_S = 0.05


class BroadcastFailedError(RuntimeError):
    """The workers of the servers did not get the weights."""


class WeightSender(ABC):
    """Rank 0 of a group whose other ranks are workers of servers.

    Invariant: after a failure, or `abort` from any thread, the group is gone, and what waits in it
    ends with an error. `connect` makes the next one. Everything but `abort` is called by one thread
    at a time.
    """

    @abstractmethod
    def unique_id(self) -> bytes:
        """Names a new group; 128 bytes, which all ranks need to join."""

    @abstractmethod
    def connect(self, unique_id: bytes, world_size: int, *, timeout_s: float) -> None:
        """Joins a group, together with all others.

        Args:
            unique_id: Of the group.
            world_size: Ranks in all, this one included.
            timeout_s: Within which all have to come.

        Raises:
            BroadcastFailedError: They did not.
        """

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor) -> None:
        """Queues a tensor for all others: contiguous, on the device.

        Raises:
            BroadcastFailedError: The group is gone.
        """

    @abstractmethod
    def wait(self, *, timeout_s: float) -> None:
        """Waits until all that was queued has gone.

        Raises:
            BroadcastFailedError: It has not, in time.
        """

    @abstractmethod
    def abort(self) -> None:
        """Leaves the group without asking the others."""


class NcclSender(WeightSender):
    """The group as an NCCL communicator. Not verified on a GPU.

    vLLM's workers issue an all_reduce of one float32 right after they joined, and so does this: a
    communicator whose ranks issue different operations hangs.
    """

    def __init__(
        self, queue: DeviceQueue, device: torch.device, *, nccl: Any | None = None
    ) -> None:
        """Loads NCCL.

        Args:
            queue: Where broadcasts are queued.
            device: Of the tensors.
            nccl: A stand-in for `cupy.cuda.nccl`.

        Raises:
            OSError: Cupy is not installed.
        """
        self._nccl = load_nccl() if nccl is None else nccl
        self._queue = queue
        self._device = device
        self._communicator: Any = None
        self._lock = threading.Lock()
        self._given_up = threading.Event()
        self._sending: list[torch.Tensor] = []
        """What the device reads until the next mark."""

    def unique_id(self) -> bytes:
        """NCCL's own."""
        found: bytes = self._nccl.get_unique_id()
        return found

    def connect(self, unique_id: bytes, world_size: int, *, timeout_s: float) -> None:
        """Joins as rank 0; see `WeightSender`."""
        self.abort()
        self._given_up.clear()
        deadline = Deadline(timeout_s)
        outcome: dict[str, Any] = {}

        def initialize() -> None:
            try:
                self._queue.use_device()
                outcome["communicator"] = self._nccl.NcclCommunicator(world_size, unique_id, 0)
            except RuntimeError as error:
                outcome["error"] = error

        # NCCL's initialization has no deadline and cannot be taken back: the thread may stay.
        thread = threading.Thread(target=initialize, name="rolemesh-nccl-servers", daemon=True)
        thread.start()
        while thread.is_alive() and not deadline.is_over and not self._given_up.is_set():
            thread.join(_JOIN_S)
        if "communicator" not in outcome:
            error = outcome.get("error")
            cause = f"NCCL: {error}" if error else f"not all came, in {deadline.elapsed_s:.0f} s"
            raise BroadcastFailedError(
                f"the servers' workers could not be joined ({cause}); where a thread of this "
                "process still waits for them, only its end frees what NCCL holds"
            )
        with self._lock:
            self._communicator = outcome["communicator"]
        self._queue.use_device()
        one = torch.zeros(1, dtype=torch.float32, device=self._device)
        self._issue(
            one,
            lambda communicator, stream: communicator.allReduce(
                one.data_ptr(),
                one.data_ptr(),
                1,
                self._nccl.NCCL_FLOAT32,
                self._nccl.NCCL_SUM,
                stream,
            ),
        )
        self.wait(timeout_s=max(deadline.remaining_s, 1.0))

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Queues its bytes; see `WeightSender`."""
        if not tensor.is_contiguous():
            raise ValueError("a tensor to broadcast is not contiguous")
        self._queue.use_device()
        pointer, num_bytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        # As bytes: workers that receive as elements agree, since NCCL's broadcast only copies.
        self._issue(
            tensor,
            lambda communicator, stream: communicator.broadcast(
                pointer, pointer, num_bytes, self._nccl.NCCL_UINT8, 0, stream
            ),
        )

    def wait(self, *, timeout_s: float) -> None:
        """Looks at the queue's mark, and for errors; see `WeightSender`."""
        deadline, mark = Deadline(timeout_s), self._queue.mark()
        while True:
            communicator = self._communicator
            if communicator is None:
                raise BroadcastFailedError(
                    "the broadcast was aborted: the servers' data is partial"
                )
            try:
                communicator.check_async_error()
            except RuntimeError as error:
                self.abort()
                raise BroadcastFailedError(f"NCCL reports {error}") from error
            if mark.query():
                break
            if deadline.is_over:
                self.abort()
                raise BroadcastFailedError(f"the broadcast did not end within {timeout_s:.0f} s")
            time.sleep(_POLL_S)
        self._sending.clear()

    def abort(self) -> None:
        """Aborts the communicator; operations under way end with partial data."""
        self._given_up.set()
        with self._lock:
            communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.abort()

    def _issue(self, tensor: torch.Tensor, operation: Any) -> None:
        communicator = self._communicator
        if communicator is None:
            raise BroadcastFailedError("there is no group of workers: connect first")
        self._queue.wait_for_caller()
        self._sending.append(tensor)
        try:
            operation(communicator, self._queue.pointer)
        except RuntimeError as error:
            self.abort()
            raise BroadcastFailedError(f"NCCL: {error}") from error
