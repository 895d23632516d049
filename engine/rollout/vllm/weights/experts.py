"""Weights of experts in a vLLM model on a CPU: packed anew by each update, and read back.

Imports vLLM, so it is itself imported late. VLLM 0.32 packs them for its kernel where a layer has
no kernel yet. Later weights it copies over the packed ones as they come, of the same shape but in
another order, and nothing fails. On a GPU nothing here applies: graphs hold the kernel.

Shape letters: E experts, O outputs, I inputs, N = O * I.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.model_executor.kernels.linear.zentorch_utils import is_zentorch_moe_supported
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

STACKS = {"w13_weight": "gate_up_proj", "w2_weight": "down_proj"}
"""Name in transformers' models by vLLM's."""


@contextmanager
def experts_packed_anew(model: nn.Module) -> Iterator[None]:
    """Has experts that are loaded within the block packed for the kernel.

    Args:
        model: VLLM's.
    """
    kernels = {}
    for module in model.modules():
        if _are_packed(module):
            method: Any = module.quant_method
            kernels[method] = method.moe_kernel
            method.moe_kernel = None
    try:
        yield
    finally:
        for method, kernel in kernels.items():
            if method.moe_kernel is None:
                # Not loaded: the load failed before it came to this layer.
                method.moe_kernel = kernel


class PlacedExperts:
    """Takes the stacks of layers one by one, and has a layer packed when it has both.

    Owned by one update.
    """

    def __init__(self) -> None:
        self._placed: dict[RoutedExperts, set[str]] = {}

    @torch.no_grad()
    def place(
        self, module: RoutedExperts, name: str, tensor: torch.Tensor, dtype: torch.dtype
    ) -> None:
        """Writes a stack, in place on a GPU, and packs it for the kernel once all are there.

        Args:
            module: The layer's experts.
            name: W13_weight or w2_weight.
            tensor: Floating [shape of the parameter before it was packed].
            dtype: In which the module holds it.
        """
        before: torch.Tensor = getattr(module, name)
        if _are_packed(module):
            # What the kernel holds is of another order, and may be padded.
            stack = tensor.to(before.device, dtype, copy=True)
            setattr(module, name, nn.Parameter(stack, requires_grad=False))
        else:
            before.copy_(tensor)
        placed = self._placed.setdefault(module, set())
        placed.add(name)
        if placed == set(STACKS):
            with experts_packed_anew(module):
                module.quant_method.process_weights_after_loading(module)


def expert_weights(prefix: str, module: RoutedExperts) -> Iterator[tuple[str, torch.Tensor]]:
    """A layer's experts as transformers' models hold them.

    Args:
        prefix: Name of the layer in vLLM's model, e.g. "model.layers.0.mlp.experts.routed_experts".
        module: The layer.

    Yields:
        E.g. ("model.layers.0.mlp.experts.gate_up_proj", [E, O, I]), in vLLM's type; with tensor
        parallelism this rank's part. On a CPU a copy that is read back from the packed weights.
    """
    parent = prefix.removesuffix(".routed_experts")
    for name, parameter in module.named_parameters(recurse=False):
        if name == "e_score_correction_bias":
            # The router's, which has it under the name that transformers gives it.
            continue
        tensor = parameter.detach()
        if name in STACKS and _are_packed(module):
            tensor = _unpacked(tensor, module.quant_method.experts_cls.isa)
            tensor = _without_padding(tensor, name, _recorded_shape(module, name))
        if name in STACKS and module.is_fused_checkpoint_transposed:
            tensor = tensor.transpose(1, 2).contiguous()
        yield f"{parent}.{STACKS.get(name, name)}", tensor


def _are_packed(module: nn.Module) -> bool:
    method = getattr(module, "quant_method", None)
    return (
        isinstance(method, UnquantizedFusedMoEMethod)
        and isinstance(method.experts_cls, type)
        and issubclass(method.experts_cls, CPUUnquantizedExperts)
        and not is_zentorch_moe_supported(module)
    )


def _unpacked(packed_EOI: torch.Tensor, isa: str) -> torch.Tensor:
    """Undoes the packing, which moves each element of an expert to another place in it.

    Where each one went is asked of the packing itself: the number of each place is packed, a byte
    at a time, which every type holds exactly.
    """
    num_experts, *sizes = packed_EOI.shape
    places_N = torch.arange(sizes[0] * sizes[1])
    came_from_N = torch.zeros_like(places_N)
    shift = 0
    while len(places_N) - 1 >> shift:
        byte_1OI = (places_N >> shift & 255).to(packed_EOI.dtype).view(1, *sizes)
        packed_byte_1OI = cpu_prepack_moe_weight(byte_1OI, isa)
        came_from_N += packed_byte_1OI.view(-1).to(torch.int64) << shift
        shift += 8
    whole_EN = torch.empty_like(packed_EOI).view(num_experts, -1)
    whole_EN[:, came_from_N] = packed_EOI.reshape(num_experts, -1)
    return whole_EN.view_as(packed_EOI)


def _without_padding(tensor_EOI: torch.Tensor, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """VLLM pads the width of experts to what its kernel takes: of gate, of up, or of down."""
    if name == "w2_weight":
        return tensor_EOI[..., : shape[2]].contiguous()
    halves = tensor_EOI.chunk(2, dim=1)
    return torch.cat([half[:, : shape[1] // 2] for half in halves], dim=1)


def _recorded_shape(module: nn.Module, name: str) -> tuple[int, ...]:
    """Of a parameter before it was packed."""
    return tuple(get_layerwise_info(module).restore_metadata[0][name].shape)
