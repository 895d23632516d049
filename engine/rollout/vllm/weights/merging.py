"""Matrices with an adapter, written anew into a vLLM model on a CPU while all else stays.

Imports vLLM, so it is itself imported late. An update of SmolLM2-135M takes half of the time of
one that gives all weights to vLLM's loaders: these copy each matrix once more, and the embedding,
its packed copy and the norms, a fifth of the numbers, would be written as they were.

Shape letters: E experts, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase

from rolemesh.engine.rollout.vllm.weights.experts import STACKS, PlacedExperts
from rolemesh.engine.rollout.vllm.weights.shards import rewritten, weight_places
from rolemesh.engine.rollout.vllm.weights.weights import fused_parts


@dataclass(frozen=True, slots=True)
class WrittenMatrix:
    """A matrix of vLLM's that has an adapter, as a whole or in part; or a stack of experts."""

    name: str
    """VLLM's, e.g. "model.layers.0.mlp.gate_up_proj.weight"."""
    rows: Mapping[str, int]
    """Rows by Hugging Face parameter, from the top, e.g. of gate_proj and up_proj; of a stack, of
    each expert those of the whole stack."""


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
    for own_name, names in _held_parameters(model):
        if not any(name in adapted for name in names):
            continue
        if not all(name in shapes for name in names):
            return None
        place = places[own_name]
        rows = {name: shapes[name][-2] for name in names}
        *experts, _, width = shapes[names[0]]
        is_whole = place.shape == (*experts, sum(rows.values()), width)
        device = getattr(place.module, place.own_name).device
        if not is_whole or place.dtype != torch.float32 or device.type != "cpu":
            return None
        found.append(WrittenMatrix(own_name, rows))
    reached = {name for one in found for name in one.rows}
    return found if reached.issuperset(adapted) else None


def _held_parameters(model: nn.Module) -> Iterator[tuple[str, Sequence[str]]]:
    """VLLM's matrices and stacks, and the Hugging Face parameters that each holds."""
    for prefix, module in model.named_modules():
        if isinstance(module, LinearBase):
            parts = fused_parts(model, prefix, module) or (prefix,)
            yield f"{prefix}.weight", [f"{part}.weight" for part in parts]
        elif isinstance(module, RoutedExperts):
            for own, stack in STACKS.items():
                yield f"{prefix}.{own}", [f"{prefix.removesuffix('.routed_experts')}.{stack}"]


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
            [O, I], of a stack [E, O, I], which holds anything.
    """
    places = weight_places(model, torch.float32)
    experts = PlacedExperts()
    for matrix in matrices:
        place = places[matrix.name]
        if isinstance(place.module, RoutedExperts):
            (name,) = matrix.rows
            stack_EOI = torch.empty(place.shape)
            fill(name, stack_EOI)
            experts.place(place.module, place.own_name, stack_EOI, place.dtype)
            continue
        with rewritten(place) as whole:
            pieces = torch.split(whole, list(matrix.rows.values()))
            for name, piece_OI in zip(matrix.rows, pieces, strict=True):
                fill(name, piece_OI)
