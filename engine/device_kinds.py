"""The kind of device that a model computes for, which decides between ways to compute.

It is the device's type, but where memory is estimated (`engine/fit`): there tensors without values
lie on the CPU, and stand for those of a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_assumed: ContextVar[str | None] = ContextVar("assumed_device_kind", default=None)


def kind_of(device: torch.device) -> str:
    """The kind, "cuda" or "cpu", that code asks for which computes differently on a GPU."""
    return _assumed.get() or device.type


@contextmanager
def assuming(kind: str) -> Iterator[None]:
    """Makes every device one of this kind within the block, for models without values."""
    token = _assumed.set(kind)
    try:
        yield
    finally:
        _assumed.reset(token)
