"""A bfloat16 vLLM model with a float32 residual stream and float32 logits, like the trainer's.

The trainer computes matrix products in bfloat16 but keeps the residual stream and the logits in
float32. vLLM keeps both in bfloat16, and a logit of 20 then moves in steps of 1/8. Mean
abs(sampler - float32) of log-probs of SmolLM2-135M, 747 tokens drawn at temperature 1, CPU:
0.035 as vLLM does it, 0.025 with float32 logits, 0.014 with a float32 residual stream as well.
The weights stay bfloat16, and so do all products inside the layers.

What is left cannot be removed by rounding in the same places: rounded activations amplify a
difference in the order of summation to the size of the rounding itself, within a few layers.

Imports vLLM, so it is itself imported late. Used on a CPU; on a GPU vLLM has an option of its own
for the logits (`head_dtype`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm


def widen_residual_stream(model: nn.Module) -> None:
    """Makes the decoder layers add to a float32 residual stream. Done once, after the load."""
    for module in model.modules():
        # Subclasses and partial norms have other formulas: they keep vLLM's.
        if type(module) is RMSNorm and module.variance_size_override is None:
            module._forward_method = _wide_forward(module, module._forward_method)


def _wide_forward(norm: Any, narrow_forward: Callable[..., Any]) -> Callable[..., Any]:
    def forward(x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            return narrow_forward(x)
        stream = x.float() + residual.float()
        variance = stream.pow(2).mean(dim=-1, keepdim=True)
        normed = stream * torch.rsqrt(variance + norm.variance_epsilon)
        if norm.has_weight:
            normed = normed * norm.weight.float()
        return normed.to(x.dtype), stream

    return forward


def widen_logits(head: Any) -> None:
    """Makes an output head compute float32 logits. Done after each update of its weight.

    Args:
        head: vLLM's output head on a CPU, its own pack already made.
    """
    # torch and oneDNN have no bfloat16 product with a float32 result on a CPU. The products of
    # bfloat16 numbers are exact in float32, so only the head's weights cost twice the memory.
    wide: Any = nn.Module()
    wide.weight = nn.Parameter(head.weight.detach().float(), requires_grad=False)
    dispatch_cpu_unquantized_gemm(wide, remove_weight=True)

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        wide_bias = None if bias is None else bias.float()
        logits: torch.Tensor = wide.cpu_linear(x.float(), wide.weight, wide_bias)
        return logits

    head.cpu_linear = linear
