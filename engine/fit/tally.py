"""Counts the bytes of the storages that are alive, by what they are for."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Purpose = Literal["weights", "gradients", "optimizer", "activations", "head", "gathers"]
"""What a storage is for. "activations": with the temporaries of a backward pass. "gathers": weights
that FSDP has made whole, and its buffers for sums of gradients. "optimizer": moments, and what a
step needs."""

PURPOSES: tuple[Purpose, ...] = get_args(Purpose)


class Tally(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts storages from the operation that makes them to their end. Owned by one thread.

    A storage is for what `purpose` was when it was made, unless `mark` says otherwise later. What a
    kernel takes for itself and frees before it returns is not seen.

    torch's own MemTracker is not used: it takes what a foreach optimizer makes for a moment for
    state of the optimizer (torch 2.13: 84 GiB where the moments have 6).

    Example::

        with Tally() as tally:
            with tally.purpose("weights"):
                weight = torch.zeros(1024)
            tally.peak  # 4096
    """

    def __init__(self, counts: Callable[[torch.Tensor], bool] = lambda _: True) -> None:
        """Counts nothing yet.

        Args:
            counts: Whether a tensor's storage is counted.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts = counts
        self._purpose: Purpose = "activations"
        self._alive: dict[int, tuple[int, Purpose, weakref.ref[Any]]] = {}
        self._resize = torch.UntypedStorage.resize_
        self.held = dict.fromkeys(PURPOSES, 0)
        """Bytes that are alive, by purpose."""
        self.total = 0
        """Their sum."""
        self.peak = 0
        """Most bytes since the last `forget_peak`."""
        self.at_peak = dict(self.held)
        """What `held` was at the peak."""

    @contextmanager
    def purpose(self, purpose: Purpose) -> Iterator[None]:
        """Storages that are made within the block are for this."""
        before, self._purpose = self._purpose, purpose
        try:
            yield
        finally:
            self._purpose = before

    def turn_to(self, purpose: Purpose) -> None:
        """Storages that are made from now on are for this."""
        self._purpose = purpose

    def mark(self, tensors: Iterable[torch.Tensor], purpose: Purpose) -> None:
        """Says what the storages of some tensors are for; they count from now on."""
        for tensor in tensors:
            self._see(tensor.untyped_storage(), purpose)

    def forget_peak(self) -> None:
        """Begins a new peak with what is alive."""
        self.peak, self.at_peak = self.total, dict(self.held)

    def __enter__(self) -> Tally:
        tally, resize = self, self._resize

        # FSDP frees and refills the storage of a gathered weight in place.
        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            known = tally._alive.get(storage._cdata)
            if known is not None:
                tally._see(storage, known[1])
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation and looks at what it gave."""
        if any(_is_wrapper(kind) for kind in types):
            return NotImplemented  # its parts come by on their own
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta and self._counts(leaf):
                for storage in _storages(leaf):
                    if storage._cdata not in self._alive:
                        self._see(storage, self._purpose)
        return result

    def _see(self, storage: torch.UntypedStorage, purpose: Purpose) -> None:
        key = storage._cdata
        known = self._alive.get(key)
        if known is None:
            ended = weakref.ref(storage, lambda _, key=key: self._end(key))  # type: ignore[misc]
        else:
            ended = known[2]
            self._add(known[1], -known[0])
        size = storage.nbytes()
        self._alive[key] = (size, purpose, ended)
        self._add(purpose, size)
        if self.total > self.peak:
            self.forget_peak()

    def _end(self, key: int) -> None:
        size, purpose, _ = self._alive.pop(key)
        self._add(purpose, -size)

    def _add(self, purpose: Purpose, size: int) -> None:
        self.held[purpose] += size
        self.total += size


def _storages(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """Where a tensor's numbers lie; a sparse one has its indices apart."""
    parts = (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,)
    return [part.untyped_storage() for part in parts]


def _is_wrapper(kind: type) -> bool:
    """Whether tensors of a type are made of others, as DTensors are."""
    return hasattr(kind, "__tensor_flatten__")
