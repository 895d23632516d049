"""Choice of the device that a rank computes on."""

from __future__ import annotations

import os

import torch


def rank_device() -> torch.device:
    """The GPU of this rank, counted among those that the service sees; without GPUs the CPU.

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
