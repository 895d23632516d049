"""The one switch of this room: whether Triton's kernels compute, or their references in torch."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

KERNELS_VARIABLE = "ROLEMESH_KERNELS"
"""Environment variable of a rank: torch (also where it is not set) or triton.

triton takes the kernels for tensors on a GPU, and on a CPU where TRITON_INTERPRET=1 has Triton's
interpreter compute, which is for tests: it takes some ten thousand times as long. All other tensors
are computed by the references. They are what counts until the kernels have run on a device.
FlexAttention of shared prompts, which torch compiles to Triton, goes with them on a GPU, and so do
parts of transformers' layers (`models/layers/fused_layers.py`).
"""


def triton_serves(device: torch.device) -> bool:
    """Whether tensors on a device go to Triton's kernels.

    Raises:
        ValueError: The variable has no known value, or asks for what is not there.
    """
    choice = os.environ.get(KERNELS_VARIABLE) or "torch"
    if choice == "torch":
        return False
    if choice != "triton":
        raise ValueError(f"{KERNELS_VARIABLE} is {choice!r}: give torch or triton")
    if not _triton_is_there():
        raise ValueError(
            f"{KERNELS_VARIABLE} is 'triton', but Triton is not installed: install it, or give "
            "torch"
        )
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def unserved(device: torch.device) -> str:
    """What to say where kernels were asked for, and a rank on this device has none; else empty."""
    is_served = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    if is_served or os.environ.get(KERNELS_VARIABLE) != "triton":
        return ""
    return (
        f"{KERNELS_VARIABLE} is 'triton', but this rank computes on the {device.type}, where the "
        "kernels do not serve: torch's operations compute"
    )


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
