"""Places of tokens when completions of one prompt are packed behind one copy of it.

Shape letters: S packed tokens, M gathered rows, K columns; G prompts of P tokens at most, R rows
with C completion tokens and T tokens at most.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Self

import torch

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source_SK: torch.Tensor, gather: RowGather) -> torch.Tensor:
        ctx.gather = gather
        ctx.num_sources = len(source_SK)
        return source_SK.index_select(0, gather.index_M)

    @staticmethod
    def backward(ctx: Any, gradient_MK: torch.Tensor) -> tuple[torch.Tensor, None]:
        # Each copy meets a row once, so that the order of sums is given on a GPU too. index_add_
        # takes 2 to 6 times as long on a CPU (torch 2.13, 576 rows of 192 bfloat16 numbers).
        total_SK = gradient_MK.new_zeros(ctx.num_sources, gradient_MK.shape[1])
        for number, (sources, places) in enumerate(ctx.gather.copies):
            part = gradient_MK.index_select(0, places)
            if number:
                part += total_SK.index_select(0, sources)
            total_SK.index_copy_(0, sources, part)
        return total_SK, None


@dataclass(frozen=True, slots=True)
class RowGather:
    """Takes rows of a matrix, some of them several times, some places being padding.

    Example: index (0, 1, 0) is row 0, row 1 and row 0 again; the gradient of row 0 is the sum of
    the first and the last one's, in this order on any device.
    """

    index_M: torch.Tensor
    """int64, the row for each place. Padding takes row 0 and gives it no gradient."""
    copies: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """By copy: rows that have so many, each once, and their places; int64 both."""

    @classmethod
    def of(cls, index_M: torch.Tensor) -> Self:
        """From an index in which -1 marks padding."""
        places = (index_M >= 0).nonzero().flatten()
        rows = index_M[places]
        order = rows.argsort(stable=True)
        rows, places = rows[order], places[order]
        _, counts = torch.unique_consecutive(rows, return_counts=True)
        starts = counts.cumsum(0) - counts
        copy = torch.arange(len(rows)) - starts.repeat_interleave(counts)
        copies = tuple(
            (rows[copy == number], places[copy == number])
            for number in range(int(counts.max()) if len(counts) else 0)
        )
        return cls(index_M.clamp_min(0), copies)

    def __call__(self, source_SK: torch.Tensor) -> torch.Tensor:
        """Rows of float [S, K] as float [M, K]."""
        found: torch.Tensor = _Gather.apply(source_SK, self)  # type: ignore[no-untyped-call]
        return found

    def to(self, device: torch.device | str) -> Self:
        """The same on a device."""
        return replace(
            self,
            index_M=self.index_M.to(device),
            copies=tuple((rows.to(device), places.to(device)) for rows, places in self.copies),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixLayout:
    """How S packed tokens (all prompts first, then all completions) attend to each other.

    Everything but attention treats the tokens as one row of S. Attention is computed on two
    rectangles: prompts among themselves, and completions over their prompt and themselves.
    """

    positions_1S: torch.Tensor
    """int64 [1, S]: each token's place in its own row; completions go on from the prompt."""
    num_prompt_tokens: int
    """The first tokens of S."""
    num_prompts: int
    """G."""
    num_rows: int
    """R."""
    prompts: RowGather
    """[G * P] of the prompt tokens."""
    prompt_places: torch.Tensor
    """int64: where each prompt token stands in [G * P]."""
    queries: RowGather
    """[R * C] of the completion tokens."""
    query_places: torch.Tensor
    """int64: where each completion token stands in [R * C]."""
    keys: RowGather
    """[R * T] of all packed tokens: each row's prompt and completion."""
    may_attend: torch.Tensor
    """bool [R or 1, 1, C, T]. Every query, padding too, may attend to its row's first token."""
    states: RowGather
    """[N] of all packed tokens: the state before each completion token."""
    prompts_S: torch.Tensor
    """int64 [S]: the prompt that each token is of, or goes on from."""
    rows_S: torch.Tensor
    """int64 [S]: the row of each completion token; -1 for tokens of prompts."""
    block_mask: BlockMask | None = None
    """For attention over S at once (`engine/models/shared_flex.py`); None: by rectangles."""

    def to(self, device: torch.device | str) -> Self:
        """The same on a device."""
        moved = {
            field.name: value.to(device)
            for field in fields(self)
            if not isinstance(value := getattr(self, field.name), int | None)
        }
        return replace(self, **moved)
