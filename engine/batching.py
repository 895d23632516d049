"""How rows become forward passes: parts for ranks, token-budget micro-batches, right-padded.

Padding exists only between here and the model; nothing stored or sent is padded.

Shape letters: B rows, T longest row, S all tokens, N completion tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rolemesh.engine.balance import balanced_partition
from rolemesh.engine.experience import ColumnKind, Experience

__all__ = [
    "PAD_TOKEN",
    "PaddedRows",
    "balanced_partition",
    "micro_batches",
    "pad_rows",
    "update_assignment",
]

PAD_TOKEN = 0
"""Fills the rectangle. Any id would do: no state that is read ever sees a pad."""


def micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Groups rows of similar length so that a padded group costs at most max_tokens.

    The cost of a group is its rows times its longest row. Rows are taken longest first (ties by
    index), so little is padded, the groups depend on nothing but the lengths, and the most
    expensive pass comes first. A single row longer than max_tokens stands alone.

    Args:
        lengths: tokens in each row.
        max_tokens: budget of a group, padding included; at least 1.

    Returns:
        Row indexes, each exactly once.

    Example: lengths (3, 9, 2, 3) with a budget of 9 give [[1], [0, 3, 2]]: 1 x 9 and 3 x 3.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}: give at least 1")
    groups: list[list[int]] = []
    longest = 0
    for row in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        if not groups or (len(groups[-1]) + 1) * longest > max_tokens:
            groups.append([])
            longest = lengths[row]
        groups[-1].append(row)
    return groups


def update_assignment(
    lengths: Sequence[int], *, epochs: int, mini_batch_rows: int, seed: int, num_parts: int
) -> list[list[list[int]]]:
    """Which rows each data-parallel rank trains on in each optimizer step of an update.

    Every rank works it out for itself. The mini-batches do not depend on num_parts: each epoch's
    rows are shuffled (torch.randperm of a generator with the seed) and split in order, and each
    mini-batch is then cut by `balanced_partition`.

    Args:
        lengths: tokens in each row.
        epochs: passes over the rows, at least 1.
        mini_batch_rows: rows of one optimizer step over all ranks, at least 1; the last one of an
            epoch may have fewer.
        seed: of the shuffles.
        num_parts: data-parallel ranks.

    Returns:
        Rows by mini-batch and part, in the order in which they were drawn. A mini-batch of fewer
        rows than parts leaves parts empty.
    """
    for name, number in (("epochs", epochs), ("mini_batch_rows", mini_batch_rows)):
        if number < 1:
            raise ValueError(f"{name} is {number}: give at least 1")
    shuffle = torch.Generator().manual_seed(seed)
    assignment = []
    for _ in range(epochs):
        order: list[int] = torch.randperm(len(lengths), generator=shuffle).tolist()
        for start in range(0, len(order), mini_batch_rows):
            rows = order[start : start + mini_batch_rows]
            parts = balanced_partition([lengths[row] for row in rows], num_parts)
            assignment.append([[rows[place] for place in part] for part in parts])
    return assignment


def rows_of_update(
    lengths: Sequence[int],
    *,
    epochs: int,
    mini_batch_rows: int,
    seed: int,
    num_parts: int,
    part: int,
) -> list[int]:
    """Rows that one data-parallel rank trains on in any step of an update, ascending.

    Args:
        lengths: tokens in each row.
        epochs: see `update_assignment`.
        mini_batch_rows: see `update_assignment`.
        seed: see `update_assignment`.
        num_parts: data-parallel ranks.
        part: this one of them.
    """
    assignment = update_assignment(
        lengths, epochs=epochs, mini_batch_rows=mini_batch_rows, seed=seed, num_parts=num_parts
    )
    return sorted({row for parts in assignment for row in parts[part]})


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """Rows as a rectangle for the model, with the way back to packed completion tokens."""

    tokens_BT: torch.Tensor
    """int64 [B, T], right-padded."""
    lengths_B: torch.Tensor
    """int64 [B], tokens in each row."""
    state_index_N: torch.Tensor
    """int64 [N], into the flattened [B * T]: the position before each completion token. Its
    hidden state predicts that token, and is the state that the token's value belongs to."""
    targets_N: torch.Tensor
    """int64 [N], the completion tokens."""


def pad_rows(batch: Experience, device: torch.device | str) -> PaddedRows:
    """Lays the rows of a batch out for a forward pass.

    Args:
        batch: with the columns tokens and prompt_lengths.
        device: where the model is.

    Raises:
        ValueError: a prompt is empty (no state precedes its first completion token) or longer
            than its row.
    """
    tokens = batch["tokens"]
    if tokens.kind is not ColumnKind.SEQUENCE or tokens.offsets is None:
        raise ValueError(f"column 'tokens' is a {tokens.kind.value} column: give whole sequences")
    lengths_B, offsets = tokens.lengths(), tokens.offsets
    prompt_lengths_B = batch["prompt_lengths"].values
    bad = ((prompt_lengths_B < 1) | (prompt_lengths_B > lengths_B)).nonzero().flatten()
    if len(bad):
        row = int(bad[0])
        raise ValueError(
            f"prompt_lengths of row {row} is {int(prompt_lengths_B[row])} in a row of "
            f"{int(lengths_B[row])} tokens: give at least 1 and at most the row's length"
        )
    longest = int(lengths_B.max()) if len(lengths_B) else 0
    row_S = torch.repeat_interleave(torch.arange(len(lengths_B)), lengths_B)
    position_S = torch.arange(len(tokens.values)) - offsets[:-1][row_S]
    tokens_BT = torch.full((len(lengths_B), longest), PAD_TOKEN, dtype=torch.int64)
    tokens_BT[row_S, position_S] = tokens.values.to(torch.int64)
    is_completion_S = position_S >= prompt_lengths_B[row_S]
    state_index_N = (row_S * longest + position_S - 1)[is_completion_S]
    return PaddedRows(
        tokens_BT=tokens_BT.to(device),
        lengths_B=lengths_B.to(device),
        state_index_N=state_index_N.to(device),
        targets_N=tokens.values[is_completion_S].to(device=device, dtype=torch.int64),
    )
