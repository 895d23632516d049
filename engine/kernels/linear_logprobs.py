"""Products of states and vocabulary that end in what a softmax needs, in Triton.

The logits of a tile live in registers. The forward pass leaves a few sums a token, from which
log-prob and entropy follow; the backward pass computes a tile again and leaves its gradient, in
the type of products, for as many columns of the vocabulary as the caller asks for.

The reference is `models/vocabulary/logprobs.py`. Not taken from a library: cut-cross-entropy (25.1)
and Liger (0.8) have no entropy and no gradient for it, and of a cut vocabulary they give no sums
that ranks can combine; Liger's needs a loss that ends in the same call. The nearest is the kernel
of verl (Apache 2.0), which is no library; like it, the products of the backward pass are cuBLAS's.

Shape letters: N tokens, D width, V rows of the vocabulary that this rank has, W those of them in
one block of columns, S splits.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

LOWEST = -1e30
"""Stands for the largest logit of no columns: finite, so that 0 times a difference is 0."""
PROGRAMS_PER_PROCESSOR = 2
"""Splits of the vocabulary are so many that each processor of the device gets this many blocks."""

_WIDENS = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's interpreter (3.7) multiplies the bits of bfloat16 numbers as integers. As float32 ones
they have the same products."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Sizes of a tile of logits, powers of two, each at least 16."""

    tokens: int = 128
    """Rows of states."""
    columns: int = 128
    """Rows of the vocabulary."""
    width: int = 64
    """Elements of a product that are read at a time."""
    num_warps: int = 8
    """Groups of 32 threads that share a tile."""
    num_stages: int = 3
    """Reads that are under way while products are made."""

    def of(self, hidden_ND: torch.Tensor) -> Tiles:
        """Those for states of a type: float32 ones take twice the memory of a processor."""
        if hidden_ND.dtype == torch.bfloat16:
            return self
        return Tiles(
            min(self.tokens, 64), min(self.columns, 64), min(self.width, 32), 4, self.num_stages
        )


DEFAULT_TILES = Tiles()


def partial_sums(
    hidden_ND: torch.Tensor,
    vocabulary_VD: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    temperature: float,
    first_row: int = 0,
    tiles: Tiles = DEFAULT_TILES,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a slice of the vocabulary contributes to log-probs and entropy.

    With z the logits after temperature and m a token's largest one of this slice:

        sum exp(z - m),  sum (z - m) exp(z - m),  z[target], or 0 where the slice lacks it

    Args:
        hidden_ND: float32 or bfloat16 [N, D], contiguous.
        vocabulary_VD: Of the same type, [V, D], contiguous; V may be 0.
        targets_N: int64 [N], token ids.
        temperature: Divides the logits, > 0.
        first_row: Token id of the first row of vocabulary_VD.
        tiles: Sizes of a tile.
        splits: Parts of the vocabulary that are computed side by side; None: as the device wants.

    Returns:
        The three sums, float32 [3, N]; and m, float32 [N]. All sums are float32, products too.
    """
    num_tokens, width = hidden_ND.shape
    num_rows = len(vocabulary_VD)
    if not num_tokens or not num_rows:
        lowest = torch.finfo(torch.float32).min
        sums_3N = hidden_ND.new_zeros(3, num_tokens, dtype=torch.float32)
        return sums_3N, torch.full_like(sums_3N[0], lowest)
    tiles = tiles.of(hidden_ND)
    blocks, columns = triton.cdiv(num_tokens, tiles.tokens), triton.cdiv(num_rows, tiles.columns)
    wanted = splits or triton.cdiv(_processors(hidden_ND.device) * PROGRAMS_PER_PROCESSOR, blocks)
    tiles_per_split = triton.cdiv(columns, min(wanted, columns))
    splits = triton.cdiv(columns, tiles_per_split)
    sums_S3N = torch.empty(splits, 3, num_tokens, dtype=torch.float32, device=hidden_ND.device)
    largest_SN = torch.empty_like(sums_S3N[:, 0], memory_format=torch.contiguous_format)
    # Blocks of tokens are numbered fastest: those that run side by side read the same rows of the
    # vocabulary, which then come from the device's cache.
    _partial_sums[(blocks, splits)](
        hidden_ND,
        vocabulary_VD,
        targets_N,
        sums_S3N,
        largest_SN,
        num_tokens,
        num_rows,
        first_row,
        1.0 / temperature,
        tiles_per_split,
        WIDTH=width,
        LOWEST=LOWEST,
        TOKENS=tiles.tokens,
        COLUMNS=tiles.columns,
        INNER=tiles.width,
        WIDENS=_WIDENS,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return combine(sums_S3N, largest_SN)


def combine(sums_S3N: torch.Tensor, largest_SN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of S slices, float32 [S, 3, N] and [S, N], as those of one; see `partial_sums`."""
    highest_N = largest_SN.amax(0)
    below_SN = largest_SN - highest_N
    exps_SN, products_SN, targets_SN = sums_S3N.unbind(1)
    scale_SN = below_SN.exp()
    sums_3N = torch.stack(
        [
            (scale_SN * exps_SN).sum(0),
            (scale_SN * (products_SN + below_SN * exps_SN)).sum(0),
            targets_SN.sum(0),
        ]
    )
    return sums_3N, highest_N


def logit_gradients(
    hidden_ND: torch.Tensor,
    vocabulary_WD: torch.Tensor,
    targets_N: torch.Tensor,
    lse_N: torch.Tensor,
    grad_logprobs_N: torch.Tensor,
    entropy_N: torch.Tensor | None,
    grad_entropy_N: torch.Tensor | None,
    *,
    temperature: float,
    first_row: int,
) -> torch.Tensor:
    """The gradient of a loss by the products of states and some rows of the vocabulary.

    With p = exp(z - lse), g and h the gradients by log-prob and entropy, and H the entropy:

        ([j = target] g - p (g + h (z - lse + H))) / temperature

    Args:
        hidden_ND: float32 or bfloat16 [N, D], contiguous.
        vocabulary_WD: Of the same type, [W, D], contiguous.
        targets_N: int64 [N], token ids.
        lse_N: float32 [N], log-sum-exp over the whole vocabulary.
        grad_logprobs_N: float32 [N].
        entropy_N: float32 [N]; None: no gradient comes from it.
        grad_entropy_N: float32 [N], with entropy_N.
        temperature: Divides the logits, > 0.
        first_row: Token id of the first row of vocabulary_WD.

    Returns:
        [N, W], of the type of hidden_ND.
    """
    num_tokens, width = hidden_ND.shape
    num_rows = len(vocabulary_WD)
    grad_NW = torch.empty(num_tokens, num_rows, dtype=hidden_ND.dtype, device=hidden_ND.device)
    if not grad_NW.numel():
        return grad_NW
    tiles = DEFAULT_TILES.of(hidden_ND)
    grid = (triton.cdiv(num_tokens, tiles.tokens), triton.cdiv(num_rows, tiles.columns))
    _logit_gradients[grid](
        hidden_ND,
        vocabulary_WD,
        targets_N,
        lse_N,
        grad_logprobs_N.contiguous(),
        entropy_N,
        None if grad_entropy_N is None else grad_entropy_N.contiguous(),
        grad_NW,
        num_tokens,
        num_rows,
        first_row,
        1.0 / temperature,
        WIDTH=width,
        WITH_ENTROPY=entropy_N is not None,
        TOKENS=tiles.tokens,
        COLUMNS=tiles.columns,
        INNER=tiles.width,
        WIDENS=_WIDENS,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return grad_NW


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


@triton.jit
def _logits(
    hidden: tl.tensor,
    vocabulary: tl.tensor,
    token_N: tl.tensor,
    row_V: tl.tensor,
    num_tokens: tl.tensor,
    num_rows: tl.tensor,
    inverse_temperature: tl.tensor,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    WIDENS: tl.constexpr,
) -> tl.tensor:
    """A tile of logits after temperature, float32 [TOKENS, COLUMNS]; any number outside."""
    inner = tl.arange(0, INNER)
    # The last token and row are read again where there are none: only columns need a mask.
    token_N = tl.minimum(token_N, num_tokens - 1).to(tl.int64)
    row_V = tl.minimum(row_V, num_rows - 1).to(tl.int64)
    hidden_at = hidden + token_N[:, None] * WIDTH + inner[None, :]
    vocabulary_at = vocabulary + row_V[None, :] * WIDTH + inner[:, None]
    total = tl.zeros((TOKENS, COLUMNS), dtype=tl.float32)
    for start in range(0, WIDTH, INNER):
        if WIDTH % INNER == 0:
            left = tl.load(hidden_at + start)
            right = tl.load(vocabulary_at + start)
        else:
            left = tl.load(hidden_at + start, mask=(inner + start < WIDTH)[None, :], other=0.0)
            right = tl.load(vocabulary_at + start, mask=(inner + start < WIDTH)[:, None], other=0.0)
        if WIDENS:
            left, right = left.to(tl.float32), right.to(tl.float32)
        total = tl.dot(left, right, total, input_precision="ieee")
    return total * inverse_temperature


@triton.jit
def _partial_sums(
    hidden: tl.tensor,
    vocabulary: tl.tensor,
    targets: tl.tensor,
    sums: tl.tensor,
    largest: tl.tensor,
    num_tokens: tl.tensor,
    num_rows: tl.tensor,
    first_row: tl.tensor,
    inverse_temperature: tl.tensor,
    tiles_per_split: tl.tensor,
    WIDTH: tl.constexpr,
    LOWEST: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    WIDENS: tl.constexpr,
) -> None:
    """One block of tokens over one split of the vocabulary; the sums are moved as m grows."""
    token_N = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    split = tl.program_id(1)
    is_token_N = token_N < num_tokens
    target_N = tl.load(targets + token_N, mask=is_token_N, other=-1) - first_row
    largest_N = tl.full((TOKENS,), LOWEST, dtype=tl.float32)
    exps_N = tl.zeros((TOKENS,), dtype=tl.float32)
    products_N = tl.zeros((TOKENS,), dtype=tl.float32)
    at_target_N = tl.zeros((TOKENS,), dtype=tl.float32)
    for tile in range(split * tiles_per_split, (split + 1) * tiles_per_split):
        row_V = tile * COLUMNS + tl.arange(0, COLUMNS)
        is_row_V = row_V < num_rows
        logits = _logits(
            hidden,
            vocabulary,
            token_N,
            row_V,
            num_tokens,
            num_rows,
            inverse_temperature,
            WIDTH,
            TOKENS,
            COLUMNS,
            INNER,
            WIDENS,
        )
        is_target = (row_V[None, :] == target_N[:, None]) & is_row_V[None, :]
        at_target_N += tl.sum(tl.where(is_target, logits, 0.0), 1)
        higher_N = tl.maximum(largest_N, tl.max(tl.where(is_row_V[None, :], logits, LOWEST), 1))
        below_N = largest_N - higher_N
        scale_N = tl.exp(below_N)
        shifted = tl.where(is_row_V[None, :], logits - higher_N[:, None], 0.0)
        exps = tl.where(is_row_V[None, :], tl.exp(shifted), 0.0)
        products_N = scale_N * (products_N + below_N * exps_N) + tl.sum(shifted * exps, 1)
        exps_N = scale_N * exps_N + tl.sum(exps, 1)
        largest_N = higher_N
    at = sums + split.to(tl.int64) * 3 * num_tokens + token_N
    tl.store(at, exps_N, mask=is_token_N)
    tl.store(at + num_tokens, products_N, mask=is_token_N)
    tl.store(at + 2 * num_tokens, at_target_N, mask=is_token_N)
    tl.store(largest + split.to(tl.int64) * num_tokens + token_N, largest_N, mask=is_token_N)


@triton.jit
def _logit_gradients(
    hidden: tl.tensor,
    vocabulary: tl.tensor,
    targets: tl.tensor,
    lse: tl.tensor,
    grad_logprobs: tl.tensor,
    entropy: tl.tensor,
    grad_entropy: tl.tensor,
    gradients: tl.tensor,
    num_tokens: tl.tensor,
    num_rows: tl.tensor,
    first_row: tl.tensor,
    inverse_temperature: tl.tensor,
    WIDTH: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    WIDENS: tl.constexpr,
) -> None:
    """One tile of gradients, from its logits."""
    token_N = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    row_V = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_token_N = token_N < num_tokens
    logits = _logits(
        hidden,
        vocabulary,
        token_N,
        row_V,
        num_tokens,
        num_rows,
        inverse_temperature,
        WIDTH,
        TOKENS,
        COLUMNS,
        INNER,
        WIDENS,
    )
    target_N = tl.load(targets + token_N, mask=is_token_N, other=-1) - first_row
    grad_N = tl.load(grad_logprobs + token_N, mask=is_token_N, other=0.0)
    # Tokens that are none have an lse of 0, so that nothing overflows; they are not stored.
    logprobs = tl.where(
        is_token_N[:, None],
        logits - tl.load(lse + token_N, mask=is_token_N, other=0.0)[:, None],
        0.0,
    )
    pulled = grad_N[:, None]
    if WITH_ENTROPY:
        entropy_N = tl.load(entropy + token_N, mask=is_token_N, other=0.0)
        grad_entropy_N = tl.load(grad_entropy + token_N, mask=is_token_N, other=0.0)
        pulled = pulled + grad_entropy_N[:, None] * (logprobs + entropy_N[:, None])
    found = -tl.exp(logprobs) * pulled
    found += tl.where(row_V[None, :] == target_N[:, None], grad_N[:, None], 0.0)
    at = gradients + token_N[:, None].to(tl.int64) * num_rows + row_V[None, :]
    tl.store(
        at,
        (found * inverse_temperature).to(gradients.dtype.element_ty),
        mask=is_token_N[:, None] & (row_V < num_rows)[None, :],
    )
