"""The device that a rank computes on: which it is, and its selection on the rank's threads."""

from __future__ import annotations

import os
import socket

import torch

from rolemesh.engine.hardware.devices import use_device
from rolemesh.rpc.errors import PreconditionError


def rank_device() -> torch.device:
    """The GPU of this rank, counted among those that the service sees; without GPUs the CPU.

    Only looks: it does not start CUDA.

    Raises:
        ValueError: There are fewer GPUs than ranks.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0"))
    if index >= torch.cuda.device_count():
        raise ValueError(
            f"rank {index} has no GPU: the service sees {torch.cuda.device_count()}; make more of "
            "them visible, or choose a smaller layout"
        )
    return torch.device("cuda", index)


def check_device(device_type: str) -> None:
    """Refuses a run that asks for a GPU where this rank sees none: it would compute on the CPU.

    Args:
        device_type: Kind of device that the run asks for; empty: whatever there is.

    Raises:
        PreconditionError: DEVICE_MISSING; says what torch sees.
    """
    if device_type != "cuda" or torch.cuda.is_available():
        return
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    raise PreconditionError(
        f"the recipe's pool names GPUs, but {socket.gethostname()} shows this service none: "
        f"{_why_no_gpu()}; CUDA_VISIBLE_DEVICES is {'not set' if shown is None else repr(shown)}. "
        "Give the service a GPU, or let the pool name the devices [cpu]",
        reason="DEVICE_MISSING",
    )


def _why_no_gpu() -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built for the CPU (install rolemesh[gpu])"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        # Its first sentences name the driver and its version; a traceback of C++ may follow.
        cause = str(error).partition("\n")[0]
    else:
        cause = "CUDA starts, and counts no GPU"
    return f"torch {torch.__version__} for CUDA {torch.version.cuda} says: {cause}"


def select_device() -> torch.device:
    """Makes the rank's device the calling thread's, and starts CUDA there; returns it.

    Each thread that computes or looks at the device calls it first: the current device belongs to
    the thread, and a thread that has chosen none would work on the GPU of rank 0.

    Raises:
        ValueError: There are fewer GPUs than ranks.
    """
    device = rank_device()
    use_device(device)
    return device
