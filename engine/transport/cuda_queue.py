"""The few CUDA calls that transports need, behind a seam that tests replace."""

from __future__ import annotations

from typing import Protocol

import torch


class Mark(Protocol):
    """A point in a queue of device work."""

    def query(self) -> bool:
        """Whether the device has got there."""
        ...


class DeviceQueue(Protocol):
    """Device work in order, beside the work that the caller computes with."""

    @property
    def pointer(self) -> int:
        """The cudaStream_t, for libraries."""
        ...

    def wait_for_caller(self) -> None:
        """What is queued here from now on starts after all that the caller has queued."""
        ...

    def mark(self) -> Mark:
        """A mark behind all that is queued here."""
        ...

    def use_device(self) -> None:
        """Makes the device the calling thread's own."""
        ...


class CudaQueue:
    """A torch stream of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        """Makes a stream.

        Raises:
            ValueError: Not a CUDA device with an index.
        """
        if device.type != "cuda" or device.index is None:
            raise ValueError(f"device is {device}: give a CUDA device with an index, as cuda:0")
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def pointer(self) -> int:
        """The cudaStream_t."""
        return int(self._stream.cuda_stream)

    def wait_for_caller(self) -> None:
        """Waits, on the device, for the calling thread's current stream."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def mark(self) -> Mark:
        """An event, recorded now."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def use_device(self) -> None:
        """Sets the thread's current device."""
        torch.cuda.set_device(self._device)
