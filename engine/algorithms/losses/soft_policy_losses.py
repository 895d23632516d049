"""Policy losses with another rule than PPO's clip: masks by divergence, soft gates, row ratios.

Shape letters: B rows, M unmasked completion tokens of the micro-batch.
"""

from __future__ import annotations

import torch

from rolemesh.engine.algorithms.kl import MAX_LOG_RATIO
from rolemesh.engine.algorithms.losses.base import loss_for
from rolemesh.engine.algorithms.losses.policy_losses import (
    PolicyLoss,
    PolicyTokens,
    TokenLosses,
    ratios,
)
from rolemesh.engine.algorithms.ragged import row_mean_of_each, row_sums
from rolemesh.engine.specs import (
    DppoPolicyLossSpec,
    GmpoPolicyLossSpec,
    SapoPolicyLossSpec,
    ToprPolicyLossSpec,
    VespoPolicyLossSpec,
)


@loss_for(DppoPolicyLossSpec)
class DppoPolicyLoss(PolicyLoss[DppoPolicyLossSpec]):
    """Divergence PPO (arXiv 2602.04879, eq. 12).

        -mask ratio A,   mask = 0 where A > 0, ratio > 1 and D > divergence_high
                                or A < 0, ratio < 1 and D > divergence_low; else 1

    With q the token's probability when sampled and p that of now, D is |p - q| (eq. 13) or
    q log(q / p) + (1 - q) log((1 - q) / (1 - p)) (eq. 14). Mask and D compare with the policy that
    sampled, whatever the ratio compares with: the region of trust is around that one (section 5.2).
    The ratio is not truncated (section 5.4).
    """

    def token_losses(self, tokens: PolicyTokens) -> TokenLosses:
        """See the class."""
        ratio_M = ratios(tokens.logprobs_M, tokens.old_M)
        now_M, sampled_M = tokens.logprobs_M.detach(), tokens.sampled_M
        is_kl = self.spec.divergence == "kl"
        divergence_M = (binary_kl if is_kl else binary_tv)(now_M, sampled_M)
        low, high = self.spec.thresholds
        advantages_M = tokens.advantages_M
        too_high_M = (advantages_M > 0) & (now_M > sampled_M) & (divergence_M > high)
        too_low_M = (advantages_M < 0) & (now_M < sampled_M) & (divergence_M > low)
        losses_M = torch.where(too_high_M | too_low_M, 0.0, -ratio_M * advantages_M)
        metrics = {
            "clip_fraction_high": too_high_M,
            "clip_fraction_low": too_low_M,
            "divergence": divergence_M,
        }
        return TokenLosses(losses_M, ratio_M, metrics)


@loss_for(SapoPolicyLossSpec)
class SapoPolicyLoss(PolicyLoss[SapoPolicyLossSpec]):
    """Soft adaptive policy optimisation (arXiv 2511.20347, eq. 5 and 6).

        -gate(ratio) A,   gate(x) = 4 / tau sigmoid(tau (x - 1))

    where tau is gate_positive if A > 0, else gate_negative. The gradient by the log-prob is that of
    -ratio A, weighted by 4 s (1 - s) with s = sigmoid(tau (ratio - 1)): 1 at ratio 1, towards 0 on
    both sides.
    """

    def token_losses(self, tokens: PolicyTokens) -> TokenLosses:
        """See the class."""
        spec, advantages_M = self.spec, tokens.advantages_M
        ratio_M = ratios(tokens.logprobs_M, tokens.old_M)
        tau_M = _by_sign(advantages_M > 0, spec.gate_positive, spec.gate_negative, like=ratio_M)
        gate_M = torch.sigmoid(tau_M * (ratio_M - 1))
        weight_M = 4 * (gate_M * (1 - gate_M)).detach()
        losses_M = -4 / tau_M * gate_M * advantages_M
        return TokenLosses(losses_M, ratio_M, {"token_weight_mean": weight_M})


@loss_for(GmpoPolicyLossSpec)
class GmpoPolicyLoss(PolicyLoss[GmpoPolicyLossSpec]):
    """Geometric-mean policy optimisation (arXiv 2507.20673, eq. 4 and algorithm 1).

    The loss at each token of a row is -s A, with s = exp(mean over the row's unmasked tokens of c)
    and, for a token's log-ratio r,

        c = min(r, clip_high) if A > 0, else max(r, -clip_low)

    Its mean over the tokens of a row is eq. 4, where A is one number a row. Unlike GSPO's, the clip
    stands before the mean, so that a row with a clipped token still teaches by its other tokens.
    """

    def token_losses(self, tokens: PolicyTokens) -> TokenLosses:
        """See the class."""
        spec, is_positive_M = self.spec, tokens.advantages_M > 0
        log_ratio_M = (tokens.logprobs_M - tokens.old_M).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        clipped_M = torch.where(
            is_positive_M,
            log_ratio_M.clamp(max=spec.clip_high),
            log_ratio_M.clamp(min=-spec.clip_low),
        )
        ratio_M = row_mean_of_each(clipped_M, tokens.counts_B).exp()
        metrics = {
            "clip_fraction_high": is_positive_M & (log_ratio_M > spec.clip_high),
            "clip_fraction_low": (tokens.advantages_M < 0) & (log_ratio_M < -spec.clip_low),
        }
        return TokenLosses(-ratio_M * tokens.advantages_M, ratio_M, metrics)


@loss_for(VespoPolicyLossSpec)
class VespoPolicyLoss(PolicyLoss[VespoPolicyLossSpec]):
    """Variational sequence-level soft policy optimisation (arXiv 2602.10693, eq. 20).

        -stop(w^c1 exp(c2 (1 - w))) A logprob

    w is the product of the ratios of all tokens of the row to the policy that sampled; c1 and c2
    are power_positive and decay_positive where A >= 0, else power_negative and decay_negative.
    """

    def token_losses(self, tokens: PolicyTokens) -> TokenLosses:
        """See the class."""
        spec, is_positive_M = self.spec, tokens.advantages_M >= 0
        log_ratio_M = _row_log_ratios(tokens)
        ratio_M = log_ratio_M.exp()
        power_M = _by_sign(
            is_positive_M, spec.power_positive, spec.power_negative, like=log_ratio_M
        )
        decay_M = _by_sign(
            is_positive_M, spec.decay_positive, spec.decay_negative, like=log_ratio_M
        )
        weight_M = (power_M * log_ratio_M + decay_M * (1 - ratio_M)).exp()
        losses_M = -weight_M * tokens.advantages_M * tokens.logprobs_M
        return TokenLosses(losses_M, ratio_M, {"token_weight_mean": weight_M})


@loss_for(ToprPolicyLossSpec)
class ToprPolicyLoss(PolicyLoss[ToprPolicyLossSpec]):
    """Tapered off-policy REINFORCE (arXiv 2503.14286, section 3).

        -A logprob               where A >= 0
        -stop(min(w, 1)) A logprob    where A < 0

    w is the product of the ratios of all tokens of the row to the policy that sampled.
    """

    def token_losses(self, tokens: PolicyTokens) -> TokenLosses:
        """See the class."""
        ratio_M = _row_log_ratios(tokens).exp()
        weight_M = torch.where(tokens.advantages_M < 0, ratio_M.clamp(max=1.0), 1.0)
        losses_M = -weight_M * tokens.advantages_M * tokens.logprobs_M
        return TokenLosses(losses_M, ratio_M, {"token_weight_mean": weight_M})


def binary_tv(logprobs_M: torch.Tensor, sampled_M: torch.Tensor) -> torch.Tensor:
    """Total variation between two policies that know two outcomes, this token or another one.

    Args:
        logprobs_M: float [M], log-probs of the token now.
        sampled_M: float [M], when it was sampled.

    Returns:
        float [M], |p - q|.

    Example: probabilities 0.8 and 0.99 give 0.19.
    """
    return (logprobs_M.exp() - sampled_M.exp()).abs()


def binary_kl(logprobs_M: torch.Tensor, sampled_M: torch.Tensor) -> torch.Tensor:
    """KL of the policy that sampled to the policy now, over two outcomes; see `binary_tv`.

    Returns:
        float [M], nats, finite: a probability of another token that has become 0 counts as the
        smallest normal number of the type.

    Example: probabilities 0.8 now and 0.99 when sampled give 0.1810.
    """
    # By expm1: 1 - exp(logprob) has no digits left where the token is nearly certain.
    others_M = (-torch.expm1(logprobs_M)).clamp_min(torch.finfo(logprobs_M.dtype).tiny)
    others_sampled_M = (-torch.expm1(sampled_M)).clamp_min(0.0)
    of_others_M: torch.Tensor = torch.special.xlogy(others_sampled_M, others_sampled_M / others_M)
    return of_others_M + sampled_M.exp() * (sampled_M - logprobs_M)


def _row_log_ratios(tokens: PolicyTokens) -> torch.Tensor:
    """Log of each token's row's ratio to the policy that sampled, without gradient: float [M].

    Not divided by the length. Summed in float64, and held where exp overflows.
    """
    log_ratio_M = tokens.logprobs_M.detach() - tokens.sampled_M
    of_rows_B = row_sums(log_ratio_M.double(), tokens.counts_B)
    of_rows_B = of_rows_B.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).to(log_ratio_M.dtype)
    return of_rows_B.repeat_interleave(tokens.counts_B, output_size=len(log_ratio_M))


def _by_sign(
    is_positive_M: torch.Tensor, positive: float, negative: float, *, like: torch.Tensor
) -> torch.Tensor:
    """One of two numbers for each token: float [M], of the type of `like`."""
    # Filled and not converted: numbers of torch.where alone would be rounded to float32.
    return torch.where(is_positive_M, like.new_full((), positive), like.new_full((), negative))
