"""The one switch of this room: whether Triton's kernels compute, or their references in torch."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

KERNELS_VARIABLE = "ROLEMESH_KERNELS"
"""Environment variable of a rank: auto, torch or triton.

auto (also where it is not set) takes the kernels for tensors on a CUDA device, if Triton is
installed there; all others are computed by the references. torch takes the references everywhere.
triton takes the kernels everywhere, on a CPU by Triton's interpreter (TRITON_INTERPRET=1), which
is for tests: it takes some ten thousand times as long.
"""


def triton_serves(device: torch.device) -> bool:
    """Whether tensors on a device go to Triton's kernels.

    Raises:
        ValueError: The variable has no known value, or asks for what is not there.
    """
    choice = os.environ.get(KERNELS_VARIABLE) or "auto"
    if choice == "auto":
        return device.type == "cuda" and _triton_is_there()
    if choice == "torch":
        return False
    if choice != "triton":
        raise ValueError(f"{KERNELS_VARIABLE} is {choice!r}: give auto, torch or triton")
    if not _triton_is_there():
        raise ValueError(
            f"{KERNELS_VARIABLE} is 'triton', but Triton is not installed: install it, or give auto"
        )
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"{KERNELS_VARIABLE} is 'triton', but the tensors are on {device.type!r}, where only "
            "its interpreter runs: set TRITON_INTERPRET=1 before rolemesh is imported, or give auto"
        )
    return True


def device_of_columns() -> torch.device:
    """Where to compute on columns of numbers, which lie in host memory.

    The rank's GPU if the kernels serve there and it is in use already, otherwise the CPU.
    """
    is_in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if is_in_use and triton_serves(device := torch.device("cuda")):
        return device
    return torch.device("cpu")


@functools.cache
def _triton_is_there() -> bool:
    return importlib.util.find_spec("triton") is not None
