"""Forward passes with bfloat16 weights: activations in float32 ("exact"), or in bfloat16 ("fast").

Factors of adapters are not rounded with float32 activations: samplers add them as float32, too.

Where activations are rounded to bfloat16, two programs that round in the same places still
disagree: a difference of 1e-8 flips some roundings, each flip is a whole bfloat16 step and flips
more, and after the 30 layers of SmolLM2-135M log-probs differ by 0.02, as much as each differs
from float32. With float32 activations a difference stays as small as it began. Backward products
are bfloat16, as under autocast.

A CPU without instructions for bfloat16 emulates its products: a linear layer takes 4 times as long
as in float32, the gradient of its weight 24 times (AVX2, torch 2.13). There the same rounded
numbers are multiplied as float32, forward and backward, in "exact" and in "fast".

`round_weights` is for a CPU: torch 2.13 has no product of bfloat16 matrices with a float32 result
there, so the rounded weight is multiplied in float32. `narrow_layers` is what peers call bfloat16
training: what autocast does, without its float32 residual stream and its casts around each product.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from rolemesh.engine.models.layers import products_on_cpu
from rolemesh.engine.models.layers.experts import PLAIN, Arithmetic, set_arithmetic
from rolemesh.engine.models.layers.scaled_ends import unscaled
from rolemesh.engine.parallel.experts.modules import experts_of
from rolemesh.engine.parallel.low_rank import Factor, adapted, has_adapter
from rolemesh.engine.parallel.tensor_parallel import RowParallelLinear

_Map = Callable[[torch.Tensor], torch.Tensor]


def round_weights(
    model: nn.Module, *, narrow_gradients: bool = True, are_rounded: bool = False
) -> None:
    """Makes a model compute with its weights rounded to bfloat16, and float32 activations.

    In place. The parameters stay what they are, whole or a slice or gathered for a pass only: they
    are rounded where they are used, anew in each pass.

    Args:
        model: float32, or bfloat16 where it is frozen. A forward that a module has for itself is
            kept, as a method of the module.
        narrow_gradients: Whether backward products are of bfloat16, else of float32.
        are_rounded: Whether `round_for_good` has rounded the weights, which no pass then does anew.

    Raises:
        ValueError: A module has a forward of its own that is no method; names the module.
    """
    gradients = torch.bfloat16 if narrow_gradients else torch.float32
    arithmetic = Arithmetic(rounds=not are_rounded, products=torch.float32, gradients=gradients)
    view = _as_it_is if are_rounded else rounded
    _see_weights(model, view, lambda module: _linear(module, narrow_gradients, view), arithmetic)


def round_for_good(model: nn.Module) -> None:
    """Rounds the weights of a frozen model to bfloat16, and leaves them in their own type.

    In place. It then computes what `round_weights` makes it compute, and no pass rounds anything.
    """
    for module in model.modules():
        if not isinstance(module, Factor):
            for weight in module.parameters(recurse=False):
                weight.data = weight.data.bfloat16().to(weight.dtype)


def narrow_layers(model: nn.Module, *, narrow_products: bool = True) -> None:
    """Makes a model compute in bfloat16 from end to end, on weights that stay what they are.

    In place. Each pass casts the weights that it uses, and their gradients arrive in their own
    type: what steps them, saves them and sends them sees float32 alone. Norms take their means in
    float32, as transformers writes them.

    Args:
        model: With weights of any floating type; those that are bfloat16 already are not copied.
        narrow_products: Whether factors are multiplied as bfloat16. Else the same factors are
            multiplied as float32, and the product is rounded.
    """
    products = torch.bfloat16 if narrow_products else torch.float32
    arithmetic = Arithmetic(rounds=True, products=products)
    _see_weights(
        model, torch.Tensor.bfloat16, lambda module: _narrow_linear(module, products), arithmetic
    )


def multiply_as_they_are(model: nn.Module) -> None:
    """Makes linear layers multiply by `products_on_cpu`, in place. Nothing is rounded.

    Args:
        model: Of any floating type, on a CPU, as `round_weights` takes it.
    """
    _see_weights(model, _as_it_is, _plain_linear, PLAIN)


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """The nearest bfloat16 values of a weight (float32, of any shape), as float32.

    The gradient passes unchanged.
    """
    values: torch.Tensor = _Rounded.apply(weight)  # type: ignore[no-untyped-call]
    return values


def rounded_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    narrow_gradients: bool = True,
    is_rounded: bool = False,
) -> torch.Tensor:
    """Product of x and the transposed weight rounded to bfloat16, in float32.

    Args:
        x: float32 [..., K].
        weight: float32 [M, K].
        narrow_gradients: See `round_weights`.
        is_rounded: Whether the weight's values are those of bfloat16.

    Returns:
        float32 [..., M]. Its gradients are bfloat16 products of rounded factors, as float32; or
        float32 products of which only the weight is rounded.
    """
    product: torch.Tensor = _RoundedProduct.apply(  # type: ignore[no-untyped-call]
        x, weight, torch.bfloat16 if narrow_gradients else torch.float32, is_rounded
    )
    return product


def _as_it_is(weight: torch.Tensor) -> torch.Tensor:
    return weight


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.bfloat16().float()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class _RoundedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, factors: torch.dtype, is_rounded: bool
    ) -> torch.Tensor:
        # The weight itself, not its rounded copy: what gathers cut weights for a pass frees it
        # between forward and backward, and copies of all layers would stay.
        # A frozen weight, of which no gradient is asked, needs no input either.
        ctx.factors, ctx.is_rounded = factors, is_rounded
        ctx.save_for_backward(x.to(factors) if ctx.needs_input_grad[1] else None, weight)
        return products_on_cpu.product(x, weight if is_rounded else weight.bfloat16().float())

    @staticmethod
    def backward(
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        need_x, need_weight = ctx.needs_input_grad[:2]
        factor = gradient.to(ctx.factors)
        values = (weight if ctx.is_rounded else weight.bfloat16()).to(ctx.factors)
        grad_x = products_on_cpu.product(factor, values.t()).float() if need_x else None
        grad_weight = (
            (factor.flatten(0, -2).t() @ x.flatten(0, -2)).float() if need_weight else None
        )
        return grad_x, grad_weight, None, None


def _see_weights(
    model: nn.Module, view: _Map, linear: Callable[[nn.Linear], _Map], arithmetic: Arithmetic
) -> None:
    """Makes the modules of a model compute with a view of their weights, in place.

    Experts, of which a pass may need few, see each one's as they multiply.
    """
    experts = set(experts_of(model))
    for name, module in model.named_modules():
        patched: Any = module
        if isinstance(module, Factor):
            continue
        if module in experts:
            set_arithmetic(module, arithmetic)
            continue
        has_own_weights = next(module.parameters(recurse=False), None) is not None
        if isinstance(module, nn.Linear) and ("forward" not in vars(module) or has_adapter(module)):
            # An adapter's own forward is not lost: `linear` adds the adapter as well.
            patched.forward = linear(module)
        elif view is _as_it_is:
            continue
        elif isinstance(module, nn.Embedding):
            patched.forward = _embedding(module, view)
        elif has_own_weights:
            patched.forward = _seeing(module, _forward_of(module, name), view)


def _plain_linear(module: nn.Linear) -> _Map:
    return lambda x: _finished(module, x, products_on_cpu.linear(x, module.weight), _as_it_is)


def _finished(
    module: nn.Linear, x: torch.Tensor, product: torch.Tensor, view: _Map
) -> torch.Tensor:
    """What a layer gives, from its product: with its adapter, all slices' parts and its bias."""
    product = adapted(module, x, product)
    if isinstance(module, RowParallelLinear):
        product = module.summed(product)
    return product if module.bias is None else product + view(module.bias)


def _forward_of(module: nn.Module, name: str) -> Callable[..., Any]:
    """What a module computes, as a function of the module.

    Raises:
        ValueError: The module has a forward of its own that is no method, and so would go on with
            weights as they are.
    """
    own = vars(module).get("forward")
    if own is None:
        forward: Callable[..., Any] = type(module).forward
        return forward
    if isinstance(own, MethodType) and own.__self__ is module:
        return own.__func__
    raise ValueError(
        f"module {name!r} ({type(module).__name__}) has a forward of its own, which would not see "
        "its weights rounded to bfloat16: make it a method of the module "
        "(types.MethodType(function, module)), or set model.compute_dtype to float32"
    )


def _linear(module: nn.Linear, narrow_gradients: bool, view: _Map) -> _Map:
    how = {"narrow_gradients": narrow_gradients, "is_rounded": view is _as_it_is}

    return lambda x: _finished(module, x, rounded_product(x, module.weight, **how), view)


def _embedding(embedding: nn.Embedding, view: _Map) -> _Map:
    # The rows that were looked up, not the whole table: the values are the same.
    rows, scale = unscaled(embedding)
    return lambda tokens: view(rows(tokens)) if scale == 1.0 else view(rows(tokens)) * scale


def _narrow_linear(module: nn.Linear, products: torch.dtype) -> _Map:
    linear = products_on_cpu.linear if products == torch.float32 else functional.linear

    def forward(x: torch.Tensor) -> torch.Tensor:
        bias = None if module.bias is None else module.bias.bfloat16()
        factor, weight = x.bfloat16().to(products), module.weight.bfloat16().to(products)
        if not isinstance(module, RowParallelLinear):
            wide_bias = None if bias is None else bias.to(products)
            product = linear(factor, weight, wide_bias)
            return adapted(module, factor, product).bfloat16()
        product = adapted(module, factor, linear(factor, weight)).bfloat16()
        product = module.summed(product, in_own_type=True)
        return product if bias is None else product + bias

    return forward


def _seeing(module: nn.Module, forward: Callable[..., Any], view: _Map) -> Callable[..., Any]:
    """A forward pass for norms, and any other module that has weights of its own."""
    seen = _View(module, view)
    return lambda *args, **kwargs: forward(seen, *args, **kwargs)


class _View:
    """A module as it is, but with its own weights seen through a function."""

    def __init__(self, module: nn.Module, view: _Map) -> None:
        self._module = module
        self._view = view

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return self._view(value) if isinstance(value, nn.Parameter) else value
