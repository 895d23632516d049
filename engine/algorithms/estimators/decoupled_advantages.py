"""GDPO: each of several rewards is normalised in its groups, before they are summed.

Shape letters: B rows, N packed completion tokens, G groups.
"""

from __future__ import annotations

import torch

from rolemesh.engine.algorithms.estimators.estimation import EstimatorInput, estimator_for
from rolemesh.engine.algorithms.estimators.group_advantages import STD_EPS, ComparedBatch
from rolemesh.engine.algorithms.groups import ComparedScores, trajectories_of
from rolemesh.engine.algorithms.ragged import row_values
from rolemesh.engine.experience import Experience
from rolemesh.engine.specs import GdpoSpec
from rolemesh.engine.specs.columns import source_column


@estimator_for(GdpoSpec)
def gdpo_advantages(given: EstimatorInput, spec: GdpoSpec) -> tuple[Experience, dict[str, float]]:
    """GDPO (arXiv 2601.05242): normalise each reward, sum, normalise over the batch.

    Groups of equal rewards, and groups of one, give exactly 0. The deviation over the batch is that
    of trajectories; one of several rows counts with their mean.

    Example: weights 1 and 1, one group whose rows have the rewards (1, 1), (1, 0), (0, 0). Both
    sources give (1, 0, 0) or (1, 1, 0), which become (1.155, -0.577, -0.577) and (0.577, 0.577,
    -1.155): sums (1.732, 0, -1.732) with a deviation of 1.732, so advantages (1, 0, -1).

    Raises:
        ColumnMissingError: The batch has no rewards of a source.
        ValueError: The spec has no weights; or a reward is infinite.
    """
    if not spec.weights:
        raise ValueError(
            "weights is empty: give the weight of each source of the reward, by its name"
        )
    batch = ComparedBatch(given, spec)
    members = batch.compared.rows
    sums_B = torch.zeros_like(batch.compared.scores_B)
    differs_B = torch.zeros(len(sums_B), dtype=torch.bool)
    for name, weight in spec.weights.items():
        part = _of_source(given.experience, name, members.is_member_B)
        sums_B += weight * (part.centred_B / (part.rows.to_rows(part.stds_G) + STD_EPS))
        differs_B |= part.differs_B
    leads_B, trajectory_sums_B = trajectories_of(given.experience, members, sums_B)
    counts_B = batch.counts_B(differs_B)
    sums_T = trajectory_sums_B[counts_B if leads_B is None else counts_B & leads_B]
    # Around 0, which is their mean in each group, and so over the batch.
    std = (sums_T.square().sum() / max(len(sums_T) - 1, 1)).sqrt()
    return batch.result(sums_B, differs_B=differs_B, divisor=float(std) + STD_EPS)


def _of_source(experience: Experience, name: str, takes_part_B: torch.Tensor) -> ComparedScores:
    """The rewards of a source, compared among the rows to which it applies."""
    column = source_column(name)
    rewards_B = row_values(experience, column).cpu().double()
    applies_B = ~rewards_B.isnan() & takes_part_B
    bad = (rewards_B.isinf() & applies_B).nonzero().flatten()
    if len(bad):
        raise ValueError(
            f"column {column!r} is {float(rewards_B[bad[0]])} at row {int(bad[0])}: the reward "
            "must give a finite number, or none where it does not apply"
        )
    return ComparedScores.of(experience, applies_B, rewards_B.nan_to_num(0.0))
