"""Attention of packed rows.

Each row attends to itself; where rows share their beginnings, each branch attends to its whole row:
to what it shares with others, and to itself. Nothing is computed twice, and no mask is larger than
branch by row.

Shape letters: H query heads, J key-value heads, E their width; S, R, C, T as in `tree_layout`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rolemesh.engine.hardware.devices import kind_of
from rolemesh.engine.layout.families import UnsupportedFamilyError
from rolemesh.engine.models.layers.shared_flex import (
    flex_serves,
    flex_shared_attention,
    with_block_mask,
)
from rolemesh.engine.packing.row_cut import RowCut
from rolemesh.engine.packing.tree_layout import Block, TreeLayout
from rolemesh.engine.parallel.context_parallel import to_heads, to_tokens

SHARING_ATTENTION = "rolemesh_tree"
"""Under this name transformers knows the attention."""

_ROTATIONS_BY_LENGTH = {"dynamic", "longrope"}
"""Kinds of rotary positions that depend on the largest one of a pass."""

MOST_SCORES = 2**20
"""Up to so many scores, attention in bfloat16 on a CPU makes them as matrices. The backward pass of
torch's own kernel (2.13) takes 5 times as long at 300,000 scores and as long at a million, and is
no nearer, since it rounds the weights of the values."""

SHORT_ROW, MANY_HEADS = 64, 96
"""So does attention of any type, where rows have so many keys at most, and so many heads in all.
The kernel takes each head of a row by itself, 1.2 to 3 times as long (forward and backward)."""


def sharing_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    tree: TreeLayout | None = None,
    cut: RowCut | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers: its own "sdpa", unless rows are packed.

    Args:
        module: The attention layer.
        query: float [B, H, T, E], rotated.
        key: float [B, J, T, E], rotated.
        value: float [B, J, T, E].
        attention_mask: For "sdpa".
        tree: How packed rows stand; B is 1 then, and T is S.
        cut: This rank's part of packed rows that several cut among them; T is then its length.
        dropout: For "sdpa"; models here have none.
        scaling: Of the products.
        **kwargs: For "sdpa", but for `sliding_window`: the tokens that one attends to, itself
            counted, or None for all of its row.

    Returns:
        float [B, T, H, E]; and None for the weights, which are never whole.
    """
    if tree is None:
        plain, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return plain, None
    if cut is not None:
        # What a kernel is given under autocast is narrow all the same, and half as much to send.
        narrow = _as_autocast_does(query, key, value)
        query, key, value = to_heads(narrow, cut.group, cut.num_tokens)
    attended = _attend_tree(query, key, value, tree, scaling, kwargs.get("sliding_window"))
    return attended if cut is None else to_tokens(attended, cut.group), None


def _attend_tree(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tree: TreeLayout,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Attention of whole packed rows, [1, S, H, E]."""
    if window is not None and window >= tree.longest:
        window = None
    if tree.block_mask is not None and window is None:
        return flex_shared_attention(query, key, value, tree, scaling)
    packed, heads, width = query.shape[2], query.shape[1], query.shape[3]
    # Rows of the gathers: a token with all of its heads.
    whole = [_by_token(tensor) for tensor in (query, key, value)]
    # Each block's own tokens by one split: the gradient of a slice is as large as all tokens.
    sizes = [block.num_tokens for block in tree.blocks]
    own = zip(*(torch.split(tensor, sizes) for tensor in whole), strict=True)
    attended = [
        _attend_block(block, of_block, whole[1:], width=width, scaling=scaling, window=window)
        for block, of_block in zip(tree.blocks, own, strict=True)
    ]
    # The kernel keeps its output for the backward pass; a copy of it would be kept as well.
    joined = attended[0] if len(attended) == 1 else torch.cat(attended)
    return joined.view(1, packed, heads, width)


def _attend_block(
    block: Block,
    own: tuple[torch.Tensor, ...],
    keys_and_values: list[torch.Tensor],
    *,
    width: int,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Attended values of a block's tokens, [tokens, H * E].

    `own` are its tokens' queries, keys and values, and `keys_and_values` those of all tokens.
    """
    gathered = own if block.keys is None else own[:1]
    if block.queries is not None:
        gathered = tuple(block.queries(tensor) for tensor in gathered)
    if block.keys is not None:
        gathered += tuple(block.keys(tensor) for tensor in keys_and_values)
    queries, keys, values = (_rectangle(tensor, block.num_branches, width) for tensor in gathered)
    mask = block.may_attend
    if window is not None and window < block.longest:
        mask = _within(window, mask, queries.shape[2], queries.device)
    attended = _by_token_of_rows(_attend(queries, keys, values, mask=mask, scaling=scaling))
    return attended if block.back is None else block.back(attended)


def _within(
    window: int, mask: torch.Tensor | None, num_queries: int, device: torch.device
) -> torch.Tensor:
    """A block's mask, or a causal one for None, without what lies before the last `window` keys."""
    if mask is None:
        shape = (1, 1, num_queries, num_queries)
        mask = torch.ones(shape, dtype=torch.bool, device=device).tril()
    place_T = torch.arange(mask.shape[-1], device=device)
    return mask & (place_T >= mask.sum(-1, keepdim=True) - window)


AttentionInterface.register(SHARING_ATTENTION, sharing_attention)
# Masks are those of "sdpa": without this line a batch that is not packed would go without.
AttentionMaskInterface.register(SHARING_ATTENTION, sdpa_mask)


def inputs_of(tree: TreeLayout, cut: RowCut | None = None) -> dict[str, Any]:
    """What a model that attends by `sharing_attention` is called with, besides its tokens."""
    positions_1L = tree.rotations if cut is None else cut.positions_1L
    if flex_serves(positions_1L.device):
        tree = with_block_mask(tree)
    # Transformers leaves a mask of four dimensions alone. Given none, it asks the device whether
    # positions begin anew, which waits for all that the device computes; where they do, it makes a
    # mask of S x S.
    nothing = torch.empty(1, 1, 0, 0, dtype=torch.bool, device=positions_1L.device)
    inputs = {"position_ids": positions_1L, "attention_mask": nothing, "tree": tree}
    return inputs if cut is None else inputs | {"cut": cut}


def takes_packed_rows(lm: torch.nn.Module) -> bool:
    """Whether all attention of a transformers decoder may be this one.

    Not where layers carry a state or a convolution from token to token, look ahead, cut rows into
    chunks, cap scores or attend by code of their own.
    """
    model: Any = lm
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return bool(
        getattr(model, "_supports_attention_backend", False)
        and getattr(model, "_supports_sdpa", False)
        and kinds <= {"full_attention", "sliding_attention"}
        and not getattr(config, "attn_logit_softcapping", None)
        and not getattr(config, "use_bidirectional_attention", None)
        and not getattr(model, "_is_stateful", False)
        # Not every family with a state says that it has one.
        and not any(isinstance(module, torch.nn.Conv1d) for module in model.modules())
        and all(getattr(module, "is_causal", True) for module in model.modules())
    )


def check_cut_rows(config: Any, cp: int, *, are_packed: bool) -> None:
    """Refuses what a rank that has a part of a row alone would compute otherwise.

    Args:
        config: transformers config of the model.
        cp: Ranks that are to cut rows.
        are_packed: Whether the model takes packed rows.

    Raises:
        UnsupportedFamilyError: Rows of the model cannot be cut.
    """
    text = config.get_text_config()
    of_model = f"cp is {cp}, but the {text.model_type} model"
    if not are_packed:
        raise UnsupportedFamilyError(
            f"{of_model} takes no packed rows (its layers do more between tokens than our "
            "attention), and no others can be cut: give cp 1"
        )
    rotations = getattr(text, "rope_parameters", None) or {}
    by_layer = [one for one in rotations.values() if isinstance(one, dict)]
    kinds = {one.get("rope_type") for one in (rotations, *by_layer)}
    if found := kinds & _ROTATIONS_BY_LENGTH:
        raise UnsupportedFamilyError(
            f"{of_model} has rope_type {found.pop()!r}, which looks at the last position of a "
            "pass, and each rank has another: give cp 1"
        )


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    scaling: float | None,
) -> torch.Tensor:
    """Causal attention, or attention with a mask, whose rows all have something to attend to."""
    num_scores = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
    query, key, value = _as_autocast_does(query, key, value)
    is_narrow = query.dtype == torch.bfloat16 and num_scores <= MOST_SCORES
    are_short = key.shape[2] <= SHORT_ROW and query.shape[0] * query.shape[1] >= MANY_HEADS
    if (is_narrow or are_short) and kind_of(query.device) == "cpu":
        return _attend_by_products(query, key, value, mask, scaling)
    is_grouped = key.shape[1] != query.shape[1]
    if is_grouped and mask is not None and kind_of(query.device) == "cuda":
        # There only the kernel that makes whole score matrices takes groups with a mask.
        repeats = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
        is_grouped = False
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None and query.shape[2] > 1,
        scale=scaling,
        enable_gqa=is_grouped,
    )


def _as_autocast_does(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A kernel's inputs in autocast's type where it is on: rotated ones are float32."""
    kind = inputs[0].device.type
    if not torch.is_autocast_enabled(kind):
        return inputs
    return tuple(tensor.to(torch.get_autocast_dtype(kind)) for tensor in inputs)


def _attend_by_products(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
) -> torch.Tensor:
    """The same with whole score matrices, in float32 or wider; heads of a group are queries."""
    wide = torch.promote_types(query.dtype, torch.float32)
    rows, heads, queries, width = query.shape
    groups, keys = key.shape[1:3]
    if mask is None:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril()
        mask = mask[None, None]
    with torch.autocast(query.device.type, enabled=False):
        grouped = query.reshape(rows, groups, heads // groups * queries, width).to(wide)
        scores = grouped @ key.to(wide).transpose(-1, -2)
        scores = scores.mul(width**-0.5 if scaling is None else scaling)
        scores = scores.view(rows, groups, heads // groups, queries, keys)
        weights = scores.masked_fill(~mask[:, :, None], -math.inf).softmax(-1)
        attended = weights.view(rows, groups, -1, keys) @ value.to(wide)
        return attended.view(rows, heads, queries, width).to(value.dtype)


def _by_token(tensor_1HSE: torch.Tensor) -> torch.Tensor:
    """[1, H, S, E] as [S, H * E]."""
    return tensor_1HSE[0].transpose(0, 1).flatten(1)


def _by_token_of_rows(tensor_RHCE: torch.Tensor) -> torch.Tensor:
    """[R, H, C, E] as [R * C, H * E]."""
    return tensor_RHCE.transpose(1, 2).flatten(2).flatten(0, 1)


def _rectangle(tensor: torch.Tensor, num_rows: int, width: int) -> torch.Tensor:
    """[R * C, H * E] as [R, H, C, E]."""
    return tensor.view(num_rows, len(tensor) // num_rows, -1, width).transpose(1, 2)
