"""Counts what would wait for a device, on a CPU: a device that is only imagined.

Its name is that of a CPU with a number, which torch takes for any other CPU. Tensors that would
lie on it are told by their memory: weights, what is sent there or made there, and what is computed
from any of these. A read of one of them waits until all that was queued is computed, and an upload
out of ordinary memory does likewise.
"""

from __future__ import annotations

import traceback
from collections import Counter
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

IMAGINED = torch.device("cpu", 0)
READS = frozenset({"tolist", "cpu", "numpy"})
"""Methods of tensors that read their numbers, and are no operations on a CPU."""
SIZED_BY_NUMBERS = frozenset(
    {"nonzero", "masked_select", "_unique2", "_local_scalar_dense", "equal"}
)
"""Operations whose result's size, or whose answer, depends on numbers."""


class DeviceReads:
    """Counts, within its context.

    Example::

        model = CausalLm(spec, device=IMAGINED)
        with DeviceReads(model) as device:
            model(rows)
        device.reads["tolist"]
    """

    def __init__(self, model: nn.Module) -> None:
        """Its weights lie on the imagined device."""
        self.reads: Counter[str] = Counter()
        """What waits for the device to read a tensor, by name."""
        self.waits: Counter[str] = Counter()
        """What waits for the device to send a tensor to it, by name."""
        self.places: Counter[str] = Counter()
        """Where any of them stands in the code, for who looks for it."""
        self._memory: set[int] = set()
        # Memory that is given back would be taken for that of the next tensor.
        self._kept: list[torch.Tensor] = []
        for tensor in (*model.parameters(), *model.buffers()):
            self.place(tensor)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(_Operations(self))
        self._stack.enter_context(_Calls(self))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self._kept.clear()

    def place(self, tensor: torch.Tensor) -> None:
        """Has it lie on the device."""
        if tensor.layout is not torch.strided:
            return
        self._memory.add(tensor.untyped_storage().data_ptr())
        self._kept.append(tensor.detach())

    def note(self, counter: Counter[str], name: str) -> None:
        """Counts something, with its place."""
        counter[name] += 1
        ours = [
            frame
            for frame in traceback.extract_stack()
            if "/torch/" not in frame.filename and frame.filename != __file__
        ]
        self.places[f"{name} at {ours[-1].filename}:{ours[-1].lineno}"] += 1

    def has(self, tensor: Any) -> bool:
        """Whether it lies there; tensors without elements lie nowhere."""
        return (
            isinstance(tensor, torch.Tensor)
            and tensor.layout is torch.strided
            and tensor.numel() > 0
            and tensor.untyped_storage().data_ptr() in self._memory
        )

    def has_any(self, *values: Any) -> bool:
        """Whether one of them, or of what they hold, lies there."""
        return any(self.has(leaf) for leaf in tree_leaves(values))


class _Operations(TorchDispatchMode):
    """Sees each operation, those of the backward pass too."""

    def __init__(self, device: DeviceReads) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        device, name = self._device, func.overloadpacket.__name__
        is_there = device.has_any(args, kwargs)
        if is_there and self._reads(name, args, kwargs):
            device.note(device.reads, name)
        result = func(*args, **kwargs)
        if is_there:
            tree_map_only(torch.Tensor, device.place, result)
        return result

    def _reads(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if name in SIZED_BY_NUMBERS:
            return True
        if name == "repeat_interleave":
            return kwargs.get("output_size") is None
        if name == "segment_reduce":
            return not kwargs.get("unsafe", False)
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            return any(
                index is not None and index.dtype == torch.bool and self._device.has(index)
                for index in args[1]
            )
        return name in ("copy_", "_to_copy") and self._device.has(args[-1]) != self._device.has(
            args[0]
        )


class _Calls(TorchFunctionMode):
    """Sees each call from Python, also those that do nothing on a CPU."""

    def __init__(self, device: DeviceReads) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        device, name = self._device, getattr(func, "__name__", "")
        if func == torch.Tensor.device.__get__ and device.has(args[0]):  # type: ignore[attr-defined]
            return IMAGINED
        if name in READS and device.has(args[0]):
            device.note(device.reads, name)
        is_asked_for = kwargs.get("device") == IMAGINED
        if name == "to" and not device.has(args[0]) and (is_asked_for or IMAGINED in args[1:2]):
            if not kwargs.get("non_blocking", False):
                device.note(device.waits, name)
            result = func(*args, **kwargs)
            result = result.clone() if result.numel() else result
            device.place(result)
            return result
        result = func(*args, **kwargs)
        if name == "__getitem__" and device.has(args[0]) and _has_host_mask(args[1], device):
            device.note(device.waits, "mask")
        if is_asked_for and isinstance(result, torch.Tensor):
            if name in ("tensor", "as_tensor"):
                device.note(device.waits, name)
            device.place(result)
        return result


def _has_host_mask(index: Any, device: DeviceReads) -> bool:
    return any(
        isinstance(leaf, torch.Tensor) and leaf.dtype == torch.bool and not device.has(leaf)
        for leaf in tree_leaves(index)
    )
