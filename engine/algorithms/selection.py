"""Selection of the groups, or pairs, of a batch that are kept.

Shape letters: B rows, G groups, P pairs, K rows kept.
"""

from __future__ import annotations

import torch

from rolemesh.engine.algorithms.estimators.token_rewards import BatchTokens, finite_rows
from rolemesh.engine.algorithms.groups import Groups
from rolemesh.engine.algorithms.judged import judged_rows
from rolemesh.engine.algorithms.preferences.pairs import Pairs
from rolemesh.engine.experience import Experience
from rolemesh.engine.specs import PairedSpec, SelectionSpec


def select_groups(
    experience: Experience, spec: SelectionSpec, max_groups: int
) -> tuple[torch.Tensor, int, dict[str, float]]:
    """Keeps the groups that a rule wants, e.g. those whose rewards differ.

    "reward_spread" is the dynamic sampling of DAPO (arXiv 2503.14476, eq. 11): of each group the
    rewards' standard deviation (n - 1) must be above `min_std`, over the rows with unmasked tokens.
    A group of one has none. Kept rows stay in their order. Rows that the column is_judged, where
    present, has False for are as if they were not there.

    "paired" keeps the rows of pairs, by ascending pair id and the chosen one first.

    Args:
        experience: With `spec.columns()`.
        spec: The rule.
        max_groups: Most groups to keep, those that begin first in the batch (of pairs: those with
            the lowest ids); 0: no bound.

    Returns:
        int64 [K], the rows to keep, in the order to keep them in; the number of groups or pairs
        that they make; and metrics: "selection/groups" (or pairs) that were there, "/wanted" by
        the rule, "/kept" within the bound, and "/rows".

    Raises:
        ColumnMissingError: A column is missing; names it.
        ValueError: A number makes no sense (a reward that is not finite, a pair that is
            incomplete), or max_groups is negative.

    Example: prompt_ids (5, 5, 6, 6, 5) with rewards (0, 0, 1, 0, 1) keep all rows of both groups;
    with max_groups 1 the rows 0, 1 and 4.
    """
    if max_groups < 0:
        raise ValueError(f"max_groups is {max_groups}: give the most groups to keep, or 0 for all")
    bound = max_groups or None
    if isinstance(spec, PairedSpec):
        pairs = Pairs.of(experience)
        num_groups = num_wanted = len(pairs)
        rows_P2 = torch.stack((pairs.chosen_P, pairs.rejected_P), dim=1)[:bound]
        num_kept, rows_K = len(rows_P2), rows_P2.flatten().cpu()
    else:
        rows_J = judged_rows(experience)
        if rows_J is None:
            rows_J = torch.arange(experience.num_rows)
        judged = experience.select(rows_J)
        groups = Groups.of(judged)
        # Only rows that can be trained on say whether there is something to learn; a kept group
        # keeps all of its rows.
        members = Groups.of(judged, BatchTokens.of(judged).takes_part_B)
        stds_B = members.to_rows(members.stds(finite_rows(judged, "rewards").cpu()))
        is_wanted_G = groups.any_of(stds_B > spec.min_std)
        kept_G = is_wanted_G.nonzero().flatten()[:bound]
        num_groups, num_wanted, num_kept = len(groups), int(is_wanted_G.sum()), len(kept_G)
        rows_K = rows_J[torch.isin(groups.index_B, kept_G)]
    return (
        rows_K,
        num_kept,
        {
            "selection/groups": float(num_groups),
            "selection/wanted": float(num_wanted),
            "selection/kept": float(num_kept),
            "selection/rows": float(len(rows_K)),
        },
    )
