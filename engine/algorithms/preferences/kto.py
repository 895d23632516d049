"""The reference point of KTO (arXiv 2402.01306, section 4.2), once a batch.

Shape letters: B rows, N packed completion tokens.
"""

from __future__ import annotations

import torch

from rolemesh.engine.algorithms.estimators.estimation import EstimatorInput, estimator_for
from rolemesh.engine.algorithms.preferences.pairs import log_ratios, preference_of
from rolemesh.engine.algorithms.ragged import completion_values
from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.specs import KtoPointSpec


@estimator_for(KtoPointSpec)
def kto_point(given: EstimatorInput, spec: KtoPointSpec) -> tuple[Experience, dict[str, float]]:
    """Estimates z_0, how far the policy is from the reference over whole completions.

        z_0 = max(0, mean over the rows of preference 0 of log pi(y' | x) - log pi_ref(y' | x))

    The completions y' of these rows belong to other prompts. The paper takes the estimate from
    each step's own batch under the weights of that step; here it is taken over all rows of the
    batch under the weights that the batch begins with (column proximal_logprobs). So it is the
    same whatever the mini-batches and ranks are, costs one forward pass, and has a smaller
    variance; in exchange it does not follow the policy within the batch.

    Returns:
        Column kl_reference_point (float32, row, nats), the same number in each row; and metrics:
        kl_reference_point, and kl_reference_point_raw before it is held at 0.

    Raises:
        ValueError: No row has preference 0, or the log-probs are not finite.
        ColumnMissingError: The batch lacks a column.
    """
    batch = given.experience
    preference_B = preference_of(batch)
    rows = (preference_B == 0).nonzero().flatten()
    if not len(rows):
        raise ValueError(
            f"preference is 0 in none of {len(preference_B)} rows: KTO estimates its reference "
            "point from such rows; read the batch as judgements, which adds them"
        )
    ratios_B = log_ratios(completion_values(batch, "proximal_logprobs").double(), batch)
    raw = float(ratios_B[rows].mean())
    if not torch.isfinite(ratios_B[rows]).all():
        raise ValueError(
            f"the mean log-ratio of {len(rows)} rows is {raw}: proximal_logprobs and "
            "reference_logprobs must be finite"
        )
    point = max(0.0, raw)
    column = Column(ColumnKind.ROW, torch.full((batch.num_rows,), point, dtype=torch.float32))
    return (
        Experience({"kl_reference_point": column}),
        {"kl_reference_point": point, "kl_reference_point_raw": raw},
    )
