"""Products of linear layers on a CPU, in float32, by the faster of torch's two libraries.

torch 2.13 multiplies float32 matrices by MKL. oneDNN, by which it multiplies bfloat16, is up to a
tenth faster for activations and their gradients where it has AVX-512, and slower for gradients of
weights, which stay with MKL; with AVX2 alone neither is faster (docs/measurements.md: AMD EPYC).
Its operation is what torch's compiler puts in the place of a linear layer. A product of a new size
costs it half a millisecond more, so small products stay with MKL, too.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from torch.nn import functional

from rolemesh.engine.hardware.devices import kind_of
from rolemesh.engine.specs.by_device import held_to_older

LEAST_WORK = 2**25
"""Multiplications from which oneDNN serves: 0.3 ms on two cores, in layers of equal sizes."""


def linear(
    x: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None
) -> torch.Tensor:
    """What a linear layer makes of its input.

    Args:
        x: Floating [..., I], of any type and on any device.
        weight_OI: Of the same type, [O, I].
        bias_O: Of the same type, [O].

    Returns:
        [..., O], in that type.
    """
    result: torch.Tensor = _Linear.apply(x, weight_OI, bias_O)  # type: ignore[no-untyped-call]
    return result


def product(
    x: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None
) -> torch.Tensor:
    """As `linear`, for what knows its gradients by itself: it has none of its own."""
    work = x.numel() * weight_OI.shape[0]
    is_float32 = x.dtype == weight_OI.dtype == torch.float32
    if work < LEAST_WORK or not is_float32 or kind_of(x.device) != "cpu" or not is_faster():
        return functional.linear(x, weight_OI, bias_O)
    made: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight_OI, bias_O, "none", [], "")
    return made


@functools.cache
def is_faster() -> bool:
    """Whether oneDNN is the faster one on this machine, for large products."""
    has_operation = hasattr(torch.ops.mkldnn, "_linear_pointwise")
    has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return has_operation and has_avx512 and not held_to_older(os.environ)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        # A frozen weight, of which no gradient is asked, needs no input either.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight_OI)
        return product(x, weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight_OI = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad
        flat_NO = gradient.flatten(0, -2)
        grad_x = product(gradient, weight_OI.t()) if need_x else None
        grad_weight = flat_NO.t() @ x.flatten(0, -2) if need_weight else None
        return grad_x, grad_weight, flat_NO.sum(0) if need_bias else None
