"""Which groups of a batch are kept.

Shape letters: B rows, G groups, K rows kept.
"""

from __future__ import annotations

import torch

from rolemesh.engine.algorithms.groups import Groups
from rolemesh.engine.algorithms.token_rewards import finite_rows
from rolemesh.engine.experience import Experience
from rolemesh.engine.specs import RewardSpreadSpec, SelectionSpec


def select_groups(
    experience: Experience, spec: SelectionSpec, max_groups: int
) -> tuple[torch.Tensor, int, dict[str, float]]:
    """Keeps the groups that a rule wants, e.g. those whose rewards differ.

    "reward_spread" is the dynamic sampling of DAPO (arXiv 2503.14476, eq. 11): of each group the
    rewards' standard deviation (n - 1) must be above `min_std`. A group of one has none.

    Args:
        experience: with `spec.columns()`.
        spec: the rule.
        max_groups: most groups to keep, those that begin first in the batch; 0: no bound.

    Returns:
        int64 [K], the rows to keep, ascending; the number of groups that they make; and metrics:
        "selection/groups" that were there, "/wanted" by the rule, "/kept" within the bound, and
        "/rows".

    Raises:
        ColumnMissingError: a column is missing; names it.
        ValueError: a reward is not finite, or max_groups is negative.

    Example: prompt_ids (5, 5, 6, 6, 5) with rewards (0, 0, 1, 0, 1) keep all rows of both groups;
    with max_groups 1 the rows 0, 1 and 4.
    """
    if max_groups < 0:
        raise ValueError(f"max_groups is {max_groups}: give the most groups to keep, or 0 for all")
    groups = Groups.of(experience)
    is_wanted_G = _is_spread(experience, groups, spec)
    kept_G = is_wanted_G.nonzero().flatten()
    if max_groups:
        kept_G = kept_G[:max_groups]
    rows_K = torch.isin(groups.index_B, kept_G).nonzero().flatten()
    return (
        rows_K,
        len(kept_G),
        {
            "selection/groups": float(len(groups)),
            "selection/wanted": float(is_wanted_G.sum()),
            "selection/kept": float(len(kept_G)),
            "selection/rows": float(len(rows_K)),
        },
    )


def _is_spread(experience: Experience, groups: Groups, spec: RewardSpreadSpec) -> torch.Tensor:
    rewards_B = finite_rows(experience, "rewards").cpu()
    return groups.stds(rewards_B) > spec.min_std
