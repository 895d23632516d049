"""Weights of experts in a vLLM model on a CPU: packed anew by each update.

Imports vLLM, so it is itself imported late. VLLM 0.32 packs them for its kernel where a layer has
no kernel yet. Later weights it copies over the packed ones as they come, of the same shape but in
another order, and nothing fails. On a GPU nothing here applies: graphs hold the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from vllm.model_executor.kernels.linear.zentorch_utils import is_zentorch_moe_supported
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)


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


def _are_packed(module: nn.Module) -> bool:
    method = getattr(module, "quant_method", None)
    return (
        isinstance(method, UnquantizedFusedMoEMethod)
        and isinstance(method.experts_cls, type)
        and issubclass(method.experts_cls, CPUUnquantizedExperts)
        and not is_zentorch_moe_supported(module)
    )
