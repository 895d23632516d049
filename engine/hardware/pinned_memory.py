"""Host memory that a GPU copies to and from by itself, and streams on which it does.

A GPU copies at full speed, and beside what it computes, only where the host's pages are locked
("pinned"). Locking takes about as long as a copy, so memory that is used again is kept.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch

from rolemesh.engine.layout.payload import aligned

_LOG = logging.getLogger(__name__)


def pin(memory: torch.Tensor, device: torch.device) -> Callable[[], None]:
    """Locks host memory for copies of a GPU. Where that fails, a log says why; all works slower.

    Args:
        memory: uint8 [n], contiguous, n > 0. No page of it may be locked already.
        device: That copies. For a CPU nothing is locked.

    Returns:
        Unlocks it. Call it once, before the memory is given back, with no copy under way.
    """
    if device.type != "cuda":
        return _nothing
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = memory.data_ptr()

    def succeeds(what: str, error: object) -> bool:
        if int(error) == 0:  # type: ignore[call-overload]
            return True
        _LOG.warning(
            "%d bytes of host memory could not be %s (%s): copies with %s are slower; look at the "
            "host's free memory, and at its container's limit of locked memory (memlock)",
            *(memory.nbytes, what, runtime.cudaGetErrorString(error), device),
        )
        # CUDA keeps an error that was returned, and torch raises it after its next kernel,
        # whatever that is.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=device)
        return False

    if not succeeds("locked", runtime.cudaHostRegister(address, memory.nbytes, 0)):
        return _nothing

    def unpin() -> None:
        succeeds("unlocked", runtime.cudaHostUnregister(address))

    return unpin


def _nothing() -> None:
    """Unlocks memory that is not locked."""


class PinnedMemory:
    """Host memory for some tensors of a GPU, kept from one use to the next. Owned by one thread.

    Invariant: places are the caller's until `places` is called again.

    Example::

        memory = PinnedMemory(torch.device("cuda", 0))
        (place,) = memory.places([weight])  # of the shape of `weight`, in host memory
        place.copy_(weight, non_blocking=True)
    """

    def __init__(self, device: torch.device) -> None:
        """Takes no memory yet.

        Args:
            device: The GPU that copies.
        """
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._let_go: Callable[[], object] = _nothing

    def places(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Contiguous places for tensors of any shape and type, with any values.

        The memory is that of the call before, unless it was smaller.
        """
        ends, end = [], 0
        for tensor in tensors:
            end += aligned(tensor.nbytes)
            ends.append(end)
        if end > self._memory.numel():
            self._make(end)
        found = []
        for tensor, stop in zip(tensors, ends, strict=True):
            start = stop - aligned(tensor.nbytes)
            flat = self._memory[start : start + tensor.nbytes]
            found.append(flat.view(tensor.dtype).view(tensor.shape))
        return found

    def _make(self, num_bytes: int) -> None:
        self._let_go()
        # Pages of its own, so that no page is locked twice; and no more of them than needed, as
        # torch's allocator of pinned memory would take (it rounds up to a power of two).
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # After a fork this process would write to copies of pages that the GPU still knows.
        pages.madvise(mmap.MADV_DONTFORK)
        self._memory = torch.frombuffer(pages, dtype=torch.uint8)
        unpin = pin(self._memory, self._device)
        # The memory is an argument: it must not be given back before it is unlocked.
        let_go = weakref.finalize(self, _unpin, unpin, self._memory)
        let_go.atexit = False  # the system unlocks what a process leaves
        self._let_go = let_go


def _unpin(unpin: Callable[[], None], memory: torch.Tensor) -> None:
    unpin()
    del memory


class CopyStream:
    """A GPU's stream for copies, beside the one on which its thread computes.

    Example::

        stream = CopyStream(torch.device("cuda", 0))
        with stream.copying():
            place.copy_(weight, non_blocking=True)
        stream.synchronize()  # `place` has the values
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Copies that are queued inside start after all that the caller has queued before."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> torch.cuda.Event:
        """A mark behind all copies that were queued so far."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def synchronize(self) -> None:
        """Waits, on the host, for all copies."""
        self._stream.synchronize()
