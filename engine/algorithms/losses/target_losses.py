"""Base of the losses whose caller may give the tokens that are scored at each place."""

from __future__ import annotations

from typing import TypeVar

import torch

from rolemesh.engine.algorithms.losses.base import Loss, ModelOutputs, UnmaskedReader
from rolemesh.engine.specs.losses.target_losses import TargetLossSpec

S = TypeVar("S", bound=TargetLossSpec)


class TargetLoss(Loss[S]):
    """Scores the tokens of the column target_ids, or each row's own where there is none."""

    tells_choices = True

    def __init__(self, spec: S) -> None:
        super().__init__(spec)
        self.choices = spec.target_columns()

    def policy(self, read: UnmaskedReader, outputs: ModelOutputs) -> torch.Tensor:
        """Their log-probs, floating [M, K]; K is 1 for a row's own."""
        if self.spec.targets:
            return read.output("choices_NK", outputs.choices_NK, dims=2)
        return read.output("logprobs_N", outputs.logprobs_N)[:, None]
