"""Random ragged batches as lists, for oracles, and as an Experience, for the engine."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from rolemesh.engine.experience import Column, ColumnKind, Experience


@dataclass
class RaggedBatch:
    """The same batch twice: columns as lists of rows, and packed."""

    masks: list[list[bool]]
    columns: dict[str, list[list[float]]] = field(default_factory=dict)
    row_columns: dict[str, list[float]] = field(default_factory=dict)

    def packed(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """One column as a packed tensor."""
        return pack(self.columns[name], dtype)

    def experience(self, dtype: torch.dtype) -> Experience:
        """All columns, numbers in the given type."""
        columns = {
            name: Column.ragged(ColumnKind.COMPLETION, rows, dtype)
            for name, rows in self.columns.items()
        }
        columns["loss_mask"] = Column.ragged(ColumnKind.COMPLETION, self.masks, torch.bool)
        for name, numbers in self.row_columns.items():
            columns[name] = Column(ColumnKind.ROW, torch.tensor(numbers, dtype=dtype))
        return Experience(columns)

    def rounded_to(self, dtype: torch.dtype) -> RaggedBatch:
        """The batch with numbers that the type holds exactly.

        Oracle and engine then agree on the inputs: only the engine's own rounding is measured.
        """
        columns = {
            name: [torch.tensor(row, dtype=dtype).tolist() for row in rows]
            for name, rows in self.columns.items()
        }
        row_columns = {
            name: torch.tensor(numbers, dtype=dtype).tolist()
            for name, numbers in self.row_columns.items()
        }
        return RaggedBatch(self.masks, columns, row_columns)


def pack(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> torch.Tensor:
    """Rows one after another in one tensor."""
    return torch.tensor([x for row in rows for x in row], dtype=dtype)


def random_masks(lengths: Sequence[int], seed: int, hole: float = 0.3) -> list[list[bool]]:
    """Masks with holes anywhere, also at the ends of rows."""
    generator = random.Random(seed)
    return [[generator.random() >= hole for _ in range(length)] for length in lengths]


def random_batch(
    masks: list[list[bool]],
    ranges: Mapping[str, tuple[float, float]],
    seed: int,
    row_ranges: Mapping[str, tuple[float, float]] | None = None,
) -> RaggedBatch:
    """Uniform numbers in the given ranges for each completion and each row column."""
    generator = random.Random(seed)
    batch = RaggedBatch(masks)
    for name, (low, high) in ranges.items():
        batch.columns[name] = [[generator.uniform(low, high) for _ in mask] for mask in masks]
    for name, (low, high) in (row_ranges or {}).items():
        batch.row_columns[name] = [generator.uniform(low, high) for _ in masks]
    return batch


MIXED_LENGTHS = (7, 1, 0, 16, 3, 5, 2, 9)
"""Ragged, with a single token and an empty row."""


def mixed_masks(seed: int) -> list[list[bool]]:
    """Eight rows: interior holes, a single token, an empty row, a row that is all masked."""
    masks = random_masks(MIXED_LENGTHS, seed)
    masks[0] = [True, True, False, False, True, False, True]
    masks[1] = [True]
    masks[5] = [False] * 5
    return masks
