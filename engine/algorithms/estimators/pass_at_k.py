"""Advantages under which the best of k completions counts: pass@k, and max@k.

Shape letters: B rows, G groups, n members of one group, R rows of one group.
"""

from __future__ import annotations

import math

import torch

from rolemesh.engine.algorithms.groups import ComparedScores


def pass_at_k_advantages(compared: ComparedScores, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives k * (mean best score of sets of k with the row - of those without), in closed form.

    Of a row's n - 1 companions, in ascending order (m = 0, 1, ...), the m-th is the best of
    C(m, k - 2) of their sets of k - 1, and of C(m, k - 1) of their sets of k. So the two means are

        sum over m of C(m, k - 2) * max(score, score of m) / C(n - 1, k - 1)
        sum over m of C(m, k - 1) * score of m / C(n - 1, k)

    Args:
        compared: Scores of rows and groups.
        k: Members of a set, at least 2.

    Returns:
        float64 [B]: 0 for a row that takes no part, and exactly 0 in groups whose scores are all
        equal or that have no more than k members; and bool [G], which groups have no more.
    """
    advantages_B = torch.zeros_like(compared.scores_B)
    is_too_small_G = compared.groups.sizes_G <= k
    for group in (~is_too_small_G).nonzero().flatten().tolist():
        rows_R = (compared.rows.index_B == group).nonzero().flatten()
        members_n = compared.trajectory_scores_B[compared.groups.index_B == group].sort().values
        # From the smallest score on: equal scores are zeros then, and so is what they give.
        smallest = members_n[0].clone()
        members_n = members_n - smallest
        num_others = len(members_n) - 1
        # Any member of the row's own score may be left out: the others are the same numbers.
        own_R = compared.trajectory_scores_B[rows_R] - smallest
        places = torch.arange(num_others)
        at_R = torch.searchsorted(members_n, own_R)
        others_Rn = members_n[places + (places >= at_R[:, None])]
        scores_R = compared.scores_B[rows_R] - smallest
        with_row_R = torch.maximum(scores_R[:, None], others_Rn) @ _shares(num_others, k - 1)
        without_row_R = others_Rn @ _shares(num_others, k)
        advantages_B[rows_R] = k * (with_row_R - without_row_R)
    return advantages_B, is_too_small_G


def _shares(number: int, size: int) -> torch.Tensor:
    """float64 [number], the share of the sets of that size in which the m-th is the last one."""
    sets = math.comb(number, size)
    shares = [math.comb(m, size - 1) / sets for m in range(number)]
    return torch.tensor(shares, dtype=torch.float64)
