"""The device that a rank computes on: which it is, and its selection on the rank's threads."""

from __future__ import annotations

import os

import torch

from rolemesh.engine.devices import use_device


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
