"""Losses whose weights the caller gives token by token, and that are summed.

Shape letters: N packed completion tokens of the micro-batch, M those of them with loss mask 1, K
target tokens at each place.
"""

from __future__ import annotations

import torch

from rolemesh.engine.algorithms.aggregation import LossScale
from rolemesh.engine.algorithms.kl import MAX_LOG_RATIO
from rolemesh.engine.algorithms.losses.base import ModelOutputs, UnmaskedReader, loss_for
from rolemesh.engine.algorithms.losses.target_losses import TargetLoss
from rolemesh.engine.algorithms.ragged import loss_mask_of, row_sum_of_each, unmasked_per_row
from rolemesh.engine.experience import Experience
from rolemesh.engine.hardware.devices import sent
from rolemesh.engine.specs.columns import RATIO_MASK, TOKEN_WEIGHTS
from rolemesh.engine.specs.losses.token_sums import TokenSumLossSpec


@loss_for(TokenSumLossSpec)
class TokenSumLoss(TargetLoss[TokenSumLossSpec]):
    """The sum of its spec, of this micro-batch's tokens: nothing depends on the mini-batch."""

    def __call__(
        self, outputs: ModelOutputs, batch: Experience, scale: LossScale
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Computes this micro-batch's share; see `Loss`."""
        read, spec = UnmaskedReader(batch), self.spec
        policy_MK = self.policy(read, outputs)
        if spec.form == "cross_entropy":
            weights = read.column(TOKEN_WEIGHTS, like=policy_MK).view(policy_MK.shape)
            loss = -(weights * policy_MK).sum()
        else:
            loss = self._with_ratios(policy_MK[:, 0], batch, read)
        return loss, {"loss": loss}

    def _with_ratios(
        self, policy_M: torch.Tensor, batch: Experience, read: UnmaskedReader
    ) -> torch.Tensor:
        spec = self.spec
        advantages_M = read.column("advantages", like=policy_M)
        gap_M = policy_M - read.column("logprobs", like=policy_M)
        if spec.form == "dro":
            return -(policy_M * advantages_M - spec.beta / 2 * gap_M.square()).sum()
        if spec.form == "gspo":
            mean_M = _row_means(gap_M.detach(), batch, read)
            ratio_M = (mean_M + policy_M - policy_M.detach()).clamp(max=MAX_LOG_RATIO).exp()
        else:
            # Beyond the bound the product with an advantage would be infinite in float32.
            ratio_M = gap_M.clamp(max=MAX_LOG_RATIO).exp()
        if spec.form == "importance_sampling":
            return -(ratio_M * advantages_M).sum()
        low, high = spec.clips
        clipped_M = ratio_M.clamp(low, high)
        if spec.form == "cispo":
            return -(clipped_M.detach() * advantages_M * policy_M).sum()
        return -torch.minimum(ratio_M * advantages_M, clipped_M * advantages_M).sum()


def _row_means(gap_M: torch.Tensor, batch: Experience, read: UnmaskedReader) -> torch.Tensor:
    """The mean of each row's log-ratios by its ratio mask, at each token of it."""
    counts_B = sent(unmasked_per_row(*loss_mask_of(batch)), gap_M.device)
    weights_M = read.column(RATIO_MASK, like=gap_M)
    total_M = row_sum_of_each(weights_M * gap_M, counts_B)
    return total_M / row_sum_of_each(weights_M, counts_B).clamp_min(1e-12)
