"""Pairs for preference losses, made from sampled completions and their rewards.

Shape letters: B rows, G groups.
"""

from __future__ import annotations

import torch

from rolemesh.engine.algorithms.estimators.estimation import EstimatorInput, estimator_for
from rolemesh.engine.algorithms.estimators.token_rewards import (
    BatchTokens,
    read_rows,
    reward_metrics,
)
from rolemesh.engine.algorithms.groups import Groups
from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.specs import OnlineDpoSpec


@estimator_for(OnlineDpoSpec)
def online_pairs(given: EstimatorInput, spec: OnlineDpoSpec) -> tuple[Experience, dict[str, float]]:
    """Pairs the best row of each group with its worst (arXiv 2402.04792, algorithm 1).

    Of rows with the same reward the first in the batch is taken. A group of one makes no pair
    ("pairs/of_one"), nor does one whose rewards are all equal ("pairs/ties"). Pairs are numbered
    in the order of their groups' first rows.

    Example: prompt_ids (7, 7, 7, 3, 3) with rewards (0, 1, 0, 2, 2) give pair_ids
    (0, 0, -1, -1, -1) and preference (-1, 1, 0, 0, 0), and one tie.
    """
    tokens = BatchTokens.of(given.experience)
    rewards_B = read_rows(given.experience, "rewards", tokens).cpu()
    groups = Groups.of(given.experience, tokens.takes_part_B)
    smallest_G, largest_G = groups.extremes(rewards_B)
    is_single_G = groups.sizes_G < 2
    has_pair_G = smallest_G < largest_G
    pair_G = torch.where(has_pair_G, has_pair_G.cumsum(0) - 1, -1)

    pair_ids_B = torch.full((len(rewards_B),), -1, dtype=torch.int64)
    preference_B = torch.zeros(len(rewards_B), dtype=torch.float32)
    for extreme_G, sign in ((largest_G, 1.0), (smallest_G, -1.0)):
        rows_G = _first_rows_with(groups, rewards_B, extreme_G)[has_pair_G]
        pair_ids_B[rows_G] = pair_G[has_pair_G]
        preference_B[rows_G] = sign

    margins = (largest_G - smallest_G)[has_pair_G]
    metrics = {
        **reward_metrics(rewards_B, tokens),
        "pairs/count": float(has_pair_G.sum()),
        "pairs/ties": float((~has_pair_G & ~is_single_G).sum()),
        "pairs/of_one": float(is_single_G.sum()),
        "pairs/reward_margin": float(margins.mean()) if len(margins) else 0.0,
    }
    columns = {
        "pair_ids": Column(ColumnKind.ROW, pair_ids_B),
        "preference": Column(ColumnKind.ROW, preference_B),
    }
    return Experience(columns), metrics


def _first_rows_with(
    groups: Groups, numbers_B: torch.Tensor, wanted_G: torch.Tensor
) -> torch.Tensor:
    """int64 [G], the first member of each group that has the wanted number."""
    has_it_B = groups.is_member_B & (numbers_B == groups.to_rows(wanted_G))
    rows = has_it_B.nonzero().flatten()
    num_rows = len(numbers_B)
    return torch.full((len(groups),), num_rows).scatter_reduce(
        0, groups.index_B[rows], rows, "amin"
    )
