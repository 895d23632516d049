"""CUDA's streams and locked memory for tensors of the CPU.

A stream copies as late as a device may: when something waits for it. What is read without a wait
then has not come, and memory that is used again without one is written twice.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Self

import pytest
import torch
from torch.overrides import TorchFunctionMode

PAGE_BYTES = 4096


class FakeStreams(TorchFunctionMode):
    """Streams of a GPU, in place of torch's for a test; use it as a context.

    `copy_(..., non_blocking=True)` is late, on any stream; all else happens at once.

    Example: `with FakeStreams(monkeypatch) as cuda: ...`; `cuda.log` afterwards.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.log: list[str] = []
        """Waits of a stream for the thread's own one ("follow") and late copies, as queued."""
        self.num_casts = 0
        """Late copies between two types."""
        self.num_unlocked = 0
        """Late copies into memory that is not locked."""
        self.locked: dict[int, int] = {}
        """Locked bytes by address."""
        self.num_locks = 0
        self.lock_error = 0
        """What locking answers."""
        self.most_made_bytes = 0
        """The most that lived at a time of what `empty_like` has made."""
        self._made: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
        self._own = _Stream(self, is_own=True)
        self._current = self._own
        monkeypatch.setattr(torch.cuda, "Stream", lambda device=None: _Stream(self, is_own=False))
        monkeypatch.setattr(torch.cuda, "Event", _Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self._current)
        monkeypatch.setattr(torch.cuda, "stream", self._on)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.copy_ and kwargs.get("non_blocking"):
            target, source = args[0].detach(), args[1].detach()
            self.log.append("copy")
            self.num_casts += target.dtype != source.dtype
            self.num_unlocked += not any(
                start <= target.data_ptr() <= start + length - target.nbytes
                for start, length in self.locked.items()
            )

            # Holds the tensors themselves: their memory is in use until then.
            def copy(tensors: Any = args[:2]) -> None:
                target.copy_(source)

            self._current.later(copy)
            return args[0]
        made = func(*args, **kwargs)
        if func is torch.empty_like:
            self._made.add(made)
            living = sum(tensor.nbytes for tensor in self._made)
            self.most_made_bytes = max(self.most_made_bytes, living)
        return made

    @property
    def num_waiting(self) -> int:
        """Copies of the thread's own stream that are not made yet."""
        return self._own.num_waiting

    @contextlib.contextmanager
    def _on(self, stream: _Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    # --- the runtime's functions, by their names there ---------------------------------------

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        for start, length in self.locked.items():
            if start // PAGE_BYTES <= (address + num_bytes - 1) // PAGE_BYTES and (
                address // PAGE_BYTES <= (start + length - 1) // PAGE_BYTES
            ):
                raise AssertionError("a page is locked twice")
        if self.lock_error == 0:
            self.locked[address] = num_bytes
            self.num_locks += 1
        return self.lock_error

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0

    def cudaGetErrorString(self, error: int) -> str:
        return f"fake error {error}"


class _Stream:
    def __init__(self, cuda: FakeStreams, *, is_own: bool) -> None:
        self.is_own = is_own
        self.num_queued = 0
        self._cuda = cuda
        self._waiting: deque[tuple[int, Callable[[], object]]] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def later(self, work: Callable[[], object]) -> None:
        self.num_queued += 1
        self._waiting.append((self.num_queued, work))

    def run_to(self, number: int) -> None:
        while self._waiting and self._waiting[0][0] <= number:
            self._waiting.popleft()[1]()

    def wait_stream(self, other: _Stream) -> None:
        if other.is_own:
            self._cuda.log.append("follow")
        number = other.num_queued
        self._wait(lambda: other.run_to(number))

    def wait_event(self, event: _Event) -> None:
        self._wait(event.synchronize)

    def synchronize(self) -> None:
        self.run_to(self.num_queued)

    def _wait(self, wait: Callable[[], object]) -> None:
        if self.is_own:
            wait()  # what is computed next reads at once
        else:
            self.later(wait)


class _Event:
    def record(self, stream: _Stream) -> None:
        self._stream, self._number = stream, stream.num_queued

    def synchronize(self) -> None:
        self._stream.run_to(self._number)
