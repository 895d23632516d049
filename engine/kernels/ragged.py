"""Packing and unpacking of ragged rows by one kernel, which copies a segment of each row.

The references are an index and a scatter of torch (`packing/batching.py`), which need an index as
long as the tokens, and whose gradient adds with atomic operations on a GPU.

Shape letters: B rows, T longest row, N packed tokens, K elements of a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
import triton
import triton.language as tl

from rolemesh.engine.devices import sent

BLOCK_ELEMENTS = 4096


@dataclass(frozen=True, slots=True)
class Segments:
    """Where the tokens of each row stand in a rectangle, which of them are packed, and where.

    Example: first (1, 0) and counts (2, 3) take tokens 1 and 2 of row 0, then 0 to 2 of row 1.
    """

    first_B: torch.Tensor
    """int64, place in the row of its first token."""
    counts_B: torch.Tensor
    """int64, tokens."""
    offsets_B: torch.Tensor
    """int64, place of its first token among the packed ones."""
    num_tokens: int
    """N."""
    longest: int
    """Most tokens of a row."""

    @classmethod
    def of(cls, first_B: torch.Tensor, counts_B: torch.Tensor, device: torch.device | str) -> Self:
        """From int64 [B] tensors on the CPU."""
        offsets_B = counts_B.cumsum(0) - counts_B
        return cls(
            sent(first_B, device),
            sent(counts_B, device),
            sent(offsets_B, device),
            int(counts_B.sum()),
            int(counts_B.max()) if len(counts_B) else 0,
        )


def pack(padded: torch.Tensor, segments: Segments) -> torch.Tensor:
    """Tokens of a rectangle, packed.

    Args:
        padded: Of any type, [B, T] or [B, T, K].
        segments: The tokens.

    Returns:
        [N] or [N, K]; sends gradients, and 0 to tokens that it leaves out.
    """
    packed: torch.Tensor = _Pack.apply(padded, segments)  # type: ignore[no-untyped-call]
    return packed


def unpack(
    packed: torch.Tensor, segments: Segments, *, width: int, fill: float = 0.0
) -> torch.Tensor:
    """Packed tokens in a rectangle.

    Args:
        packed: Of any type, [N] or [N, K].
        segments: The tokens.
        width: T.
        fill: Stands where no token does.

    Returns:
        [B, T] or [B, T, K]; sends gradients.
    """
    padded: torch.Tensor = _Unpack.apply(packed, segments, width, fill)  # type: ignore[no-untyped-call]
    return padded


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, padded: torch.Tensor, segments: Segments) -> torch.Tensor:
        ctx.segments, ctx.width = segments, padded.shape[1]
        return _packed(padded, segments)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _unpacked(gradient, ctx.segments, ctx.width, 0.0), None


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, packed: torch.Tensor, segments: Segments, width: int, fill: float
    ) -> torch.Tensor:
        ctx.segments = segments
        return _unpacked(packed, segments, width, fill)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _packed(gradient, ctx.segments), None, None, None


def _packed(padded: torch.Tensor, segments: Segments) -> torch.Tensor:
    packed = padded.new_empty(segments.num_tokens, *padded.shape[2:])
    places_B = _starts(padded.shape[1], segments)
    _copy(padded.contiguous(), packed, places_B, segments.offsets_B, segments, packed.shape[1:])
    return packed


def _unpacked(packed: torch.Tensor, segments: Segments, width: int, fill: float) -> torch.Tensor:
    padded = packed.new_full((len(segments.counts_B), width, *packed.shape[1:]), fill)
    places_B = _starts(width, segments)
    _copy(packed.contiguous(), padded, segments.offsets_B, places_B, segments, packed.shape[1:])
    return padded


def _starts(width: int, segments: Segments) -> torch.Tensor:
    """int64 [B], place of each row's first token in the flattened rectangle."""
    rows_B = torch.arange(len(segments.first_B), device=segments.first_B.device)
    return rows_B * width + segments.first_B


def _copy(
    source: torch.Tensor,
    result: torch.Tensor,
    from_B: torch.Tensor,
    to_B: torch.Tensor,
    segments: Segments,
    shape_of_token: torch.Size,
) -> None:
    elements = shape_of_token.numel()
    if not segments.num_tokens or not elements:
        return
    _copy_segments[(len(from_B), triton.cdiv(segments.longest * elements, BLOCK_ELEMENTS))](
        source,
        result,
        from_B,
        to_B,
        segments.counts_B,
        elements,
        BLOCK=BLOCK_ELEMENTS,
    )


@triton.jit
def _copy_segments(
    source: tl.tensor,
    result: tl.tensor,
    from_B: tl.tensor,
    to_B: tl.tensor,
    counts_B: tl.tensor,
    elements: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """A block of one row's segment, whose tokens follow each other on both sides."""
    row = tl.program_id(0)
    place = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_there = place < tl.load(counts_B + row) * elements
    found = tl.load(source + tl.load(from_B + row) * elements + place, mask=is_there)
    tl.store(result + tl.load(to_B + row) * elements + place, found, mask=is_there)
