"""Linear layers with a low-rank adapter beside them (LoRA, arXiv 2106.09685), whole or a slice.

What a layer gives is W x + scale * B (A x). On a tensor slice the factors are cut where W is: of a
matrix cut by rows every slice has all of A and its rows of B; of one cut by columns its columns of
A and all of B, and what the adapter adds is summed with the slices' products. A factor that a slice
has as a whole gets a part of its gradient there: `tensor_parallel.partial_gradients`.

Shape letters: E experts, I inputs, O outputs, R rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from rolemesh.engine.layout.adapters import STACKS

_is_off: ContextVar[bool] = ContextVar("adapters_off", default=False)


class Factor(nn.Module):
    """One factor, named as in PEFT: "<module>.lora_A.weight" or "<module>.lora_B.weight".

    Not an nn.Linear, so that nothing takes it for a layer of the model.
    """

    def __init__(self, values: torch.Tensor) -> None:
        """Takes the values as they are: float32 [R, I] of A, [O, R] of B; of experts a stack."""
        super().__init__()
        self.weight = nn.Parameter(values)


def give_adapter(linear: nn.Linear, a_RI: torch.Tensor, b_OR: torch.Tensor, scale: float) -> None:
    """Puts an adapter beside a layer, in place.

    Args:
        linear: A layer, or this rank's slice of it.
        a_RI: float32, of this slice's columns.
        b_OR: float32, of this slice's rows.
        scale: What B (A x) is multiplied by.
    """
    linear.add_module("lora_A", Factor(a_RI))
    linear.add_module("lora_B", Factor(b_OR))
    adapted_layer: Any = linear
    adapted_layer.adapter_scale = scale
    if type(linear) is nn.Linear:
        # A row-parallel layer adds its adapter by itself, before the sum over slices.
        adapted_layer.forward = lambda x: adapted(
            linear, x, functional.linear(x, linear.weight, linear.bias)
        )


def give_experts_adapter(
    experts: nn.Module, factors: Mapping[str, tuple[torch.Tensor, torch.Tensor]], scale: float
) -> None:
    """Puts an adapter beside both stacks of a layer's experts, in place.

    Args:
        experts: The module, or this rank's part of it.
        factors: By module of `layout.adapters.STACKS`: A float32 [E, R, I] and B [E, O, R], of this
            rank's experts and slice.
        scale: What B (A x) is multiplied by.
    """
    wrapped = nn.Module()
    for module, place in zip(STACKS, (wrapped, experts), strict=True):
        a_ERI, b_EOR = factors[module]
        place.add_module("lora_A", Factor(a_ERI))
        place.add_module("lora_B", Factor(b_EOR))
    experts.add_module("base_layer", wrapped)
    adapted_experts: Any = experts
    adapted_experts.adapter_scale = scale


class StackAdapter(NamedTuple):
    """What stands beside a stack of experts."""

    a_ERI: torch.Tensor
    b_EOR: torch.Tensor
    scale: float


def stack_adapters(experts: nn.Module) -> tuple[StackAdapter | None, StackAdapter | None]:
    """The adapters beside gate_up_proj and down_proj, in use at this moment; none and none."""
    scale: float | None = getattr(experts, "adapter_scale", None)
    if scale is None or _is_off.get():
        return None, None
    outer: Any = experts
    inner, outer = (
        StackAdapter(module.lora_A.weight, module.lora_B.weight, scale)
        for module in (outer.base_layer, outer)
    )
    return inner, outer


def has_adapter(module: nn.Module) -> bool:
    """Whether `give_adapter` has put an adapter beside a layer."""
    return hasattr(module, "adapter_scale")


@contextmanager
def adapters_off() -> Iterator[None]:
    """Has layers compute without their adapters, in passes that this thread makes meanwhile.

    Only for passes without gradients: a backward pass may run in another thread.
    """
    token = _is_off.set(True)
    try:
        yield
    finally:
        _is_off.reset(token)


def adapted(linear: nn.Module, x: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
    """Adds what a layer's adapter makes of its input, if it has one.

    Args:
        linear: The layer.
        x: Floating [..., I].
        product: Floating [..., O], W x; with W cut by columns this slice's part of it.

    Returns:
        [..., O], in the type of the product: W x + scale * B (A x).
    """
    scale: float | None = getattr(linear, "adapter_scale", None)
    if scale is None or _is_off.get():
        return product
    layer: Any = linear
    a_RI, b_OR = layer.lora_A.weight, layer.lora_B.weight
    # In the type of the layer's own product; under autocast torch chooses.
    kind = product.dtype
    narrow_NR = functional.linear(x.reshape(-1, x.shape[-1]).to(kind), a_RI.to(kind))
    flat = product.reshape(-1, product.shape[-1])
    b_RO = b_OR.to(kind).t()
    if x.device.type == "cpu":
        # Row by row in memory, its products with gradients take a third of the time there.
        b_RO = b_RO.contiguous()
    # One operation for product, scale and sum.
    return torch.addmm(flat, narrow_NR, b_RO, alpha=scale).view(product.shape)
