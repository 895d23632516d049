"""RMSNorm of a vLLM engine on a CPU by vLLM's own kernels for CPUs.

Imports vLLM, so it is itself imported late. VLLM 0.32 has these kernels and normalizes by single
operations of torch all the same. They take five times as long, which is a twentieth of a step of a
small model.
"""

from __future__ import annotations

import torch
from vllm import ir
from vllm.config.kernel import IrOpPriorityConfig
from vllm.platforms import current_platform

_PROVIDER = "rolemesh_cpu"
"""Our name in vLLM's registry of implementations."""


def norm_priorities() -> IrOpPriorityConfig:
    """What vLLM's EngineArgs need as `ir_op_priority` after `register_norms`."""
    return IrOpPriorityConfig(rms_norm=[_PROVIDER], fused_add_rms_norm=[_PROVIDER])


def register_norms() -> None:
    """Makes the kernels known to vLLM in this process, which computes on a CPU."""
    current_platform.import_kernels()
    ir.ops.rms_norm.register_impl(_PROVIDER, supports_args=_is_plain)(_rms_norm)
    ir.ops.fused_add_rms_norm.register_impl(_PROVIDER, supports_args=_is_plain_sum, inplace=True)(
        _add_rms_norm
    )


def _is_plain(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    # In bfloat16 the kernels round later than the trainer does, who multiplies by the weight what
    # is rounded.
    return (
        x.dtype == torch.float32
        and weight is not None
        and weight.dtype == torch.float32
        and variance_size is None
    )


def _is_plain_sum(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    return (
        _is_plain(x, weight, epsilon, variance_size)
        and x.is_contiguous()
        and x_residual.dtype == torch.float32
        and x_residual.is_contiguous()
    )


def _rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    # Queries and keys of some families are cut out of a wider tensor.
    whole = x.contiguous()
    normalized = torch.empty_like(whole)
    torch.ops._C.rms_norm(normalized, whole, weight, epsilon)
    return normalized


def _add_rms_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual
