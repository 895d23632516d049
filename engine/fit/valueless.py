"""Tensors without values: the real code runs on them, and takes no memory to speak of."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed._meta_registrations  # collective operations on tensors without values
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

_aten = torch.ops.aten
_MAKERS = frozenset(
    getattr(_aten, name)
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "zeros", "zeros_like")
)
"""Operations that make tensors of nothing."""

_MOST_KNOWN = 1 << 22
"""Elements of a tensor whose values are kept where they are known: rows of tokens and masks."""


class Valueless(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operations on tensors without values, beside real ones of a batch.

    An operation with a valueless tensor gives valueless ones; all others run as ever, so that a
    batch can be read. Where the size of a result depends on values (a mask), they are known, since
    they come of the batch. A number that is read off a valueless tensor is 1. torch's
    FakeTensorMode alone would take the batch's values away, too.

    Owned by one thread. Everything lies on the CPU.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._known: MutableMapping[Any, torch.Tensor] = WeakIdKeyDictionary()
        self.makes_valueless = False
        """Whether tensors that are made of nothing (torch.empty) have no values either."""

    def empty(self, sizes: Sequence[int]) -> torch.Tensor:
        """A tensor without values, float32."""
        with self._mode:
            return torch.empty(list(sizes))

    @staticmethod
    def is_valueless(tensor: torch.Tensor) -> bool:
        """Whether a tensor has no values."""
        return isinstance(tensor, FakeTensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation, with values or without."""
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # DTensors: their parts come by on their own
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not any(map(self.is_valueless, tensors)) and not self._is_made(func, tensors, kwargs):
            return func(*args, **kwargs)
        if func is _aten._local_scalar_dense.default:
            known = self._known.get(args[0])
            return _number(args[0].dtype) if known is None else known.item()
        args, kwargs = tree_map_only(torch.Tensor, self._without_values, (args, kwargs))
        if func is _aten.mm.dtype:  # of GPUs alone
            left, right, dtype = args
            return self.empty([len(left), right.shape[1]]).to(dtype)
        if func is _aten.addmm.dtype_out:
            # Likewise; torch 2.11 takes the type for a factor.
            return kwargs["out"]
        if func is _aten.index.Tensor:
            args = (args[0], [self._positions(index) for index in args[1]])
        if func is _aten.bincount.default and args[0] in self._known:
            # Numbers of rows, by which others are made: they are needed themselves.
            return torch.bincount(self._known[args[0]], *args[1:], **kwargs)
        if func is _aten.repeat_interleave.Tensor and args[0] in self._known:
            return self._without_values(torch.repeat_interleave(self._known[args[0]]))
        with self._mode:
            result = func(*args, **kwargs)
        if func is _aten.topk.default:
            self._spread(result[1], args[0].shape[-1])
        self._know(func, args, kwargs, result)
        return result

    def _is_made(self, func: Any, tensors: Sequence[torch.Tensor], kwargs: Any) -> bool:
        """Whether an operation makes a floating tensor on the CPU that is to have no values."""
        if not self.makes_valueless or func.overloadpacket not in _MAKERS:
            return False
        like = next(iter(tensors), None)
        dtype = kwargs.get("dtype") or (torch.float32 if like is None else like.dtype)
        device = kwargs.get("device") or (torch.device("cpu") if like is None else like.device)
        return bool(dtype.is_floating_point) and torch.device(device).type == "cpu"

    def _without_values(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor) or tensor.is_meta:
            return tensor
        made = self._mode.from_tensor(tensor, static_shapes=True)
        if tensor.numel() <= _MOST_KNOWN:
            self._known[made] = tensor.detach()
        return made

    def _positions(self, index: Any) -> Any:
        """The places that a mask names, so that the size of the result is known."""
        if not isinstance(index, FakeTensor) or index.dtype != torch.bool:
            return index
        known = self._known.get(index)
        if known is None:
            raise RuntimeError("a mask came of no value that is known: estimate without it")
        return self._without_values(known.nonzero().flatten())

    def _spread(self, chosen: torch.Tensor, number: int) -> None:
        """Says which of so many were chosen where nothing says it: each as often as the others.

        So do the rows of a pass choose experts, in the mean.
        """
        if chosen.numel() <= _MOST_KNOWN:
            self._known[chosen] = torch.arange(chosen.numel()).remainder(number).view(chosen.shape)

    def _know(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Keeps the values of integers and masks that follow from known ones."""
        if (
            not isinstance(result, FakeTensor)
            or result.is_floating_point()
            or result.numel() > _MOST_KNOWN
            or func._schema.is_mutable
        ):
            return
        fakes = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor)]
        if fakes and all(fake in self._known for fake in fakes):
            real = tree_map_only(FakeTensor, self._known.__getitem__, (args, kwargs))
            self._known[result] = func(*real[0], **real[1])


def _number(dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1
