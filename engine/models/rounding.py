"""bfloat16 weights and float32 activations: forward passes that do not amplify rounding.

Where activations are rounded to bfloat16, two programs that round in the same places still
disagree: a difference of 1e-8 flips some roundings, each flip is a whole bfloat16 step and flips
more, and after the 30 layers of SmolLM2-135M log-probs differ by 0.02, as much as each differs
from float32. With float32 activations a difference stays as small as it began. Backward products
are bfloat16, as under autocast.

For a CPU: torch 2.13 has no product of bfloat16 matrices with a float32 result there, so the
rounded weight is multiplied in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rolemesh.engine.parallel.tensor_parallel import RowParallelLinear, sum_over_slices


def round_weights(model: nn.Module) -> None:
    """Makes a model compute with its weights rounded to bfloat16, and float32 activations.

    In place. The parameters stay what they are, whole or a slice or gathered for a pass only: they
    are rounded where they are used, anew in each pass.

    Args:
        model: float32.
    """
    for module in model.modules():
        patched: Any = module
        if isinstance(module, nn.Linear):
            patched.forward = _linear(module)
        elif isinstance(module, nn.Embedding):
            patched.forward = _embedding(module.forward)
        elif next(module.parameters(recurse=False), None) is not None:
            patched.forward = _seeing_rounded_weights(module)


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """The nearest bfloat16 values of a weight (float32, of any shape), as float32.

    The gradient passes unchanged.
    """
    values: torch.Tensor = _Rounded.apply(weight)  # type: ignore[no-untyped-call]
    return values


def rounded_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Product of x and the transposed weight rounded to bfloat16, in float32.

    Args:
        x: float32 [..., K].
        weight: float32 [M, K].

    Returns:
        float32 [..., M]. Its gradients are bfloat16 products of rounded factors, as float32.
    """
    product: torch.Tensor = _RoundedProduct.apply(x, weight)  # type: ignore[no-untyped-call]
    return product


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.bfloat16().float()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class _RoundedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        # The weight itself, not its rounded copy: what gathers cut weights for a pass frees it
        # between forward and backward, and copies of all layers would stay.
        ctx.save_for_backward(x.bfloat16(), weight)
        return nn.functional.linear(x, weight.bfloat16().float())

    @staticmethod
    def backward(
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        need_x, need_weight = ctx.needs_input_grad
        narrow = gradient.bfloat16()
        grad_x = (narrow @ weight.bfloat16()).float() if need_x else None
        grad_weight = (
            (narrow.flatten(0, -2).t() @ x.flatten(0, -2)).float() if need_weight else None
        )
        return grad_x, grad_weight


def _linear(module: nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
    group = module.group if isinstance(module, RowParallelLinear) else None

    def forward(x: torch.Tensor) -> torch.Tensor:
        product = rounded_product(x, module.weight)
        if group is not None:
            product = sum_over_slices(product, group)
        return product if module.bias is None else product + rounded(module.bias)

    return forward


def _embedding(
    embed: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[[torch.Tensor], torch.Tensor]:
    # The rows that were looked up, not the whole table: the values are the same.
    return lambda tokens: rounded(embed(tokens))


def _seeing_rounded_weights(module: nn.Module) -> Callable[..., Any]:
    """A forward pass for norms, and any other module that has weights of its own."""
    forward: Any = type(module).forward
    view = _RoundedView(module)
    return lambda *args, **kwargs: forward(view, *args, **kwargs)


class _RoundedView:
    """A module as it is, but with its own weights rounded."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return rounded(value) if isinstance(value, nn.Parameter) else value
