"""The state of every random generator of a process, as data."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from rolemesh.engine.seeds import derive_seed


def capture_random_state() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Captures the generators of torch (CPU and every CUDA device), numpy and Python.

    Returns:
        Tensors and a JSON-able dict, for `restore_random_state`.
    """
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        for index, state in enumerate(torch.cuda.get_rng_state_all()):
            tensors[f"cuda.{index}"] = state
    version, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=False)
    numpy_inner = numpy_state["state"]
    return tensors, {
        "python": {"version": version, "words": list(words), "gauss": gauss},
        "numpy": {
            "bit_generator": numpy_state["bit_generator"],
            "key": numpy_inner["key"].tolist(),
            "pos": int(numpy_inner["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
    }


def restore_random_state(tensors: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
    """Puts captured generators back; CUDA devices that are absent now are skipped."""
    torch.set_rng_state(tensors["torch"])
    for index in range(torch.cuda.device_count()):
        if f"cuda.{index}" in tensors:
            torch.cuda.set_rng_state(tensors[f"cuda.{index}"], index)
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
    numpy = state["numpy"]
    np.random.set_state(
        {
            "bit_generator": numpy["bit_generator"],
            "state": {"key": np.array(numpy["key"], dtype=np.uint32), "pos": numpy["pos"]},
            "has_gauss": numpy["has_gauss"],
            "gauss": numpy["gauss"],
        }
    )


def seed_random_state(*parts: int | str) -> None:
    """Seeds every generator of the process: for a rank of which nothing was captured.

    Args:
        parts: What the seed is derived from; equal parts give equal generators.
    """
    torch.manual_seed(derive_seed("torch", *parts))  # CUDA devices too
    random.seed(derive_seed("python", *parts))
    # numpy's legacy generator takes 32 bits.
    np.random.seed(derive_seed("numpy", *parts) % 2**32)
