"""Tensor parallelism: a transformers decoder that computes on one slice of its weights.

Attention is cut by heads and the MLP by its inner width (arXiv 1909.08053, section 3), the
embedding by rows of the vocabulary. Parameters stay plain local tensors; `slices.slice_boxes`
says which boxes of the whole each one is. What does not divide by ranks (norms, biases after a sum,
a score head) every rank holds whole and computes alike, or, where slices share the tokens between
attention and MLP, on its own ones (`token_shares`).

Shape letters: B rows, T longest row, D width, S vocabulary rows of this slice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from rolemesh.engine.layout.adapters import is_factor
from rolemesh.engine.layout.families import (
    EMBEDDING,
    DecoderShape,
    cut_of,
    part_of_layer,
)
from rolemesh.engine.layout.slices import replica_ranks_of_kv, slice_boxes, slice_sizes
from rolemesh.engine.parallel.low_rank import adapted
from rolemesh.engine.parallel.mesh import RankGroup
from rolemesh.engine.parallel.stages import global_name
from rolemesh.engine.parallel.token_shares import gather_to_slices, sum_to_shares, take_share

# --- sums over slices ---------------------------------------------------------------------


def all_reduce(
    tensor: torch.Tensor,
    group: RankGroup,
    op: Any = dist.ReduceOp.SUM,
    *,
    in_own_type: bool = False,
) -> torch.Tensor:
    """Combines a tensor over a group, at least in float32.

    The tensor is floating, of any shape, and of the same one on all ranks; the result is a new one
    of the same type and shape. Empty tensors are not sent: every rank of a tensor group has the
    same rows, so all skip. With in_own_type it is sent and added in its own type: half the bytes
    of a bfloat16 tensor, and a rounding after each addition.
    """
    if group.size == 1 or tensor.numel() == 0:
        return tensor
    wide = tensor.detach().to(
        tensor.dtype if in_own_type else torch.promote_types(tensor.dtype, torch.float32),
        copy=True,
        memory_format=torch.contiguous_format,
    )
    dist.all_reduce(wide, op=op, group=group.process_group)
    return wide.to(tensor.dtype)


class _Copy(torch.autograd.Function):
    """f of arXiv 1909.08053: the same input for all slices; its gradient is their sum."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: RankGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        # What enters attention and MLP is bfloat16 in narrow layers alone; see `rounding`.
        return all_reduce(gradient, ctx.group, in_own_type=True), None


class _Sum(torch.autograd.Function):
    """g of arXiv 1909.08053: the sum of what the slices made; each gets the sum's gradient."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, group: RankGroup, in_own_type: bool
    ) -> torch.Tensor:
        return all_reduce(tensor, group, in_own_type=in_own_type)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient, None, None


def copy_to_slices(tensor: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """Hands a tensor (of any shape) that is equal on all ranks to their slices.

    Its gradient is the sum of the slices' gradients, in the tensor's own type.
    """
    if group.size == 1:
        return tensor
    copied: torch.Tensor = _Copy.apply(tensor, group)  # type: ignore[no-untyped-call]
    return copied


def sum_over_slices(
    tensor: torch.Tensor, group: RankGroup, *, in_own_type: bool = False
) -> torch.Tensor:
    """Sums what the slices made, floating and of one shape on all ranks, as `all_reduce` says.

    The result has the input's type and shape, and is equal on all ranks.
    """
    if group.size == 1:
        return tensor
    summed: torch.Tensor = _Sum.apply(tensor, group, in_own_type)  # type: ignore[no-untyped-call]
    return summed


# --- modules that know their slice --------------------------------------------------------


class RowParallelLinear(nn.Linear):
    """A projection from this slice's columns to all of the output.

    Its bias is whole on every rank and added once, after the sum.
    """

    group: RankGroup
    shares_tokens: bool
    """Whether each rank gets the sum for its share of the tokens alone."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Projects floating [B, T, columns of this slice] to what `summed` gives."""
        output = self.summed(adapted(self, input, functional.linear(input, self.weight)))
        return output if self.bias is None else output + self.bias.to(output.dtype)

    def summed(self, part_BTD: torch.Tensor, *, in_own_type: bool = False) -> torch.Tensor:
        """The sum of the slices' products.

        Args:
            part_BTD: This slice's, floating [B, T, D].
            in_own_type: See `all_reduce`.

        Returns:
            [B, T, D], equal on all ranks; or this rank's share of it, see `sum_to_shares`.
        """
        if self.shares_tokens:
            return sum_to_shares(part_BTD, self.group, in_own_type=in_own_type)
        return sum_over_slices(part_BTD, self.group, in_own_type=in_own_type)


class RowSliceNorm(nn.Module):
    """An RMS norm over a width of which this rank holds a part: queries or keys of its heads."""

    weight: nn.Parameter
    group: RankGroup
    width: int
    """Of the whole."""
    sharing: int
    """Neighbouring slices that hold the same part."""
    eps: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Norms floating [B, T, part of the width], in float32, by the root mean square of all."""
        wide = hidden_states.float()
        squares = wide.square().sum(-1, keepdim=True) / self.sharing
        # Every slice divides by the sum, so that its gradient is the sum of theirs.
        total = copy_to_slices(sum_over_slices(squares, self.group), self.group)
        normed = wide * torch.rsqrt(total / self.width + self.eps)
        return (self.weight * normed).to(hidden_states.dtype)


class _OwnHeads:
    """A config as it is, but with the query heads of a slice: some attention splits by that."""

    def __init__(self, config: Any, num_heads: int) -> None:
        self._config = config
        self.num_attention_heads = num_heads

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


class VocabularySliceEmbedding(nn.Embedding):
    """An embedding of which this rank holds some rows."""

    group: RankGroup
    first_row: int
    """Token id of the first row held."""
    scale: float
    """What the rows are multiplied by; see `FamilyRecord.scales_embedding`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Embeds int64 [B, T] as [B, T, D], equal on all ranks."""
        return self.rows(input) if self.scale == 1.0 else self.rows(input) * self.scale

    def rows(self, input: torch.Tensor) -> torch.Tensor:
        """The rows of int64 [B, T], [B, T, D]; of ids outside they are looked up there."""
        if not len(self.weight):
            # An empty slice still takes part in the sum, and its (empty) gradient must exist.
            nothing_D = self.weight.sum(0)
            found_BTD = nothing_D.expand(*input.shape, -1)
        else:
            row = input - self.first_row
            is_elsewhere = (row < 0) | (row >= len(self.weight))
            found_BTD = functional.embedding(row.masked_fill(is_elsewhere, 0), self.weight)
            found_BTD = found_BTD.masked_fill(is_elsewhere[..., None], 0)
        return sum_over_slices(found_BTD, self.group)


def cut_tensors(
    lm: Any,
    shape: DecoderShape,
    group: RankGroup,
    *,
    stages: RankGroup | None = None,
    owners: RankGroup | None = None,
    shares_tokens: bool = False,
) -> None:
    """Makes a decoder compute on one slice, in place. Its weights become empty local tensors.

    Called on a model on the meta device; the caller fills the tensors (`slice_boxes` of each).
    A group of one rank changes nothing, but for experts that ranks share out.

    Where slices share the tokens, the first layer takes this rank's share of its input, layers
    and the last norm work on shares, and the backbone's result is a share: the caller gathers it.
    The backbone must be called with `token_shape`, B and T of the whole.

    Args:
        lm: A transformers model of a known family; embedding, layers or head may be absent.
        shape: Sizes of the whole model.
        group: The slices; this rank's is `group.index`.
        stages: The pipeline's, where the decoder is one of several.
        owners: Ranks that share the experts out, where they do.
        shares_tokens: Whether each slice holds only its share of the tokens outside of attention
            and MLP.

    Raises:
        LayoutError: The model cannot be cut into so many slices.
    """
    if group.size > 1:
        _cut_modules(lm, shape, group, shares_tokens=shares_tokens)
    owned = (0, 1) if owners is None else (owners.index, owners.size)
    for name, parameter in list(lm.named_parameters()):
        full_name = name if stages is None else global_name(name, shape, stages)
        sizes = slice_sizes(shape, full_name, tp=group.index, size=group.size, experts=owned)
        if tuple(parameter.shape) != sizes:
            set_parameter(lm, name, parameter.new_empty(sizes))
    for module in lm.modules():
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape


def _cut_modules(lm: Any, shape: DecoderShape, group: RankGroup, *, shares_tokens: bool) -> None:
    """Puts modules that know their slice in the places of others."""
    base = lm.base_model
    if base.embed_tokens is not None:
        base.embed_tokens = _vocabulary_slice(base.embed_tokens, shape, group)
    kv_heads = shape.num_kv_heads * replica_ranks_of_kv(shape, group.size) // group.size
    for layer in base.layers:
        attention, mlp = layer.self_attn, layer.mlp
        attention.o_proj = _row_parallel(attention.o_proj, group, shares_tokens)
        if hasattr(mlp, "experts"):
            # What routed and shared experts make of their slices is summed at once.
            mlp.register_forward_hook(_summing_hook(group, shares_tokens))
        else:
            mlp.down_proj = _row_parallel(mlp.down_proj, group, shares_tokens)
        heads = shape.num_heads // group.size
        attention.num_key_value_groups = heads // kv_heads
        if shape.record.has_fused_files:
            attention.num_key_value_heads = kv_heads
            attention.config = _OwnHeads(attention.config, heads)
        _cut_norms(attention, shape, group)
        for part in (attention, mlp):
            if shares_tokens:
                # Not a hook: recomputation of a part then keeps its share, and gathers again.
                part.forward = _on_all_tokens(part.forward, group)
            else:
                part.register_forward_pre_hook(_copying_hook(group), with_kwargs=True)
    if shares_tokens:
        base.layers[0].register_forward_pre_hook(
            lambda _, args: (take_share(args[0], group), *args[1:])
        )


def set_parameter(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Puts a tensor in the place of a parameter, whatever its shape, in every module that has it.

    A tied weight is reached by its first name and stays one parameter.
    """
    old = model.get_parameter(name)
    new = nn.Parameter(tensor, requires_grad=old.requires_grad)
    for module in model.modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            if parameter is old:
                setattr(module, leaf, new)


def first_vocabulary_row(shape: DecoderShape, group: RankGroup) -> int:
    """Token id of the first vocabulary row that this rank holds."""
    return slice_boxes(shape, EMBEDDING, tp=group.index, size=group.size)[0][0][0]


# --- gradients of what several slices hold ------------------------------------------------


def partial_gradients(
    names: Iterable[str], shape: DecoderShape, group: RankGroup, *, shares_tokens: bool = False
) -> dict[str, int]:
    """Parameters whose gradient, after backward, is a rank's own share of a sum.

    Norms of queries and keys see each slice's own heads, a router what its slice of the experts
    makes; a key-value head that several slices hold
    gets the gradients of each one's queries. A factor of an adapter that every slice holds whole
    has the part of its gradient that comes of the slice's own part of the other one. Where slices
    share the tokens, what else every slice holds whole sees each one's own tokens, but for a score
    head, which sees all. All other parameters have their whole gradient.

    Args:
        names: Hugging Face names of the rank's parameters.
        shape: Sizes of the whole model.
        group: The slices.
        shares_tokens: As `cut_tensors` was told.

    Returns:
        By name, how many neighbouring slices the gradient must be summed over: `group.size` for
        the norms. Empty for one slice.
    """
    if group.size == 1:
        return {}
    sharing = replica_ranks_of_kv(shape, group.size)
    shares = {}
    for name in names:
        cut = cut_of(shape, name)
        sees_own_tokens = shares_tokens and not name.startswith(f"{shape.head}.")
        is_part = sees_own_tokens or is_factor(name) or _sees_own_part(shape, name)
        if is_part and cut == "whole":
            shares[name] = group.size
        elif sharing > 1 and cut == "kv_heads":
            shares[name] = sharing
    return shares


def _sees_own_part(shape: DecoderShape, name: str) -> bool:
    part = None if is_factor(name) else part_of_layer(shape, name)
    return part is not None and part.sees_own_part


def sum_partial_gradients(
    weights: Iterable[tuple[str, torch.Tensor]], shares: Mapping[str, int], group: RankGroup
) -> None:
    """Sums partial gradients over the slices that share them, in place. Every rank calls it.

    Called once after the backward passes of a step, before gradients are clipped. One all-reduce
    in float32: each set of neighbours adds into a row of its own, so that no further process groups
    are needed (the parameters are small: with 16 slices of 8 heads, 8 rows of one head's weights).

    Args:
        weights: (name, parameter of any shape) of the rank: where parameters are cut over other
            ranks (FSDP), their local parts. These correspond, since slices that share a tensor cut
            it alike.
        shares: From `partial_gradients`.
        group: The slices.
    """
    gradients = [
        (weight.grad, shares[name])
        for name, weight in weights
        if name in shares and weight.grad is not None
    ]
    sizes = [grad.numel() * (group.size // sharing) for grad, sharing in gradients]
    if sum(sizes) == 0:
        return
    dtype = torch.promote_types(gradients[0][0].dtype, torch.float32)
    rows = torch.zeros(sum(sizes), dtype=dtype, device=gradients[0][0].device)
    own = [
        part.view(group.size // sharing, -1)[group.index // sharing]
        for part, (_, sharing) in zip(torch.split(rows, sizes), gradients, strict=True)
    ]
    for row, (grad, _) in zip(own, gradients, strict=True):
        row.copy_(grad.flatten())
    dist.all_reduce(rows, group=group.process_group)
    for row, (grad, _) in zip(own, gradients, strict=True):
        grad.copy_(row.view_as(grad))


# --- inside -------------------------------------------------------------------------------


def _copying_hook(group: RankGroup) -> Any:
    """A forward pre-hook: f at the entrance of attention and MLP, one sum for all projections."""

    def copy(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (copy_to_slices(args[0], group), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": copy_to_slices(kwargs["hidden_states"], group)}

    return copy


def _summing_hook(group: RankGroup, shares_tokens: bool) -> Any:
    """A forward hook: g at the exit of experts."""

    def summed(_: nn.Module, args: Any, part_BTD: torch.Tensor) -> torch.Tensor:
        narrow = part_BTD.dtype == torch.bfloat16
        if shares_tokens:
            return sum_to_shares(part_BTD, group, in_own_type=narrow)
        return sum_over_slices(part_BTD, group, in_own_type=narrow)

    return summed


def _on_all_tokens(forward: Callable[..., Any], group: RankGroup) -> Callable[..., Any]:
    """Attention or MLP behind a gather of their input's shares."""

    @functools.wraps(forward)
    def gathering(*args: Any, token_shape: tuple[int, int] | None = None, **kwargs: Any) -> Any:
        # Layers hand the shape to attention alone; an MLP may meet the zeros that fill shares up.
        if args:
            return forward(gather_to_slices(args[0], group, token_shape), *args[1:], **kwargs)
        whole = gather_to_slices(kwargs["hidden_states"], group, token_shape)
        return forward(**{**kwargs, "hidden_states": whole})

    return gathering


def _row_parallel(linear: nn.Linear, group: RankGroup, shares_tokens: bool) -> RowParallelLinear:
    module = RowParallelLinear(1, 1, bias=False, device="meta")
    module.weight, module.bias = linear.weight, linear.bias
    module.group, module.shares_tokens = group, shares_tokens
    return module


def _cut_norms(attention: Any, shape: DecoderShape, group: RankGroup) -> None:
    """Norms of queries and keys that go over the whole width, not over a head."""
    for name, heads in (("q_norm", shape.num_heads), ("k_norm", shape.num_kv_heads)):
        norm = getattr(attention, name, None)
        if norm is not None and cut_of(shape, f"model.layers.0.self_attn.{name}.weight") != "whole":
            module = RowSliceNorm()
            module.weight, module.group = norm.weight, group
            module.width = heads * shape.head_dim
            module.sharing = max(1, group.size // heads)
            module.eps = norm.variance_epsilon
            setattr(attention, name, module)


def _vocabulary_slice(
    embedding: nn.Embedding, shape: DecoderShape, group: RankGroup
) -> VocabularySliceEmbedding:
    module = VocabularySliceEmbedding(1, embedding.embedding_dim, device="meta")
    module.weight = embedding.weight
    module.group, module.first_row = group, first_vocabulary_row(shape, group)
    module.num_embeddings = shape.vocab_size
    module.scale = shape.embedding_scale
    return module
