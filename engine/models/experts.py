"""Experts of a mixture, each computed on the tokens that chose it.

transformers holds a layer's experts in two stacked parameters, [E, 2I, D] and [E, D, I]. Its own
loop over experts writes a gradient of the whole stack for each of them: 27 s where the products
take 2 s (1024 x 384, 64 experts, 8 of a token, 1,024 tokens). Here each expert's part of the
gradient is written once, in any floating type.

Shape letters: S tokens, K experts of a token, N = S * K, E experts, D width, I inner width, O
outputs, C inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from rolemesh.engine.devices import device_of, kind_of
from rolemesh.engine.parallel.data_parallel import experts_of
from rolemesh.engine.parallel.expert_exchange import computed_by_owners, permuted
from rolemesh.engine.parallel.low_rank import StackAdapter, stack_adapters
from rolemesh.engine.parallel.mesh import RankGroup

GROUPED = "rolemesh_grouped"
"""Name of `grouped_experts` in transformers' table of ways to compute experts."""


def group_experts(model: nn.Module, owners: RankGroup | None = None) -> None:
    """Has the experts of a model, if it has any, computed by `grouped_experts`. In place.

    Args:
        model: A transformers model.
        owners: Ranks that share the experts of each layer out, equally and in order; or none.
    """
    for module in experts_of(model):
        patched: Any = module
        patched.config._experts_implementation = GROUPED
        patched.owners = None if owners is None or owners.size == 1 else owners


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """In which types experts are multiplied. What comes out has the type of what goes in."""

    rounds: bool = False
    """Whether weights are rounded to bfloat16 before, whatever they are multiplied as."""
    products: torch.dtype | None = None
    """Of factors in the forward pass; None: that of the rows."""
    gradients: torch.dtype | None = None
    """Of factors in the backward pass; None: the same."""


PLAIN = Arithmetic()


def set_arithmetic(experts: nn.Module, arithmetic: Arithmetic) -> None:
    """Says how a module of experts multiplies."""
    patched: Any = experts
    patched.arithmetic = arithmetic


def grouped_experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """What the experts make of their tokens, each times its weight, summed for each token.

    Args:
        self: A module of transformers with `gate_up_proj` [E, 2I, D] and `down_proj` [E, D, I];
            with a tensor slice's I, the result is the slice's part of a sum. With `owners`, a
            group of ranks that share the experts out, E is this rank's part.
        hidden_states: Floating [S, D].
        top_k_index: int64 [S, K], of experts.
        top_k_weights: Floating [S, K].

    Returns:
        [S, D], in the type of hidden_states.
    """
    kind = hidden_states.device.type
    # Autocast sees products of torch's alone.
    is_cast = torch.is_autocast_enabled(kind)
    x_SD = hidden_states.to(torch.get_autocast_dtype(kind)) if is_cast else hidden_states
    gate_up_EOD, down_EDI = self.gate_up_proj, self.down_proj
    owners: RankGroup | None = getattr(self, "owners", None)
    arithmetic: Arithmetic = getattr(self, "arithmetic", PLAIN)
    num_experts = len(down_EDI) * (1 if owners is None else owners.size)
    order_N = top_k_index.flatten().argsort(stable=True)
    place_N = torch.empty_like(order_N)
    place_N[order_N] = torch.arange(len(order_N), device=order_N.device)
    place_SK = place_N.view_as(top_k_index)
    counts = torch.bincount(top_k_index.flatten(), minlength=num_experts).tolist()
    weights_N1 = permuted(top_k_weights.reshape(-1, 1), order_N, place_N).to(x_SD.dtype)

    beside_gate_up, beside_down = stack_adapters(self)

    def made_of(
        x_MD: torch.Tensor, rows: Sequence[int], weights_M1: torch.Tensor | None = None
    ) -> torch.Tensor:
        gate_up_MO = grouped_linear(x_MD, gate_up_EOD, rows, arithmetic)
        inner_MI = self._apply_gate(_with_adapter(gate_up_MO, x_MD, beside_gate_up, rows))
        # Here, where rows are narrow: what is weighed is the same.
        inner_MI = inner_MI if weights_M1 is None else inner_MI * weights_M1
        made_MD = grouped_linear(inner_MI, down_EDI, rows, arithmetic)
        return _with_adapter(made_MD, inner_MI, beside_down, rows)

    x_ND = _ToExperts.apply(x_SD, order_N, place_SK)  # type: ignore[no-untyped-call]
    if owners is None:
        made_ND = made_of(x_ND, counts, weights_N1)
    else:
        made_ND = computed_by_owners(x_ND, counts, owners, made_of) * weights_N1
    summed_SD: torch.Tensor = _FromExperts.apply(  # type: ignore[no-untyped-call]
        made_ND, order_N, place_SK
    )
    return summed_SD.to(hidden_states.dtype)


def _with_adapter(
    product_NO: torch.Tensor,
    x_NI: torch.Tensor,
    adapter: StackAdapter | None,
    counts: Sequence[int],
) -> torch.Tensor:
    """What experts made of their rows, and of these what their adapters make."""
    if adapter is None:
        return product_NO
    narrow_NR = grouped_linear(x_NI, adapter.a_ERI, counts)
    return product_NO.add(grouped_linear(narrow_NR, adapter.b_EOR, counts), alpha=adapter.scale)


def grouped_linear(
    x_NC: torch.Tensor,
    weight_EOC: torch.Tensor,
    counts: Sequence[int],
    arithmetic: Arithmetic = PLAIN,
) -> torch.Tensor:
    """Each expert's linear map of its rows.

    Args:
        x_NC: Floating, the rows of expert 0 first.
        weight_EOC: Floating. It is cast to the type of the products expert by expert, and only
            where there are rows.
        counts: Rows of each expert, which sum to N.
        arithmetic: In which types. Numbers of bfloat16 are multiplied as float32 all the same where
            the machine is fast in that alone.

    Returns:
        [N, O] in the type of x_NC.
    """
    products = arithmetic.products or x_NC.dtype
    if products == torch.bfloat16 and not device_of(kind_of(x_NC.device)).multiplies_bfloat16:
        arithmetic = Arithmetic(rounds=True, products=torch.float32)
    elif products == torch.bfloat16 and x_NC.is_cuda:
        # One kernel for all experts. Not tried on a GPU.
        ends = torch.tensor(counts, device=x_NC.device).cumsum(0).to(torch.int32)
        weight_ECO = weight_EOC.bfloat16().transpose(1, 2)
        return functional.grouped_mm(x_NC.bfloat16(), weight_ECO, offs=ends).to(x_NC.dtype)
    made: torch.Tensor = _GroupedLinear.apply(  # type: ignore[no-untyped-call]
        x_NC, weight_EOC, counts, arithmetic
    )
    return made


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_NC: torch.Tensor,
        weight_EOC: torch.Tensor,
        counts: Sequence[int],
        arithmetic: Arithmetic,
    ) -> torch.Tensor:
        products = arithmetic.products or x_NC.dtype
        ctx.counts, ctx.rounds = counts, arithmetic.rounds
        ctx.factors = arithmetic.gradients or products
        # The weight itself: what gathers cut weights for a pass frees it in between.
        ctx.save_for_backward(x_NC.to(ctx.factors) if ctx.needs_input_grad[1] else None, weight_EOC)
        factor_NC = x_NC.to(products)
        made_NO = x_NC.new_empty(len(x_NC), weight_EOC.shape[1])
        for expert, rows in _rows_of(counts):
            weight_OC = _seen(weight_EOC[expert], products, rounds=arithmetic.rounds)
            _multiply(factor_NC[rows], weight_OC.t(), into=made_NO[rows])
        return made_NO

    @staticmethod
    def backward(
        ctx: Any, grad_NO: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        x_NC, weight_EOC = ctx.saved_tensors
        need_x, need_weight, *_ = ctx.needs_input_grad
        factor_NO = grad_NO.to(ctx.factors)
        grad_x = grad_NO.new_empty(len(grad_NO), weight_EOC.shape[2]) if need_x else None
        grad_weight = torch.empty_like(weight_EOC) if need_weight else None
        for expert, rows in _rows_of(ctx.counts):
            if grad_x is not None:
                weight_OC = _seen(weight_EOC[expert], ctx.factors, rounds=ctx.rounds)
                _multiply(factor_NO[rows], weight_OC, into=grad_x[rows])
            if grad_weight is not None:
                _multiply(factor_NO[rows].t(), x_NC[rows], into=grad_weight[expert])
        if grad_weight is not None:
            for expert, count in enumerate(ctx.counts):
                if not count:
                    grad_weight[expert] = 0
        return grad_x, grad_weight, None, None


def _seen(weight_OC: torch.Tensor, dtype: torch.dtype, *, rounds: bool) -> torch.Tensor:
    """One expert's weight as a factor."""
    return (weight_OC.bfloat16() if rounds else weight_OC).to(dtype)


def _multiply(left: torch.Tensor, right: torch.Tensor, *, into: torch.Tensor) -> None:
    if left.dtype == into.dtype:
        torch.mm(left, right, out=into)
    else:
        into.copy_(left @ right)


def _rows_of(counts: Sequence[int]) -> list[tuple[int, slice]]:
    """Experts that have rows, and which."""
    found, start = [], 0
    for expert, count in enumerate(counts):
        if count:
            found.append((expert, slice(start, start + count)))
        start += count
    return found


class _ToExperts(torch.autograd.Function):
    """Rows of tokens in the order of their experts; the gradients of a token's are summed."""

    @staticmethod
    def forward(
        ctx: Any, x_SD: torch.Tensor, order_N: torch.Tensor, place_SK: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(place_SK)
        return x_SD[order_N // place_SK.shape[1]]

    @staticmethod
    def backward(ctx: Any, grad_ND: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (place_SK,) = ctx.saved_tensors
        return _summed(grad_ND, place_SK), None, None


class _FromExperts(torch.autograd.Function):
    """The sum of what a token's experts made; the other way round."""

    @staticmethod
    def forward(
        ctx: Any, made_ND: torch.Tensor, order_N: torch.Tensor, place_SK: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(order_N)
        ctx.num_chosen = place_SK.shape[1]
        return _summed(made_ND, place_SK)

    @staticmethod
    def backward(ctx: Any, grad_SD: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (order_N,) = ctx.saved_tensors
        return grad_SD[order_N // ctx.num_chosen], None, None


def _summed(rows_ND: torch.Tensor, place_SK: torch.Tensor) -> torch.Tensor:
    """For each token the sum of its rows, in the order of places: [S, D]."""
    return functional.embedding_bag(place_SK, rows_ND.contiguous(), mode="sum")


ALL_EXPERTS_FUNCTIONS.register(GROUPED, grouped_experts)
