"""Pairs of a batch of preferences: their rows, and their log-ratios.

Shape letters: B rows, N packed completion tokens, M those of them with loss mask 1, P pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rolemesh.engine.algorithms.ragged import (
    completion_values,
    loss_mask_of,
    row_sums,
    row_values,
    unmasked_per_row,
)
from rolemesh.engine.experience import Experience
from rolemesh.engine.hardware.devices import sent


class PairIncompleteError(ValueError):
    """A row that was judged against another one stands without it, or with too many."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """The pairs of some rows, by ascending pair id."""

    chosen_P: torch.Tensor
    """int64, rows of the chosen completions."""
    rejected_P: torch.Tensor
    """int64, rows of the rejected completions."""

    @staticmethod
    def of(batch: Experience) -> Pairs:
        """Finds the pairs of a batch with the columns pair_ids and preference.

        Rows with pair id -1 or preference 0 belong to none and are left out. Of all other rows
        those with one pair id must be two, a chosen and a rejected one.

        Example: pair_ids (4, 4, -1, 2, 2, 7) and preference (1, -1, 1, -1, 1, 0) hold two pairs:
        chosen rows 4 and 0, rejected rows 3 and 1.

        Raises:
            PairIncompleteError: A pair lacks a row, has two of a kind, or has more than two.
            ValueError: A column is of another kind or has a number that means nothing.
        """
        pair_ids_B = row_values(batch, "pair_ids")
        preference_B = preference_of(batch)
        rows = ((pair_ids_B >= 0) & (preference_B != 0)).nonzero().flatten()
        order = rows[pair_ids_B[rows].argsort(stable=True)]
        ids, counts = torch.unique(pair_ids_B[order], return_counts=True)
        wrong = (counts != 2).nonzero().flatten()
        if not len(wrong):
            two_P2 = order.view(-1, 2)
            wrong = (preference_B[two_P2].sum(1) != 0).nonzero().flatten()
        if len(wrong):
            pair_id = int(ids[wrong[0]])
            held = preference_B[pair_ids_B == pair_id].tolist()
            raise PairIncompleteError(
                f"pair_ids has pair {pair_id} with the preferences {held} in one forward pass "
                f"({len(wrong)} such pairs): it must have one row of 1 and one of -1; set "
                "rows_per_unit so that neighbouring rows of a pair stay together"
            )
        is_chosen_P2 = preference_B[two_P2] > 0
        return Pairs(chosen_P=two_P2[is_chosen_P2], rejected_P=two_P2[~is_chosen_P2])

    def __len__(self) -> int:
        """P."""
        return len(self.chosen_P)


def preference_of(batch: Experience) -> torch.Tensor:
    """Column preference, float [B]: 1 chosen or wanted, -1 rejected or unwanted, 0 neither.

    Raises:
        ValueError: Another kind of column, or another number in it.
    """
    preference_B = row_values(batch, "preference")
    bad = ((preference_B != 0) & (preference_B.abs() != 1)).nonzero().flatten()
    if len(bad):
        row = int(bad[0])
        raise ValueError(
            f"preference of row {row} is {float(preference_B[row])}: give 1 (chosen or wanted), "
            "-1 (rejected or unwanted) or 0 (neither)"
        )
    return preference_B


def log_ratios(logprobs_N: torch.Tensor, batch: Experience) -> torch.Tensor:
    """Log-ratios log pi(y | x) - log pi_ref(y | x) of rows, over their unmasked tokens.

    Args:
        logprobs_N: float [N], of the policy.
        batch: With the columns reference_logprobs and loss_mask.

    Returns:
        float [B], with the type, device and gradient of `logprobs_N`.
    """
    mask_N, offsets = loss_mask_of(batch)
    if logprobs_N.shape != mask_N.shape:
        raise ValueError(
            f"logprobs has shape {tuple(logprobs_N.shape)}, but the batch has {len(mask_N)} "
            "completion tokens: give one number a token"
        )
    # Picked before they are subtracted: what a masked token holds, even NaN, reaches nothing.
    reference_M = completion_values(batch, "reference_logprobs")[mask_N].detach()
    device = logprobs_N.device
    # Places, not the mask: how many they are, a device would have to be asked.
    logprobs_M = logprobs_N.index_select(0, sent(mask_N.nonzero().flatten(), device))
    reference_M = sent(reference_M.to(logprobs_M.dtype), device)
    return row_sums(logprobs_M - reference_M, sent(unmasked_per_row(mask_N, offsets), device))
