"""Experts of a mixture, each computed on the tokens that chose it.

transformers holds a layer's experts in two stacked parameters, [E, 2I, D] and [E, D, I]. Its own
loop over experts writes a gradient of the whole stack for each of them: 27 s where the products
take 2 s (1024 x 384, 64 experts, 8 of a token, 1,024 tokens). Here each expert's part of the
gradient is written once, in any floating type.

Shape letters: S tokens, K experts of a token, N = S * K, M rows of one expert, E experts, D width,
I inner width, O outputs, C inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from torch.nn import functional
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from rolemesh.engine.hardware.devices import device_of, kind_of
from rolemesh.engine.parallel.experts.exchange import computed_by_owners, permuted
from rolemesh.engine.parallel.experts.modules import experts_of
from rolemesh.engine.parallel.low_rank import stack_adapters
from rolemesh.engine.parallel.mesh import RankGroup

GROUPED = "rolemesh_grouped"
"""Name of `grouped_experts` in transformers' table of ways to compute experts."""

ROWS_AT_A_TIME = 16
"""On a CPU products of bfloat16 have a multiple of so many rows, where rows of the next experts
follow. oneDNN makes code for each size, which takes half a millisecond; this leaves few sizes."""

NUMBERS_AT_A_TIME = 2**22
"""Weights of neighbouring experts that a CPU casts, and writes gradients of, in one operation: of
many small experts several, of large ones each by itself."""


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
    counts = torch.bincount(top_k_index.flatten(), minlength=num_experts).tolist()
    dealt = Dealt.by_expert(top_k_index)
    weights_N1 = permuted(top_k_weights.reshape(-1, 1), dealt.order_N, dealt.place_N)
    weights_N1 = weights_N1.to(x_SD.dtype)
    beside_gate_up, beside_down = stack_adapters(self)

    def inner_of(x: torch.Tensor, rows: Sequence[int], reads: Dealt | None) -> torch.Tensor:
        product = grouped_linear(x, gate_up_EOD, rows, arithmetic, reads=reads)
        if beside_gate_up is not None:
            narrow = grouped_linear(x, beside_gate_up.a_ERI, rows, reads=reads)
            added = grouped_linear(narrow, beside_gate_up.b_EOR, rows)
            product = product.add(added, alpha=beside_gate_up.scale)
        inner: torch.Tensor = self._apply_gate(product)
        return inner

    def made_of(inner: torch.Tensor, rows: Sequence[int], sums: Dealt | None) -> torch.Tensor:
        product = grouped_linear(inner, down_EDI, rows, arithmetic, sums=sums)
        if beside_down is None:
            return product
        narrow = grouped_linear(inner, beside_down.a_ERI, rows)
        added = grouped_linear(narrow, beside_down.b_EOR, rows, sums=sums)
        return product.add(added, alpha=beside_down.scale)

    if owners is None:
        # Weighed where rows are narrow: what comes out is the same.
        made_SD = made_of(inner_of(x_SD, counts, dealt) * weights_N1, counts, dealt)
    else:
        made_ND = computed_by_owners(
            dealt.rows_of(x_SD),
            counts,
            owners,
            lambda x_MD, rows: made_of(inner_of(x_MD, rows, None), rows, None),
        )
        made_SD = dealt.sums_of(made_ND * weights_N1)
    return made_SD.to(hidden_states.dtype)


@dataclass(frozen=True, slots=True)
class Dealt:
    """The rows that experts get: each token's for each of its experts, those of expert 0 first."""

    order_N: torch.Tensor
    """int64, numbers of pairs of a token and one of its K experts, in the order of experts."""
    place_N: torch.Tensor
    """int64, where each pair lies in that order."""
    num_chosen: int
    """K."""

    @classmethod
    def by_expert(cls, chosen_SK: torch.Tensor) -> Self:
        """Deals tokens to the experts that they chose, int64."""
        order_N = chosen_SK.flatten().argsort(stable=True)
        place_N = torch.empty_like(order_N)
        place_N[order_N] = torch.arange(len(order_N), device=order_N.device)
        return cls(order_N, place_N, chosen_SK.shape[1])

    @property
    def tokens_N(self) -> torch.Tensor:
        """int64, the token of each row."""
        return self.order_N // self.num_chosen

    def rows_of(self, x_SD: torch.Tensor) -> torch.Tensor:
        """Rows of tokens as experts get them, [N, D]; the gradients of a token's are summed."""
        rows_ND: torch.Tensor = _RowsOf.apply(x_SD, self)  # type: ignore[no-untyped-call]
        return rows_ND

    def sums_of(self, rows_ND: torch.Tensor) -> torch.Tensor:
        """For each token the sum of its rows, [S, D]."""
        sums_SD: torch.Tensor = _SumsOf.apply(rows_ND, self)  # type: ignore[no-untyped-call]
        return sums_SD

    def summed(self, rows_ND: torch.Tensor) -> torch.Tensor:
        """The same without a gradient: each token's rows in the order of its experts."""
        place_SK = self.place_N.view(-1, self.num_chosen)
        return functional.embedding_bag(place_SK, rows_ND.contiguous(), mode="sum")


class _RowsOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SD: torch.Tensor, dealt: Dealt) -> torch.Tensor:
        ctx.dealt = dealt
        return x_SD[dealt.tokens_N]

    @staticmethod
    def backward(ctx: Any, grad_ND: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.dealt.summed(grad_ND), None


class _SumsOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_ND: torch.Tensor, dealt: Dealt) -> torch.Tensor:
        ctx.dealt = dealt
        return dealt.summed(rows_ND)

    @staticmethod
    def backward(ctx: Any, grad_SD: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad_SD[ctx.dealt.tokens_N], None


def grouped_linear(
    x: torch.Tensor,
    weight_EOC: torch.Tensor,
    counts: Sequence[int],
    arithmetic: Arithmetic = PLAIN,
    *,
    reads: Dealt | None = None,
    sums: Dealt | None = None,
) -> torch.Tensor:
    """Each expert's linear map of its rows.

    Args:
        x: Floating [N, C], the rows of expert 0 first; with `reads` [S, C], one of each token.
        weight_EOC: Floating. It is cast to the type of the products expert by expert, and only
            where there are rows.
        counts: Rows of each expert, which sum to N.
        arithmetic: In which types. Numbers of bfloat16 are multiplied as float32 all the same where
            the machine is fast in that alone.
        reads: How tokens are dealt to the experts. Each reads its own, so that no copy of all rows
            is made, and none is kept for the backward pass.
        sums: The same, where the rows of a token are to be summed. In the backward pass each expert
            reads its own.

    Returns:
        [N, O], or with `sums` [S, O], in the type of x.
    """
    products = arithmetic.products or x.dtype
    if products == torch.bfloat16 and not device_of(kind_of(x.device)).multiplies_bfloat16:
        arithmetic = Arithmetic(rounds=True, products=torch.float32)
    elif products == torch.bfloat16 and x.is_cuda and fits_grouped_kernel(weight_EOC):
        # One kernel for all experts. Not tried on a GPU.
        ends = torch.tensor(counts, device=x.device).cumsum(0).to(torch.int32)
        weight_ECO = weight_EOC.bfloat16().transpose(1, 2)
        x_NC = x if reads is None else reads.rows_of(x)
        made_NO = functional.grouped_mm(x_NC.bfloat16(), weight_ECO, offs=ends).to(x.dtype)
        return made_NO if sums is None else sums.sums_of(made_NO)
    made: torch.Tensor = _GroupedLinear.apply(  # type: ignore[no-untyped-call]
        x, weight_EOC, counts, arithmetic, reads, sums
    )
    return made


def fits_grouped_kernel(weight_EOC: torch.Tensor) -> bool:
    """Whether torch's grouped product takes experts of these sizes in bfloat16, and its gradients.

    It wants rows of a multiple of 16 bytes, which factors of an adapter of rank 4 have not.
    """
    return all(size % 8 == 0 for size in weight_EOC.shape[1:])


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight_EOC: torch.Tensor,
        counts: Sequence[int],
        arithmetic: Arithmetic,
        reads: Dealt | None,
        sums: Dealt | None,
    ) -> torch.Tensor:
        products = arithmetic.products or x.dtype
        ctx.counts, ctx.rounds, ctx.reads, ctx.sums = counts, arithmetic.rounds, reads, sums
        ctx.factors = arithmetic.gradients or products
        # The weight itself: what gathers cut weights for a pass frees it in between.
        ctx.save_for_backward(x.to(ctx.factors) if ctx.needs_input_grad[1] else None, weight_EOC)
        rows_of = _reader(x.to(products), reads)
        made_NO = x.new_empty(sum(counts), weight_EOC.shape[1])
        at_a_time = _rows_at_a_time(products, x.device)
        for experts, places in _groups(counts, weight_EOC):
            weight_GOC = _seen(weight_EOC[experts], products, rounds=arithmetic.rounds)
            for weight_OC, place in zip(weight_GOC, places, strict=True):
                # The next expert writes over what is too much.
                wide = _widened(place, at_a_time, len(made_NO))
                _multiply(rows_of(wide), weight_OC.t(), into=made_NO[wide])
        return made_NO if sums is None else sums.summed(made_NO)

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None, None]:
        x, weight_EOC = ctx.saved_tensors
        need_x, *_ = ctx.needs_input_grad
        grads_of = _reader(grad.to(ctx.factors), ctx.sums)
        rows_of = None if x is None else _reader(x, ctx.reads)
        # In the type of the products: one cast of many rows or experts is faster than many casts.
        num_rows, at_a_time = sum(ctx.counts), _rows_at_a_time(ctx.factors, grad.device)
        size_NC = (num_rows, weight_EOC.shape[2])
        grad_x = grad.new_empty(size_NC, dtype=ctx.factors) if need_x else None
        grad_weight = None if rows_of is None else torch.empty_like(weight_EOC)
        for experts, places in _groups(ctx.counts, weight_EOC):
            weight_GOC = _seen(weight_EOC[experts], ctx.factors, rounds=ctx.rounds)
            made_GOC = torch.empty_like(weight_GOC)
            if grad_weight is not None and grad_weight.dtype == ctx.factors:
                made_GOC = grad_weight[experts]
            for at, place in enumerate(places):
                wide = _widened(place, at_a_time, num_rows)
                grad_MO, own = grads_of(wide), place.stop - place.start
                if grad_x is not None:
                    torch.mm(grad_MO, weight_GOC[at], out=grad_x[wide])
                if rows_of is None:
                    continue
                rows_MC = rows_of(wide)
                # Nothing comes of other experts' rows: they become 0 in what is a copy.
                if wide != place and ctx.sums is not None:
                    grad_MO[own:] = 0
                elif wide != place and ctx.reads is not None:
                    rows_MC[own:] = 0
                else:
                    grad_MO, rows_MC = grad_MO[:own], rows_MC[:own]
                torch.mm(grad_MO.t(), rows_MC, out=made_GOC[at])
            if grad_weight is not None and grad_weight.dtype != ctx.factors:
                grad_weight[experts] = made_GOC
        if grad_weight is not None:
            for expert, count in enumerate(ctx.counts):
                if not count:
                    grad_weight[expert] = 0
        if grad_x is not None:
            grad_x = grad_x if ctx.reads is None else ctx.reads.summed(grad_x)
            grad_x = grad_x.to(grad.dtype)
        return grad_x, grad_weight, None, None, None, None


def _reader(x: torch.Tensor, dealt: Dealt | None) -> Callable[[slice], torch.Tensor]:
    """What gives an expert's rows: those of x in its place, or of the tokens that it is dealt."""
    if dealt is None:
        return lambda place: x[place]
    tokens_N = dealt.tokens_N
    return lambda place: x.index_select(0, tokens_N[place])


def _seen(weight_GOC: torch.Tensor, dtype: torch.dtype, *, rounds: bool) -> torch.Tensor:
    """Experts' weights as factors."""
    return (weight_GOC.bfloat16() if rounds else weight_GOC).to(dtype)


def _multiply(left: torch.Tensor, right: torch.Tensor, *, into: torch.Tensor) -> None:
    if left.dtype == into.dtype:
        torch.mm(left, right, out=into)
    else:
        into.copy_(left @ right)


def _rows_at_a_time(products: torch.dtype, device: torch.device) -> int:
    """See `ROWS_AT_A_TIME`; 1 where other products are made."""
    is_widened = products == torch.bfloat16 and kind_of(device) == "cpu"
    return ROWS_AT_A_TIME if is_widened else 1


def _widened(place: slice, rows_at_a_time: int, num_rows: int) -> slice:
    """An expert's rows, and so many of those after them that their number is a multiple."""
    count = -(-(place.stop - place.start) // rows_at_a_time) * rows_at_a_time
    return slice(place.start, min(place.start + count, num_rows))


def _groups(counts: Sequence[int], weight_EOC: torch.Tensor) -> list[tuple[slice, list[slice]]]:
    """Neighbouring experts that have rows, and the rows of each; see `NUMBERS_AT_A_TIME`."""
    most = max(1, NUMBERS_AT_A_TIME // max(1, weight_EOC[0].numel()))
    found: list[tuple[slice, list[slice]]] = []
    start = 0
    for expert, count in enumerate(counts):
        if count:
            if found and found[-1][0].stop == expert and len(found[-1][1]) < most:
                experts, places = found.pop()
            else:
                experts, places = slice(expert, expert), []
            place = slice(start, start + count)
            found.append((slice(experts.start, expert + 1), [*places, place]))
        start += count
    return found


ALL_EXPERTS_FUNCTIONS.register(GROUPED, grouped_experts)
