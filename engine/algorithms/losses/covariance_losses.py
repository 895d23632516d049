"""Clip-Cov and KL-Cov: policy losses that spare the entropy (arXiv 2505.22617, section 4.2).

Entropy falls as fast as log-prob and advantage vary together (theorem 2), and few tokens make up
most of that. Which ones is a question about a whole mini-batch: about its means, and about the
highest scores in it. Log-probs of sampling and advantages are known before its first pass, so the
ranks agree on both then (`completed`), and no token's part depends on how the mini-batch is cut.

Shape letters: B rows, M unmasked completion tokens, of a rank's part or of a micro-batch.
"""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from rolemesh.engine.algorithms.aggregation import LossScale
from rolemesh.engine.algorithms.losses.base import UnmaskedReader, loss_for
from rolemesh.engine.algorithms.losses.policy_losses import (
    PolicyLoss,
    PolicyTokens,
    TokenLosses,
    ratios,
)
from rolemesh.engine.algorithms.ragged import loss_mask_of, unmasked_per_row
from rolemesh.engine.experience import Experience
from rolemesh.engine.specs import (
    ClipCovPolicyLossSpec,
    CovariancePolicyLossSpec,
    KlCovPolicyLossSpec,
)
from rolemesh.engine.splitmix import GAMMA, mixed, shifted

S = TypeVar("S", bound=CovariancePolicyLossSpec)

_COVARIANCES, _IS_CHOSEN = "covariances", "is_chosen"
"""What `_total` adds to the columns that `token_losses` sees."""


class CovariancePolicyLoss(PolicyLoss[S]):
    """A policy loss that treats the tokens of the highest scores in its own way.

    They are covariance_share of the mini-batch's tokens, rounded up, or as many as have a score.
    Tokens of equal scores are chosen together, so that there may be a few more.
    """

    @abstractmethod
    def scores(
        self, covariances_M: torch.Tensor, keys_M: torch.Tensor, counts_B: torch.Tensor
    ) -> torch.Tensor:
        """What tokens are chosen by: float64 [M], -infinity for one that must not be chosen.

        It may depend on nothing but the token itself and its place in its row.

        Args:
            covariances_M: float64 [M].
            keys_M: int64 [M], the bits of the token's log-prob and advantage.
            counts_B: int64 [B], tokens of each row.
        """

    def completed(
        self, scale: LossScale, part: Experience, gather: Callable[[Any], list[Any]]
    ) -> LossScale:
        """Adds the means, and the score from which on tokens are chosen; see Loss."""
        read = UnmaskedReader(part)
        like = torch.zeros(0, dtype=torch.float64)
        logprobs_M, advantages_M = (
            read.column(name, like=like) for name in ("logprobs", "advantages")
        )
        sums = gather([float(logprobs_M.sum()), float(advantages_M.sum())])
        scale = dataclasses.replace(
            scale,
            mean_logprob=math.fsum(of_rank[0] for of_rank in sums) / scale.token_divisor,
            mean_advantage=math.fsum(of_rank[1] for of_rank in sums) / scale.token_divisor,
        )
        counts_B = unmasked_per_row(*loss_mask_of(part))
        _, scores_M = self._scored(logprobs_M, advantages_M, counts_B, scale)
        number = math.ceil(self.spec.covariance_share * scale.num_tokens)
        own = scores_M[scores_M > -math.inf]
        told = gather(own.topk(min(number, len(own))).values.tolist())
        highest = sorted((score for of_rank in told for score in of_rank), reverse=True)[:number]
        return dataclasses.replace(scale, least_score=highest[-1] if highest else math.inf)

    def _scored(
        self,
        logprobs_M: torch.Tensor,
        advantages_M: torch.Tensor,
        counts_B: torch.Tensor,
        scale: LossScale,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Covariances and scores, float64 [M] each: the same bits wherever they are computed."""
        covariances_M = (logprobs_M.double() - scale.mean_logprob) * (
            advantages_M.double() - scale.mean_advantage
        )
        keys_M = (_bits(logprobs_M) << 32) + _bits(advantages_M)
        return covariances_M, self.scores(covariances_M, keys_M, counts_B)

    def _total(
        self,
        tokens: PolicyTokens,
        weights_M: torch.Tensor,
        importance_M: torch.Tensor | None,
        reference_M: torch.Tensor | None,
        scale: LossScale,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """See PolicyLoss; tells `token_losses` which tokens are chosen."""
        covariances_M, scores_M = self._scored(
            tokens.sampled_M, tokens.advantages_M, tokens.counts_B, scale
        )
        chosen = {_COVARIANCES: covariances_M, _IS_CHOSEN: scores_M >= scale.least_score}
        tokens = dataclasses.replace(tokens, columns={**tokens.columns, **chosen})
        return super()._total(tokens, weights_M, importance_M, reference_M, scale)


@loss_for(ClipCovPolicyLossSpec)
class ClipCovPolicyLoss(CovariancePolicyLoss[ClipCovPolicyLossSpec]):
    """Clip-Cov (arXiv 2505.22617, eq. 11 and 12, listing 1).

    PPO's clipped loss, and 0 at the chosen tokens. These are drawn from the tokens whose covariance
    lies in the range; the draw is a function of the token, so that no generator has a state.
    """

    def scores(
        self, covariances_M: torch.Tensor, keys_M: torch.Tensor, counts_B: torch.Tensor
    ) -> torch.Tensor:
        """Uniform numbers between 0 and 1 in the range of covariances; see the base."""
        spec = self.spec
        is_within_M = (covariances_M >= spec.covariance_low) & (
            covariances_M <= spec.covariance_high
        )
        # The place in the row tells tokens apart whose numbers are equal, e.g. certain ones.
        starts_B = counts_B.cumsum(0) - counts_B
        places_M = torch.arange(len(keys_M), device=keys_M.device)
        places_M = places_M - starts_B.repeat_interleave(counts_B, output_size=len(keys_M))
        bits_M = mixed(mixed(keys_M.clone()) + (places_M + 1) * GAMMA)
        return torch.where(is_within_M, shifted(bits_M, 11).double() * 2.0**-53, -math.inf)

    def token_losses(self, tokens: PolicyTokens) -> TokenLosses:
        """See the class."""
        spec, advantages_M = self.spec, tokens.advantages_M
        is_chosen_M = tokens.columns[_IS_CHOSEN]
        ratio_M = ratios(tokens.logprobs_M, tokens.old_M)
        lowest, highest = 1 - spec.clip_low, 1 + spec.clip_high
        clipped_M = ratio_M.clamp(lowest, highest)
        losses_M = torch.maximum(-ratio_M * advantages_M, -clipped_M * advantages_M)
        metrics = {
            "clip_fraction_high": (advantages_M > 0) & (ratio_M > highest),
            "clip_fraction_low": (advantages_M < 0) & (ratio_M < lowest),
            **_metrics(tokens),
        }
        return TokenLosses(torch.where(is_chosen_M, 0.0, losses_M), ratio_M, metrics)


@loss_for(KlCovPolicyLossSpec)
class KlCovPolicyLoss(CovariancePolicyLoss[KlCovPolicyLossSpec]):
    """KL-Cov (arXiv 2505.22617, eq. 13 and 14, listing 1).

        -ratio A + penalty_coefficient |logprob - old logprob| at the chosen tokens

    and -ratio A at all others. The chosen ones are those with the highest covariance, as far as it
    is positive: no other token drives the entropy down.
    """

    def scores(
        self, covariances_M: torch.Tensor, keys_M: torch.Tensor, counts_B: torch.Tensor
    ) -> torch.Tensor:
        """The covariances that are positive; see the base."""
        # Without this, all tokens would be chosen where all advantages are equal.
        return torch.where(covariances_M > 0, covariances_M, -math.inf)

    def token_losses(self, tokens: PolicyTokens) -> TokenLosses:
        """See the class."""
        ratio_M = ratios(tokens.logprobs_M, tokens.old_M)
        penalty_M = self.spec.penalty_coefficient * (tokens.logprobs_M - tokens.old_M).abs()
        losses_M = -ratio_M * tokens.advantages_M
        losses_M = losses_M + torch.where(tokens.columns[_IS_CHOSEN], penalty_M, 0.0)
        return TokenLosses(losses_M, ratio_M, _metrics(tokens))


def _metrics(tokens: PolicyTokens) -> dict[str, torch.Tensor]:
    """Those of both losses."""
    return {
        "covariance": tokens.columns[_COVARIANCES],
        "covariance_chosen_fraction": tokens.columns[_IS_CHOSEN],
    }


def _bits(numbers_M: torch.Tensor) -> torch.Tensor:
    """The 32 bits of numbers as float32, as int64 numbers from 0 on: [M]."""
    return numbers_M.float().view(torch.int32).long() & 0xFFFFFFFF
