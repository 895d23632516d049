"""Buffers that belong to a model as its parameters do: they are in its files, and may change.

No gradient reaches them. GLM4-MoE and DeepSeek choose experts by such a bias, which balancing
moves. Tables that follow from a config (rotary embeddings) are in no file, and stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn


def saved_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Floating buffers that the model's files hold.

    Args:
        model: A transformers model.

    Yields:
        E.g. ("model.layers.1.mlp.gate.e_score_correction_bias", float32 [experts]): the buffer
        itself.
    """
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            # torch has no public name for what it leaves out of a state dict.
            if name not in module._non_persistent_buffers_set and buffer.is_floating_point():
                yield f"{prefix}.{name}" if prefix else name, buffer


def set_buffer(model: nn.Module, name: str, value: torch.Tensor) -> None:
    """Puts a tensor of any shape in the place of a buffer."""
    prefix, _, own_name = name.rpartition(".")
    setattr(model.get_submodule(prefix), own_name, value)
