"""Frozen weights that models of one process hold once: the base of several adapters.

A model is loaded and prepared as if it were alone. Then each of its frozen weights that an earlier
model holds with the same values gives its memory back, and both lie in one place. Values are
compared, and not names of folders: what was rounded or narrowed otherwise is not shared.
"""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock
from weakref import WeakSet

import torch

_Kind = tuple[str, torch.Size, torch.dtype, torch.device]

_held: dict[_Kind, WeakSet[torch.Tensor]] = {}
"""Frozen weights of models that live, by name, shape, type and device."""
_lock = Lock()


@torch.no_grad()
def share_base(weights: Iterable[tuple[str, torch.Tensor]], device: torch.device) -> int:
    """Moves frozen weights to a device, or to where the same values lie there already.

    One weight after another, so that no second base stands on the device meanwhile.

    Args:
        weights: By Hugging Face name. Nothing writes to them from now on; what replaces their
            memory (`weight.data = ...`) ends the sharing for that model alone.
        device: Where they are to be.

    Returns:
        Bytes that are held in common with earlier models.
    """
    shared_bytes = 0
    with _lock:
        for name, weight in weights:
            values = weight.data.to(device)
            held = _held.setdefault((name, values.shape, values.dtype, values.device), WeakSet())
            known = next((one for one in held if _is_same(one, values)), None)
            weight.data = values if known is None else known.data
            held.add(weight)
            if known is not None:
                shared_bytes += values.nbytes
        for kind in [kind for kind, held in _held.items() if not held]:
            del _held[kind]
    return shared_bytes


def _is_same(held: torch.Tensor, values: torch.Tensor) -> bool:
    # A model that was moved or emptied meanwhile keeps its place in the table.
    if (held.shape, held.dtype, held.device) != (values.shape, values.dtype, values.device):
        return False
    return torch.equal(held, values)
