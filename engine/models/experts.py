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
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from rolemesh.engine.devices import device_of, kind_of
from rolemesh.engine.parallel.data_parallel import experts_of
from rolemesh.engine.parallel.expert_exchange import computed_by_owners, permuted
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
    x_SD = _narrowed(hidden_states)
    gate_up_EOD, down_EDI = _narrowed(self.gate_up_proj), _narrowed(self.down_proj)
    num_tokens, num_chosen = top_k_index.shape
    order_N = top_k_index.flatten().argsort(stable=True)
    place_N = torch.empty_like(order_N)
    place_N[order_N] = torch.arange(len(order_N), device=order_N.device)
    owners: RankGroup | None = getattr(self, "owners", None)
    num_experts = len(down_EDI) * (1 if owners is None else owners.size)
    counts = torch.bincount(top_k_index.flatten(), minlength=num_experts).tolist()
    x_ND = _ToExperts.apply(x_SD, order_N, place_N, num_chosen)  # type: ignore[no-untyped-call]

    def made_of(x_MD: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        inner_MI = self._apply_gate(grouped_linear(x_MD, gate_up_EOD, rows))
        return grouped_linear(inner_MI, down_EDI, rows)

    made_ND = (
        made_of(x_ND, counts)
        if owners is None
        else computed_by_owners(x_ND, counts, owners, made_of)
    )
    back_SKD = permuted(made_ND, place_N, order_N).view(num_tokens, num_chosen, -1)
    summed_SD: torch.Tensor = (back_SKD * top_k_weights[..., None]).sum(1)
    return summed_SD.to(hidden_states.dtype)


def grouped_linear(
    x_NC: torch.Tensor, weight_EOC: torch.Tensor, counts: Sequence[int]
) -> torch.Tensor:
    """Each expert's linear map of its rows.

    Args:
        x_NC: Floating, the rows of expert 0 first.
        weight_EOC: In the same type.
        counts: Rows of each expert, which sum to N.

    Returns:
        [N, O] in that type. Numbers of bfloat16 are multiplied as float32 where the machine is fast
        in that alone, and rounded after.
    """
    is_narrow = x_NC.dtype == torch.bfloat16
    if is_narrow and not device_of(kind_of(x_NC.device)).multiplies_bfloat16:
        return grouped_linear(x_NC.float(), weight_EOC.float(), counts).to(x_NC.dtype)
    if is_narrow and x_NC.is_cuda:
        # One kernel for all experts. Not tried on a GPU.
        ends = torch.tensor(counts, device=x_NC.device).cumsum(0).to(torch.int32)
        return functional.grouped_mm(x_NC, weight_EOC.transpose(1, 2), offs=ends)
    made: torch.Tensor = _GroupedLinear.apply(x_NC, weight_EOC, counts)  # type: ignore[no-untyped-call]
    return made


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_NC: torch.Tensor, weight_EOC: torch.Tensor, counts: Sequence[int]
    ) -> torch.Tensor:
        ctx.counts = counts
        ctx.save_for_backward(x_NC if ctx.needs_input_grad[1] else None, weight_EOC)
        made_NO = x_NC.new_empty(len(x_NC), weight_EOC.shape[1])
        for expert, rows in _rows_of(counts):
            torch.mm(x_NC[rows], weight_EOC[expert].t(), out=made_NO[rows])
        return made_NO

    @staticmethod
    def backward(
        ctx: Any, grad_NO: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x_NC, weight_EOC = ctx.saved_tensors
        need_x, need_weight, _ = ctx.needs_input_grad
        grad_x = grad_NO.new_empty(len(grad_NO), weight_EOC.shape[2]) if need_x else None
        grad_weight = torch.empty_like(weight_EOC) if need_weight else None
        for expert, rows in _rows_of(ctx.counts):
            if grad_x is not None:
                torch.mm(grad_NO[rows], weight_EOC[expert], out=grad_x[rows])
            if grad_weight is not None:
                torch.mm(grad_NO[rows].t(), x_NC[rows], out=grad_weight[expert])
        if grad_weight is not None:
            for expert, count in enumerate(ctx.counts):
                if not count:
                    grad_weight[expert] = 0
        return grad_x, grad_weight, None


def _rows_of(counts: Sequence[int]) -> list[tuple[int, slice]]:
    """Experts that have rows, and which."""
    found, start = [], 0
    for expert, count in enumerate(counts):
        if count:
            found.append((expert, slice(start, start + count)))
        start += count
    return found


class _ToExperts(torch.autograd.Function):
    """Rows of tokens in the order of their experts; gradients of a token are summed in its own."""

    @staticmethod
    def forward(
        ctx: Any, x_SD: torch.Tensor, order_N: torch.Tensor, place_N: torch.Tensor, num_chosen: int
    ) -> torch.Tensor:
        ctx.num_chosen = num_chosen
        ctx.save_for_backward(place_N)
        return x_SD[order_N // num_chosen]

    @staticmethod
    def backward(ctx: Any, grad_ND: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (place_N,) = ctx.saved_tensors
        grad_SD = grad_ND[place_N].view(-1, ctx.num_chosen, grad_ND.shape[1]).sum(1)
        return grad_SD, None, None, None


def _narrowed(tensor: torch.Tensor) -> torch.Tensor:
    """As autocast would cast it: it sees products of torch's alone."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind):
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


ALL_EXPERTS_FUNCTIONS.register(GROUPED, grouped_experts)
