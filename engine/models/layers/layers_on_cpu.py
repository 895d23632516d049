"""What stands between the products of a decoder layer, for a CPU: norms and rotary positions.

transformers writes each as a handful of operations, of which autograd makes two handfuls more, and
each reads and writes all activations. These take about a third of that time, forward and backward
together, and keep fewer tensors for the backward pass. SwiGLU is left as it is: torch has its
backward pass as one operation already.

Numbers are float32. Nothing is written in place that was given.
"""

from __future__ import annotations

from typing import Any

import torch


def rms_norm(x: torch.Tensor, weight_D: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Root mean square norm (arXiv 1910.07467, eq. 4).

        weight * x / sqrt(mean(x^2) + epsilon)

    Args:
        x: float32 [..., D].
        weight_D: float32 [D].
        epsilon: Keeps the root away from 0.

    Returns:
        float32 [..., D].
    """
    result: torch.Tensor = _RmsNorm.apply(x, weight_D, epsilon)  # type: ignore[no-untyped-call]
    return result


def rotate(x_BHTE: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions (arXiv 2104.09864, eq. 34), on halves of a head as transformers pairs them.

    Args:
        x_BHTE: float32 [B, H, T, E], queries or keys; E is even.
        cos: float32 [B or 1, T, E], without gradient.
        sin: Alike.

    Returns:
        float32 [B, H, T, E], in memory as x is.
    """
    result: torch.Tensor = _Rotate.apply(x_BHTE, cos, sin)  # type: ignore[no-untyped-call]
    return result


class _RmsNorm(torch.autograd.Function):
    """Gradients of the norm, and of its weight.

    With s = 1 / sqrt(mean(x^2) + epsilon), g the gradient of the result, and the first sum over
    the width:

        d x = s w g - s^3 x sum(w g x) / D          d w = sum over rows of s g x
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight_D: torch.Tensor, epsilon: float) -> torch.Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight_D, scale)
        result: torch.Tensor = x * scale
        return result.mul_(weight_D)

    @staticmethod
    def backward(
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x, weight_D, scale = ctx.saved_tensors
        need_x, need_weight, _ = ctx.needs_input_grad
        # Dense, however the heads of queries or keys lie in what was given.
        products = torch.mul(gradient, x, out=x.new_empty(x.shape))
        flat_RD = products.view(-1, len(weight_D))
        # Sums by products of matrices: they read what they sum once, and write no terms of it.
        grad_weight = flat_RD.t() @ scale.flatten() if need_weight else None
        if not need_x:
            return None, grad_weight, None
        sums = (flat_RD @ weight_D).view(scale.shape)
        grad_x = torch.mul(gradient, weight_D, out=products).mul_(scale)
        grad_x.addcmul_(x, sums.mul_(scale**3).div_(-len(weight_D)))
        return grad_x, grad_weight, None


class _Rotate(torch.autograd.Function):
    """With a and b the halves of a head: (a cos - b sin, b cos + a sin), cos and sin of each half.

    The gradient is the transposed rotation.
    """

    @staticmethod
    def forward(
        ctx: Any, x_BHTE: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        half = x_BHTE.shape[-1] // 2
        sin = sin[:, None]
        result = x_BHTE * cos[:, None]
        result[..., :half].addcmul_(x_BHTE[..., half:], sin[..., :half], value=-1)
        result[..., half:].addcmul_(x_BHTE[..., :half], sin[..., half:])
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        half = gradient.shape[-1] // 2
        sin = sin[:, None]
        grad_x = gradient * cos[:, None]
        grad_x[..., :half].addcmul_(gradient[..., half:], sin[..., half:])
        grad_x[..., half:].addcmul_(gradient[..., :half], sin[..., :half], value=-1)
        return grad_x, None, None
