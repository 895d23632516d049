"""Arithmetic on packed ragged tokens that the formulas of this package share.

Shape letters: B rows, N packed tokens, K width of a block, C blocks. Nothing here loops over
tokens, and padding at most doubles the memory, however skewed the lengths are.
"""

from __future__ import annotations

import torch

from rolemesh.engine.experience import ColumnKind, Experience

BLOCK_TOKENS = 64
"""Longest block of a scan, a power of two: K multiply-adds a token against one step of the carry
loop a block. 32 to 128 are within a third of each other for 64 rows of 32,768 tokens."""


def completion_values(batch: Experience, name: str) -> torch.Tensor:
    """[N], the packed values of a completion column; raises if it is missing or another kind."""
    column = batch[name]
    if column.kind is not ColumnKind.COMPLETION:
        raise ValueError(
            f"column {name!r} is a {column.kind.value} column: give one value a completion token"
        )
    return column.values


def row_values(batch: Experience, name: str) -> torch.Tensor:
    """[B], the values of a row column; raises if it is missing or another kind."""
    column = batch[name]
    if column.kind is not ColumnKind.ROW:
        raise ValueError(f"column {name!r} is a {column.kind.value} column: give one value a row")
    return column.values


def loss_mask_of(batch: Experience) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss mask, bool [N], and the row offsets of completion tokens, int64 [B + 1]."""
    mask_N = completion_values(batch, "loss_mask")
    if mask_N.dtype != torch.bool:
        raise ValueError(f"column 'loss_mask' has type {mask_N.dtype}: give torch.bool")
    offsets = batch["loss_mask"].offsets
    assert offsets is not None  # Column refuses a completion column without offsets
    return mask_N, offsets


def unmasked_per_row(loss_mask_N: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Counts the unmasked tokens of each row.

    Args:
        loss_mask_N: bool [N], 1 = counts.
        offsets: int64 [B + 1].

    Returns:
        int64 [B], on the mask's device.
    """
    running = torch.zeros(len(loss_mask_N) + 1, dtype=torch.int64, device=loss_mask_N.device)
    torch.cumsum(loss_mask_N, 0, out=running[1:])
    return running[offsets.to(loss_mask_N.device)].diff()


def row_sums(values_M: torch.Tensor, counts_B: torch.Tensor) -> torch.Tensor:
    """Adds up neighbouring numbers row by row.

    Not by a scatter-add, whose order is undefined on a GPU.

    Args:
        values_M: float [M].
        counts_B: int64 [B], numbers of each row; their sum is M.

    Returns:
        float [B], 0 for a row without numbers.
    """
    if not len(counts_B):
        return values_M[:0]  # segment_reduce takes no empty batch
    # Unchecked: the check reads the device, and counts are made of the same mask as the values.
    sums_B: torch.Tensor = torch.segment_reduce(
        values_M, "sum", lengths=counts_B, initial=0, unsafe=True
    )
    return sums_B


def row_sum_of_each(values_M: torch.Tensor, counts_B: torch.Tensor) -> torch.Tensor:
    """Replaces each number by the sum of its row, without gradient.

    Sums in float64.

    Args:
        values_M: float [M].
        counts_B: int64 [B], numbers of each row; their sum is M.

    Returns:
        float [M], of the type of `values_M`.
    """
    sums_B = row_sums(values_M.detach().double(), counts_B)
    return sums_B.repeat_interleave(counts_B, output_size=len(values_M)).to(values_M.dtype)


def row_mean_of_each(values_M: torch.Tensor, counts_B: torch.Tensor) -> torch.Tensor:
    """Replaces each number by the mean of its row.

    Sums in float64. The map is its own adjoint, so the gradient is the same map again: neither
    way needs a scatter-add.

    Args:
        values_M: float [M], with or without a gradient.
        counts_B: int64 [B], numbers of each row; their sum is M.

    Returns:
        float [M], of the type of `values_M`.
    """
    means_M: torch.Tensor = _RowMeanOfEach.apply(values_M, counts_B)  # type: ignore[no-untyped-call]
    return means_M


class _RowMeanOfEach(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, values_M: torch.Tensor, counts_B: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(counts_B)
        return _means(values_M, counts_B)

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, *gradients_M: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        (counts_B,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return _means(gradients_M[0], counts_B), None


def _means(values_M: torch.Tensor, counts_B: torch.Tensor) -> torch.Tensor:
    means_B = row_sums(values_M.double(), counts_B) / counts_B.clamp_min(1)
    return means_B.repeat_interleave(counts_B, output_size=len(values_M)).to(values_M.dtype)


def decayed_sums(values_N: torch.Tensor, lengths: torch.Tensor, decay: float) -> torch.Tensor:
    """Sums each token and its row's later ones: y[t] = x[t] + decay * y[t + 1].

    Tokens are numbered from the end of their row and cut into blocks of K. Inside a block the
    sum is a product with the triangular matrix T[i, k] = decay^(i - k), k <= i; between blocks
    only y of the last token is carried, which takes one step a block of the longest row, for all
    rows at once. Rows shorter than a block use a narrower one (powers of two), so that a batch of
    single tokens is not padded to K.

    Args:
        values_N: float64 [N].
        lengths: int64 [B], tokens in each row; their sum is N.
        decay: Between 0 and 1; 0^0 is 1.

    Returns:
        float64 [N].
    """
    # One slot more than tokens: padding of blocks reads 0 from it and is written back to it.
    slots = torch.nn.functional.pad(values_N, (0, 1))
    sums = torch.empty_like(slots)
    stops = lengths.cumsum(0)
    width, shorter = 1, 0
    while width <= BLOCK_TOKENS:
        longest = width if width < BLOCK_TOKENS else torch.iinfo(torch.int64).max
        rows = ((lengths > shorter) & (lengths <= longest)).nonzero().flatten()
        if len(rows):
            _scan_blocks(slots, sums, stops[rows], lengths[rows], decay, width)
        width, shorter = 2 * width, width
    return sums[:-1]


def _scan_blocks(
    slots: torch.Tensor,
    sums: torch.Tensor,
    stops: torch.Tensor,
    lengths: torch.Tensor,
    decay: float,
    width: int,
) -> None:
    """Scans some rows of slots [N + 1] into sums [N + 1], in blocks of `width` from their ends."""
    device = slots.device
    blocks_per_row, order = ((lengths + width - 1) // width).sort(descending=True, stable=True)
    stops, lengths = stops[order], lengths[order]

    # Blocks lie level by level (all rows' last block first). Rows are sorted by their number of
    # blocks, so the rows that reach a level are a prefix of those that reach the one before.
    rows_at_level = blocks_per_row.bincount().flip(0).cumsum(0).flip(0)[1:]
    level_starts = rows_at_level.cumsum(0) - rows_at_level
    num_levels = len(rows_at_level)
    level_C = torch.arange(num_levels, device=device).repeat_interleave(rows_at_level)
    row_C = torch.arange(len(level_C), device=device) - level_starts[level_C]

    back_K = torch.arange(width, device=device)
    index_CK = (stops[row_C] - 1 - level_C * width)[:, None] - back_K
    index_CK.masked_fill_(index_CK < (stops - lengths)[row_C][:, None], len(slots) - 1)
    blocks_CK = slots.index_select(0, index_CK.view(-1)).view_as(index_CK)

    powers = torch.pow(
        torch.tensor(decay, dtype=slots.dtype, device=device),
        torch.arange(width + 1, device=device),
    )
    decay_KK = powers[(back_K[:, None] - back_K).clamp_min(0)].tril()
    blocks_CK = blocks_CK @ decay_KK.T

    if num_levels > 1:
        carry_C = blocks_CK[:, -1].clone()
        counts = rows_at_level.tolist()
        before, here = 0, counts[0]
        for count in counts[1:]:
            carry_C[here : here + count] += powers[width] * carry_C[before : before + count]
            before, here = here, here + count
        later_C = carry_C[level_starts[(level_C - 1).clamp_min(0)] + row_C]
        later_C.masked_fill_(level_C == 0, 0)
        blocks_CK.addr_(later_C, powers[1:])
    sums.scatter_(0, index_CK.view(-1), blocks_CK.view(-1))
