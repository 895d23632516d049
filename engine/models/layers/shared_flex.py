"""Attention of a tree of rows by FlexAttention: over all packed tokens at once, block by block.

A way beside that of `shared_attention`, which lays keys out for each branch. Here nothing is laid
out: blocks of queries and keys that have nothing to do with each other are left out (arXiv
2412.05496). It counts on a GPU where `engine/kernels/choice.py` says so: torch compiles it to a
Triton kernel, which no device has done yet. On a CPU torch 2.13 has no backward pass of it but for
tests.

Shape letters: H query heads, J key-value heads, E their width; S packed tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from rolemesh.engine.kernels.choice import triton_serves
from rolemesh.engine.packing.tree_layout import TreeLayout


def flex_serves(device: torch.device) -> bool:
    """Whether trees of rows on a device are attended to by FlexAttention.

    Raises:
        ValueError: See `triton_serves`.
    """
    return device.type == "cuda" and triton_serves(device)


def with_block_mask(tree: TreeLayout) -> TreeLayout:
    """The layout with what FlexAttention is told of it; once a pass, for all its layers.

    A token attends to itself and to the tokens before it in its row. A token is in the rows of its
    own branch and of those that follow up to `last_branch_S`.
    """
    branch_S, last_branch_S, position_S = tree.branch_S, tree.last_branch_S, tree.positions_1S[0]

    def may_attend(
        batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        has_key = (branch_S[key] <= branch_S[query]) & (branch_S[query] <= last_branch_S[key])
        return has_key & (position_S[key] <= position_S[query])

    num_tokens, device = len(branch_S), branch_S.device
    # Uncompiled it writes down all pairs of tokens: 268 MB for 16,384.
    make: Any = _compiled_mask() if device.type == "cuda" else create_block_mask
    mask = make(may_attend, None, None, num_tokens, num_tokens, device=device)
    return replace(tree, block_mask=mask)


def flex_shared_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tree: TreeLayout,
    scaling: float | None,
) -> torch.Tensor:
    """Attention of packed tokens, with the layout's `block_mask`.

    Args:
        query: float [1, H, S, E], rotated.
        key: float [1, J, S, E], rotated.
        value: float [1, J, S, E].
        tree: How the tokens stand.
        scaling: Of the products.

    Returns:
        float [1, S, H, E], in autocast's type where it is on.
    """
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        # Rotations are float32, values are not, and autocast does not know this attention.
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    attend: Any = _compiled() if kind == "cuda" else flex_attention
    attended: torch.Tensor = attend(
        query,
        key,
        value,
        block_mask=tree.block_mask,
        scale=scaling,
        enable_gqa=key.shape[1] != query.shape[1],
    )
    return attended.transpose(1, 2)


@functools.cache
def _compiled() -> Callable[..., Any]:
    # Each pass has its own number of tokens: otherwise each would be compiled anew.
    return torch.compile(flex_attention, dynamic=True)


@functools.cache
def _compiled_mask() -> Callable[..., Any]:
    return torch.compile(create_block_mask, dynamic=True)
