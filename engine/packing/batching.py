"""Batches for forward passes: parts for ranks, token-budget micro-batches, right-padded.

Padding exists only between here and the model; nothing stored or sent is padded. Rows may come in
units: neighbours (of a group, of a pair) that stay together from the shuffle to the forward pass.

Shape letters: B rows, T longest row, S all tokens, N completion tokens, U distinct ones, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rolemesh.engine.devices import sent
from rolemesh.engine.experience import ColumnKind, Experience
from rolemesh.engine.kernels.choice import triton_serves
from rolemesh.engine.packing.balance import balanced_partition
from rolemesh.engine.packing.tree_layout import TreeLayout

if TYPE_CHECKING:
    from rolemesh.engine.kernels.ragged import Segments

PAD_TOKEN = 0
"""Fills the rectangle. Any id would do: no state that is read ever sees a pad."""


def check_units(num_rows: int, rows_per_unit: int) -> None:
    """Raises ValueError unless rows can be cut into units.

    Args:
        num_rows: Rows, in order.
        rows_per_unit: Neighbouring rows that stay together, at least 1.
    """
    if rows_per_unit < 1:
        raise ValueError(f"rows_per_unit is {rows_per_unit}: give at least 1")
    if num_rows % rows_per_unit:
        raise ValueError(
            f"the batch has {num_rows} rows, which is no multiple of rows_per_unit "
            f"{rows_per_unit}: give whole units"
        )


def unit_lengths(lengths: Sequence[int], rows_per_unit: int) -> list[int]:
    """Tokens in each unit.

    Args:
        lengths: Tokens in each row.
        rows_per_unit: Neighbouring rows that stay together; 1: each row for itself.

    Raises:
        ValueError: The rows are no multiple of rows_per_unit.
    """
    check_units(len(lengths), rows_per_unit)
    return [
        sum(lengths[first : first + rows_per_unit])
        for first in range(0, len(lengths), rows_per_unit)
    ]


def unit_rows(units: Sequence[int], rows_per_unit: int) -> list[int]:
    """The rows of units, in the order of the units.

    Example: units (2, 0) of 2 rows each are the rows [4, 5, 0, 1].
    """
    return [unit * rows_per_unit + row for unit in units for row in range(rows_per_unit)]


def micro_batches(
    lengths: Sequence[int], max_tokens: int, rows_per_unit: int = 1
) -> list[list[int]]:
    """Groups rows of similar length so that a padded group costs at most max_tokens.

    The cost of a group is its rows times its longest row. Units are taken by their longest row,
    longest first (ties by index), so little is padded, the groups depend on nothing but the
    lengths, and the most expensive pass comes first. A single unit that costs more than max_tokens
    stands alone.

    Args:
        lengths: Tokens in each row.
        max_tokens: Budget of a group, padding included; at least 1.
        rows_per_unit: Neighbouring rows that stay together; 1: each row for itself.

    Returns:
        Row indexes, each exactly once.

    Example: lengths (3, 9, 2, 3) with a budget of 9 give [[1], [0, 3, 2]]: 1 x 9 and 3 x 3.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}: give at least 1")
    check_units(len(lengths), rows_per_unit)
    longest_of = [
        max(lengths[first : first + rows_per_unit])
        for first in range(0, len(lengths), rows_per_unit)
    ]
    groups: list[list[int]] = []
    longest = 0
    for unit in sorted(range(len(longest_of)), key=lambda index: (-longest_of[index], index)):
        if not groups or (len(groups[-1]) + rows_per_unit) * longest > max_tokens:
            groups.append([])
            longest = longest_of[unit]
        groups[-1] += unit_rows([unit], rows_per_unit)
    return groups


def update_assignment(
    lengths: Sequence[int],
    *,
    epochs: int,
    mini_batch_rows: int,
    seed: int,
    num_parts: int,
    rows_per_unit: int = 1,
) -> list[list[list[int]]]:
    """Which rows each data-parallel rank trains on in each optimizer step of an update.

    Every rank works it out for itself. The mini-batches do not depend on num_parts: each epoch's
    units are shuffled (torch.randperm of a generator with the seed) and split in order, and each
    mini-batch is then cut by `balanced_partition`.

    Args:
        lengths: Tokens in each row.
        epochs: Passes over the rows, at least 1.
        mini_batch_rows: Rows of one optimizer step over all ranks, at least 1; the last one of an
            epoch may have fewer.
        seed: Of the shuffles.
        num_parts: Data-parallel ranks.
        rows_per_unit: Neighbouring rows that stay together; 1: each row for itself. Divides the
            rows and mini_batch_rows.

    Returns:
        Rows by mini-batch and part, in the order in which their units were drawn. A mini-batch of
        fewer units than parts leaves parts empty.
    """
    for name, number in (("epochs", epochs), ("mini_batch_rows", mini_batch_rows)):
        if number < 1:
            raise ValueError(f"{name} is {number}: give at least 1")
    lengths_of_units = unit_lengths(lengths, rows_per_unit)
    if mini_batch_rows % rows_per_unit:
        raise ValueError(
            f"mini_batch_rows is {mini_batch_rows}, no multiple of rows_per_unit {rows_per_unit}: "
            "give whole units"
        )
    shuffle = torch.Generator().manual_seed(seed)
    assignment = []
    step = mini_batch_rows // rows_per_unit
    for _ in range(epochs):
        order: list[int] = torch.randperm(len(lengths_of_units), generator=shuffle).tolist()
        for start in range(0, len(order), step):
            units = order[start : start + step]
            parts = balanced_partition([lengths_of_units[unit] for unit in units], num_parts)
            assignment.append(
                [unit_rows([units[place] for place in part], rows_per_unit) for part in parts]
            )
    return assignment


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """Rows as a rectangle for the model, with the way back to packed completion tokens.

    Where rows share tokens (`tree_packing`), the rectangle is one row without padding, in which
    each shared token stands once. U is then less than N.
    """

    tokens_BT: torch.Tensor
    """int64 [B, T], right-padded."""
    lengths_B: torch.Tensor
    """int64 [B], tokens in each row."""
    state_index_U: torch.Tensor
    """int64 [U], into the flattened [B * T]: the position before each distinct completion token.
    Its hidden state predicts that token, and is the state that the token's value belongs to."""
    targets_U: torch.Tensor
    """int64 [U], the distinct completion tokens."""
    tree: TreeLayout | None = None
    """How the tokens attend to each other where rows share them; None: causally, row by row."""
    completions: Segments | None = None
    """The places of state_index_U as runs, for Triton's kernels; None: they do not serve here."""

    @property
    def longest(self) -> int:
        """Most tokens that one of them attends to, padding counted."""
        return self.tokens_BT.shape[1] if self.tree is None else self.tree.longest

    def states(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        """Hidden states [U, D] before the distinct completion tokens, of those of the rectangle."""
        hidden_SD = hidden_BTD.flatten(0, 1)
        if self.tree is not None:
            return self.tree.states_U(hidden_SD)
        if self.completions is not None:
            from rolemesh.engine.kernels.ragged import pack

            return pack(hidden_BTD, self.completions)
        return hidden_SD.index_select(0, self.state_index_U)

    def of_rows(self, values_U: torch.Tensor) -> torch.Tensor:
        """What was computed for distinct completion tokens, float [U, ...], for all: [N, ...]."""
        if self.tree is None:
            return values_U
        shape = values_U.shape[1:]
        return self.tree.rows_N(values_U.view(len(values_U), shape.numel())).view(-1, *shape)


def pad_rows(batch: Experience, device: torch.device | str) -> PaddedRows:
    """Lays the rows of a batch out for a forward pass.

    Args:
        batch: With the columns tokens and prompt_lengths.
        device: Where the model is.

    Raises:
        ValueError: A prompt is empty (no state precedes its first completion token) or longer
            than its row.
    """
    prompt_lengths_B = check_prompt_lengths(batch)
    tokens = batch["tokens"]
    assert tokens.offsets is not None  # sequences have them
    lengths_B, offsets = tokens.lengths(), tokens.offsets
    longest = int(lengths_B.max()) if len(lengths_B) else 0
    row_S = torch.repeat_interleave(torch.arange(len(lengths_B)), lengths_B)
    position_S = torch.arange(len(tokens.values)) - offsets[:-1][row_S]
    is_completion_S = position_S >= prompt_lengths_B[row_S]
    state_index_U = (row_S * longest + position_S - 1)[is_completion_S]
    completions: Segments | None = None
    if triton_serves(torch.device(device)):
        from rolemesh.engine.kernels.ragged import Segments, unpack

        whole = Segments.of(torch.zeros_like(lengths_B), lengths_B, device)
        tokens_S = sent(tokens.values, device).to(torch.int64)
        tokens_BT = unpack(tokens_S, whole, width=longest, fill=PAD_TOKEN)
        completions = Segments.of(prompt_lengths_B - 1, lengths_B - prompt_lengths_B, device)
    else:
        tokens_BT = torch.full((len(lengths_B), longest), PAD_TOKEN, dtype=torch.int64)
        tokens_BT[row_S, position_S] = tokens.values.to(torch.int64)
    return PaddedRows(
        tokens_BT=sent(tokens_BT, device),
        lengths_B=sent(lengths_B, device),
        state_index_U=sent(state_index_U, device),
        targets_U=sent(tokens.values[is_completion_S].to(torch.int64), device),
        completions=completions,
    )


def check_prompt_lengths(batch: Experience) -> torch.Tensor:
    """Column prompt_lengths, int64 [B].

    Args:
        batch: With the columns tokens and prompt_lengths.

    Raises:
        ValueError: See `pad_rows`.
    """
    tokens = batch["tokens"]
    if tokens.kind is not ColumnKind.SEQUENCE or tokens.offsets is None:
        raise ValueError(f"column 'tokens' is a {tokens.kind.value} column: give whole sequences")
    lengths_B = tokens.lengths()
    prompt_lengths_B = batch["prompt_lengths"].values
    bad = ((prompt_lengths_B < 1) | (prompt_lengths_B > lengths_B)).nonzero().flatten()
    if len(bad):
        row = int(bad[0])
        raise ValueError(
            f"prompt_lengths of row {row} is {int(prompt_lengths_B[row])} in a row of "
            f"{int(lengths_B[row])} tokens: give at least 1 and at most the row's length"
        )
    return prompt_lengths_B
