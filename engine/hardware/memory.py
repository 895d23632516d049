"""The most memory that a rank held while something ran.

Light: brings torch along only where a CUDA device is measured.
"""

from __future__ import annotations

import contextlib
import resource
import sys
import threading
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Literal, Self

_KIBIBYTE = 1024
_RESET_PEAK = "5"
"""What resets VmHWM when written to clear_refs (proc_pid_clear_refs(5))."""
_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")

Source = Literal["cuda", "resident"]
""""cuda": bytes that torch's allocator gave out on the device. "resident": physical memory of the
process, files that it maps included."""


class PhaseMemory:
    """Measures the peak of a block. Blocks may lie within each other or overlap, on any threads.

    Memory belongs to the process: what other threads hold meanwhile is counted too.

    Example::

        with PhaseMemory() as memory:
            trainer.update(...)
        memory.peak_bytes
    """

    def __init__(self, device: str = "cpu") -> None:
        """Measures a device.

        Args:
            device: "cuda" or "cuda:1" for what torch's allocator holds there (vLLM's sleeping
                allocator has memory of its own, which is not counted); "cpu" for the process.
        """
        self._gauge = _gauge(device)
        self.source: Source = self._gauge.source
        """What was measured."""
        self.peak_bytes = 0
        """The peak; 0 before the block has ended."""
        self.is_of_phase = True
        """False where the system has no way to reset its peak: then it is that of the process since
        its start, and a bound for the block's."""

    def __enter__(self) -> Self:
        self.is_of_phase = self._gauge.enter(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._gauge.leave(self)


class _Gauge(ABC):
    """A peak that can be set back to what is held now, and the blocks that are open.

    Invariant: the peak of an open block is the larger of its `peak_bytes` and the gauge's peak:
    before the gauge is reset for a new block, its peak is noted in all that are open.
    """

    source: Source

    def __init__(self) -> None:
        self._open: list[PhaseMemory] = []
        self._lock = threading.Lock()

    @abstractmethod
    def peak(self) -> int:
        """Bytes, since the last reset if there was one."""

    @abstractmethod
    def reset(self) -> bool:
        """Begins anew; False when the system does not let us."""

    def enter(self, block: PhaseMemory) -> bool:
        with self._lock:
            self._note()
            is_reset = self.reset()
            block.peak_bytes = 0
            self._open.append(block)
            return is_reset

    def leave(self, block: PhaseMemory) -> None:
        with self._lock:
            self._note()
            self._open.remove(block)

    def _note(self) -> None:
        if self._open:
            peak = self.peak()
            for block in self._open:
                block.peak_bytes = max(block.peak_bytes, peak)


class _Resident(_Gauge):
    """Resident set of the process, from Linux's proc file system, or from getrusage elsewhere."""

    source: Source = "resident"

    def peak(self) -> int:
        with contextlib.suppress(FileNotFoundError):
            for line in _STATUS.read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * _KIBIBYTE
        unit = 1 if sys.platform == "darwin" else _KIBIBYTE
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def reset(self) -> bool:
        try:
            _CLEAR_REFS.write_text(_RESET_PEAK)
        except OSError:  # Containers may hide it; is_of_phase says so.
            return False
        return True


class _Cuda(_Gauge):
    """What torch's caching allocator gave out on a device."""

    source: Source = "cuda"

    def __init__(self, device: str) -> None:
        super().__init__()
        import torch

        # Its statistics raise before CUDA has started.
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self._memory = torch.cuda
        self._device = torch.device(device)

    def peak(self) -> int:
        return self._memory.max_memory_allocated(self._device)

    def reset(self) -> bool:
        self._memory.reset_peak_memory_stats(self._device)
        return True


_gauges: dict[str, _Gauge] = {}
_gauges_lock = threading.Lock()


def _gauge(device: str) -> _Gauge:
    """The one gauge of a device."""
    if device != "cpu" and device.split(":")[0] != "cuda":
        raise ValueError(f"device is {device!r}: give 'cpu', 'cuda' or 'cuda:' and a number")
    with _gauges_lock:
        if device not in _gauges:
            _gauges[device] = _Resident() if device == "cpu" else _Cuda(device)
        return _gauges[device]
