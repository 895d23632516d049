"""Loading of a folder's own weights into a vLLM model, rounded on the way.

Imports vLLM, so it is itself imported late. vLLM's loader casts weights to the type that the model
computes in. On a CPU that is float32 with exact numbers, whatever type the weights have elsewhere,
and a float32 folder would be sampled with weights that the trainer rounds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from typing import Any

import torch
from torch import nn
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

ROUNDED = "rolemesh_rounded"
"""Name of our loader in vLLM's registry."""

ROUNDED_TO = "rounded_to"
"""Key of its extra config: name of the type that weights are rounded to, e.g. "bfloat16"."""


class RoundingLoader(DefaultModelLoader):  # type: ignore[misc]
    """VLLM's loader of safetensors, with each weight rounded once before anything is made of it."""

    def __init__(self, load_config: LoadConfig) -> None:
        """Takes the type from the extra config."""
        super().__init__(
            dataclasses.replace(
                load_config, load_format="safetensors", model_loader_extra_config={}
            )
        )
        self._rounded_to: torch.dtype = getattr(
            torch, load_config.model_loader_extra_config[ROUNDED_TO]
        )

    def get_all_weights(
        self, model_config: Any, model: nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Gives (name in the files, tensor [global shape] in the type that was asked for)."""
        for name, tensor in super().get_all_weights(model_config, model):
            yield name, tensor.to(self._rounded_to) if tensor.is_floating_point() else tensor


def register_rounding_loader() -> None:
    """Makes `ROUNDED` a load format of vLLM in this process."""
    register_model_loader(ROUNDED)(RoundingLoader)
