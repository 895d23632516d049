"""Losses of value models.

Shape letters: N packed completion tokens of the micro-batch, M those of them with loss mask 1.
"""

from __future__ import annotations

import torch

from rolemesh.engine.algorithms.aggregation import LossScale, token_weights
from rolemesh.engine.algorithms.losses.base import (
    Loss,
    ModelOutputs,
    UnmaskedReader,
    largest,
    loss_for,
    token_share,
)
from rolemesh.engine.experience import Experience
from rolemesh.engine.specs import PpoValueLossSpec


@loss_for(PpoValueLossSpec)
class PpoValueLoss(Loss[PpoValueLossSpec]):
    """The clipped squared error of values (arXiv 2006.05990, section 3.1).

    With clipped = clip(values, old - clip, old + clip), a token's loss is

        0.5 max((values - returns)^2, (clipped - returns)^2)

    The old values are the column values, those of the critic when advantages were estimated.
    """

    needs = "values"

    def __call__(
        self, outputs: ModelOutputs, batch: Experience, scale: LossScale
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Computes this micro-batch's share; see `Loss`."""
        spec = self.spec
        read = UnmaskedReader(batch)
        values_M = read.output("values_N", outputs.values_N)
        old_values_M = read.column("values", like=values_M)
        returns_M = read.column("returns", like=values_M)
        weights_M = token_weights(batch, scale, spec.aggregation, spec.norm_length, like=values_M)

        errors_M = (values_M - returns_M).square()
        is_clipped_M = torch.zeros_like(errors_M, dtype=torch.bool)
        if spec.clip is not None:
            clipped_values_M = values_M.clamp(old_values_M - spec.clip, old_values_M + spec.clip)
            clipped_errors_M = (clipped_values_M - returns_M).square()
            is_clipped_M = clipped_errors_M > errors_M
            errors_M = torch.maximum(errors_M, clipped_errors_M)
        loss = (weights_M * (0.5 * errors_M)).sum()
        with torch.no_grad():
            metrics = {
                "loss": loss,
                "value_loss": loss,
                "value_clip_fraction": token_share(is_clipped_M, scale),
                "values_mean": token_share(values_M, scale),
                "value_error_max": largest((values_M - returns_M).abs()),
            }
        return loss, metrics
