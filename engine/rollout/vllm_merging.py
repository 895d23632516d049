"""Matrices with an adapter, written anew into a vLLM model on a CPU while all else stays.

Imports vLLM, so it is itself imported late. An update of SmolLM2-135M takes half of the time of
one that gives all weights to vLLM's loaders: these copy each matrix once more, and the embedding,
its packed copy and the norms, a fifth of the numbers, would be written as they were.

Shape letters: I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearBase

from rolemesh.engine.rollout.vllm_shards import rewritten, weight_places
from rolemesh.engine.rollout.vllm_weights import fused_parts


@dataclass(frozen=True, slots=True)
class WrittenMatrix:
    """A matrix of vLLM's that has an adapter, as a whole or in part."""

    name: str
    """VLLM's, e.g. "model.layers.0.mlp.gate_up_proj.weight"."""
    rows: Mapping[str, int]
    """Rows by Hugging Face parameter, from the top, e.g. of gate_proj and up_proj."""


def written_matrices(
    model: nn.Module, shapes: Mapping[str, Sequence[int]], adapted: Collection[str]
) -> list[WrittenMatrix] | None:
    """What an update has to write.

    Args:
        model: VLLM's.
        shapes: [O, I] or others of the whole model's parameters, by Hugging Face name.
        adapted: Parameters that have an adapter, by Hugging Face name.

    Returns:
        None where vLLM's loaders have to do it: vLLM holds a matrix in another way than as those
        parameters under each other in float32, cut over several ranks for example, or on a GPU.
    """
    places = weight_places(model, torch.float32)
    found: list[WrittenMatrix] = []
    for prefix, module in model.named_modules():
        if not isinstance(module, LinearBase):
            continue
        names = [f"{part}.weight" for part in fused_parts(model, prefix, module) or (prefix,)]
        if not any(name in adapted for name in names):
            continue
        if not all(name in shapes for name in names):
            return None
        rows = {name: shapes[name][0] for name in names}
        place = places[f"{prefix}.weight"]
        is_whole = place.shape == (sum(rows.values()), shapes[names[0]][1])
        if not is_whole or place.dtype != torch.float32 or module.weight.device.type != "cpu":
            return None
        found.append(WrittenMatrix(f"{prefix}.weight", rows))
    reached = {name for one in found for name in one.rows}
    return found if reached.issuperset(adapted) else None


@torch.no_grad()
def write_matrices(
    model: nn.Module,
    matrices: Sequence[WrittenMatrix],
    fill: Callable[[str, torch.Tensor], None],
) -> None:
    """Writes them, one at a time, and packs each for the kernels.

    After a failure some are new and others old, and all weights may be loaded over them.

    Args:
        model: VLLM's.
        matrices: From `written_matrices`.
        fill: Writes a parameter into a tensor: called with its Hugging Face name and float32
            [O, I], which holds anything.
    """
    places = weight_places(model, torch.float32)
    for matrix in matrices:
        with rewritten(places[matrix.name]) as whole:
            pieces = torch.split(whole, list(matrix.rows.values()))
            for name, piece_OI in zip(matrix.rows, pieces, strict=True):
                fill(name, piece_OI)
