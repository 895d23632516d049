"""Losses that train a policy on sampled completions: PPO and its relatives.

Each is a loss of its own for each token; entropy and KL to the reference are added to all alike.
Advantages are numbers: no gradient reaches them.

Shape letters: N packed completion tokens of the micro-batch, M those of them with loss mask 1.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from rolemesh.engine.algorithms.aggregation import LossScale, token_weights
from rolemesh.engine.algorithms.kl import MAX_LOG_RATIO, kl_loss
from rolemesh.engine.algorithms.losses.base import (
    Loss,
    ModelOutputs,
    UnmaskedReader,
    largest,
    loss_for,
    token_share,
)
from rolemesh.engine.algorithms.losses.off_policy import (
    GAP_METRICS,
    bounded,
    correction_weights,
    finished_gap,
    gap_shares,
    normalized,
)
from rolemesh.engine.algorithms.ragged import (
    completion_values,
    loss_mask_of,
    row_mean_of_each,
    unmasked_per_row,
)
from rolemesh.engine.experience import Experience
from rolemesh.engine.hardware.devices import sent
from rolemesh.engine.kernels.choice import triton_serves
from rolemesh.engine.specs import (
    CispoPolicyLossSpec,
    GspoPolicyLossSpec,
    PolicyTermsSpec,
    PpoPolicyLossSpec,
    ReinforcePolicyLossSpec,
)
from rolemesh.engine.specs.columns import PROXIMAL_LOGPROBS

S = TypeVar("S", bound=PolicyTermsSpec)

OWN_METRICS = frozenset(
    {
        *("loss", "policy_loss", "kl_loss", "entropy", "approx_kl", "ratio_mean", "ratio_max"),
        *("sampler_logprob_diff_mean", "sampler_logprob_diff_max", "importance_weight_mean"),
        *("importance_capped_fraction", "importance_masked_fraction", *GAP_METRICS),
    }
)
"""Metrics of every policy loss, which no loss may give besides."""


@dataclass(frozen=True, slots=True)
class PolicyTokens:
    """What a policy loss sees of the unmasked tokens."""

    logprobs_M: torch.Tensor
    """float, log-probs now, with gradient."""
    sampled_M: torch.Tensor
    """float, log-probs under the weights that sampled."""
    old_M: torch.Tensor
    """float, log-probs that ratios compare with: the sampled ones, or those at the start of the
    update."""
    advantages_M: torch.Tensor
    """float."""
    counts_B: torch.Tensor
    """int64, unmasked tokens of each row; their sum is M, and tokens lie row by row."""
    entropy_M: torch.Tensor | None
    """float, entropy of the distribution of each token in nats, with gradient; None where nobody
    asked for it. A user's function always gets it."""
    columns: Mapping[str, torch.Tensor]
    """Further columns [M] that the loss reads, without gradient."""


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """What a policy loss makes of them."""

    losses_M: torch.Tensor
    """float, with gradient."""
    ratio_M: torch.Tensor
    """float, the ratio that the loss works with, for metrics."""
    metrics: dict[str, torch.Tensor]
    """Numbers or truths [M], reported as means over tokens."""


class PolicyLoss(Loss[S]):
    """A policy loss with its entropy and KL terms, all aggregated alike.

        loss = policy_loss - entropy_coefficient * entropy + kl_in_loss * kl

    The column logprobs holds those of the sampler. Where sampler and trainer still have the same
    weights (the first mini-batch after a weight sync), the metrics that compare with it are
    therefore the numerical difference between the two.

    A correction for samples of another policy (`spec.off_policy`) weighs the policy term of every
    loss alike (`off_policy.correction_weights`). The log-probs that ratios compare with are then
    those at the start of the update: decoupled PPO (arXiv 2505.24298, section 5.2) for any loss.
    They are the column proximal_logprobs or, with weights by the same pass, its own: the ratio is
    1 then. Weights by the policy now leave the ratios as they are.
    """

    reports_entropy = True
    reads: tuple[str, ...] = ()
    """Further columns that `token_losses` reads."""

    def __init__(self, spec: S) -> None:
        """Needs entropy where a coefficient weighs it."""
        super().__init__(spec)
        self.needs_entropy = spec.entropy_coefficient != 0

    def scale_of(self, batch: Experience) -> LossScale:
        """See Loss; with the sum of weights that are to have the mean 1."""
        scale = LossScale.of(batch)
        off_policy = self.spec.off_policy
        if off_policy is None or off_policy.normalize is None:
            return scale
        mask_N, offsets = loss_mask_of(batch)
        proximal_N, sampled_N = (
            completion_values(batch, name) for name in (PROXIMAL_LOGPROBS, "logprobs")
        )
        weights = correction_weights(
            (proximal_N - sampled_N)[mask_N], unmasked_per_row(mask_N, offsets), off_policy
        )
        return replace(scale, weight_sum=float(weights.weights_M.sum(dtype=torch.float64)))

    def finished(self, metrics: dict[str, float]) -> dict[str, float]:
        """See Loss; with what is no mean over tokens."""
        return finished_gap(metrics)

    @abstractmethod
    def token_losses(self, tokens: PolicyTokens) -> TokenLosses:
        """The policy loss of each token."""

    def __call__(
        self, outputs: ModelOutputs, batch: Experience, scale: LossScale
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Computes this micro-batch's share; see `Loss`."""
        spec = self.spec
        read = UnmaskedReader(batch)
        logprobs_M = read.output("logprobs_N", outputs.logprobs_N)
        entropy_M = None
        if self.needs_entropy or outputs.entropy_N is not None:
            entropy_M = read.output("entropy_N", outputs.entropy_N)
        sampled_M = read.column("logprobs", like=logprobs_M)
        old_M, start_M = sampled_M, logprobs_M.detach()
        if PROXIMAL_LOGPROBS in self.columns:
            old_M = start_M = read.column(PROXIMAL_LOGPROBS, like=logprobs_M)
        elif spec.weighs_by == "same_pass":
            old_M = start_M
        tokens = PolicyTokens(
            logprobs_M=logprobs_M,
            sampled_M=sampled_M,
            old_M=old_M,
            advantages_M=read.column("advantages", like=logprobs_M),
            counts_B=sent(unmasked_per_row(*loss_mask_of(batch)), logprobs_M.device),
            entropy_M=entropy_M,
            columns={name: read.column(name, like=logprobs_M) for name in self.reads},
        )
        weights_M = token_weights(batch, scale, spec.aggregation, spec.norm_length, like=logprobs_M)
        reference_M = None
        if spec.kl_in_loss > 0:
            reference_M = read.column("reference_logprobs", like=logprobs_M)
        importance_M, of_weights = None, {}
        if spec.off_policy is not None:
            found = correction_weights(start_M - sampled_M, tokens.counts_B, spec.off_policy)
            importance_M, of_weights = found.weights_M, found.metrics
            if spec.off_policy.normalize is not None:
                importance_M = normalized(importance_M, scale)
        loss, metrics = self._total(tokens, weights_M, importance_M, reference_M, scale)
        return loss, {
            "loss": loss,
            **metrics,
            **{name: token_share(each_M, scale) for name, each_M in of_weights.items()},
            **gap_shares(start_M - sampled_M, self._ages(read, batch), scale),
        }

    def _ages(self, read: UnmaskedReader, batch: Experience) -> torch.Tensor | None:
        """Versions by which the weights that sampled each token are older, int64 [M] on the host.

        None where they are not known.
        """
        if self.policy_version is None or "policy_versions" not in batch:
            return None
        return self.policy_version - read.column_on_host("policy_versions")

    def _total(
        self,
        tokens: PolicyTokens,
        weights_M: torch.Tensor,
        importance_M: torch.Tensor | None,
        reference_M: torch.Tensor | None,
        scale: LossScale,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss, and its other metrics.

        Args:
            tokens: What is trained on.
            weights_M: float [M], of each token in the sum.
            importance_M: float [M], of each token's policy term; None: 1.
            reference_M: float [M], log-probs of the reference; None without a KL.
            scale: Counts over the whole mini-batch.
        """
        logprobs_M = tokens.logprobs_M
        lost = self.token_losses(tokens)
        losses_M = lost.losses_M if importance_M is None else importance_M * lost.losses_M
        policy_loss = (weights_M * losses_M).sum()
        metrics = {"policy_loss": policy_loss}
        loss = self._with_entropy(policy_loss, tokens, weights_M)
        if reference_M is not None:
            kl = (weights_M * kl_loss(logprobs_M, reference_M, self.spec.kl_form)).sum()
            loss = loss + self.spec.kl_in_loss * kl
            metrics["kl_loss"] = kl
        with torch.no_grad():
            difference_M = (logprobs_M - tokens.sampled_M).abs()
            log_ratio_M = bounded(logprobs_M - tokens.old_M)
            per_token = {
                **({} if tokens.entropy_M is None else {"entropy": tokens.entropy_M}),
                "ratio_mean": lost.ratio_M,
                # KL(old || new) from samples of old, by k3: r is the log-ratio itself.
                "approx_kl": torch.expm1(log_ratio_M) - log_ratio_M,
                "sampler_logprob_diff_mean": difference_M,
                **lost.metrics,
            }
            metrics |= {name: token_share(each_M, scale) for name, each_M in per_token.items()}
            metrics["ratio_max"] = largest(lost.ratio_M.detach())
            metrics["sampler_logprob_diff_max"] = largest(difference_M)
        return loss, metrics

    def _with_entropy(
        self, loss: torch.Tensor, tokens: PolicyTokens, weights_M: torch.Tensor
    ) -> torch.Tensor:
        coefficient = self.spec.entropy_coefficient
        if not coefficient:
            return loss
        assert tokens.entropy_M is not None  # the loss needs it
        return loss - coefficient * (weights_M * tokens.entropy_M).sum()


@loss_for(PpoPolicyLossSpec)
class PpoPolicyLoss(PolicyLoss[PpoPolicyLossSpec]):
    """The clipped policy loss of PPO (arXiv 1707.06347, eq. 7), with its usual additions.

    With ratio = exp(logprobs - old logprobs), a token's loss is

        max(-ratio A, -clip(ratio, 1 - clip_low, 1 + clip_high) A)

    and, with dual clip and A < 0, at most -dual_clip A (arXiv 1912.09729, eq. 5).
    """

    def token_losses(self, tokens: PolicyTokens) -> TokenLosses:
        """See the class."""
        spec, advantages_M = self.spec, tokens.advantages_M
        ratio_M = ratios(tokens.logprobs_M, tokens.old_M)
        losses_M, metrics = _clipped(ratio_M, advantages_M, spec)
        if spec.dual_clip is not None:
            bounded_M = torch.minimum(losses_M, -spec.dual_clip * advantages_M)
            losses_M = torch.where(advantages_M < 0, bounded_M, losses_M)
            metrics["dual_clip_fraction"] = (advantages_M < 0) & (ratio_M > spec.dual_clip)
        return TokenLosses(losses_M, ratio_M, metrics)

    def _total(
        self,
        tokens: PolicyTokens,
        weights_M: torch.Tensor,
        importance_M: torch.Tensor | None,
        reference_M: torch.Tensor | None,
        scale: LossScale,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """See PolicyLoss; on a GPU by one kernel."""
        logprobs_M = tokens.logprobs_M
        if not triton_serves(logprobs_M.device) or logprobs_M.dtype != torch.float32:
            return super()._total(tokens, weights_M, importance_M, reference_M, scale)
        from rolemesh.engine.kernels.policy_loss import WEIGHTED, ppo_loss

        loss, found = ppo_loss(
            logprobs_M,
            tokens.old_M,
            tokens.sampled_M,
            tokens.advantages_M,
            weights_M,
            importance_M,
            tokens.entropy_M,
            reference_M,
            self.spec,
            max_log_ratio=MAX_LOG_RATIO,
        )
        metrics = {
            name: number
            if name in WEIGHTED or name.endswith("_max")
            else number / scale.token_divisor
            for name, number in found.items()
        }
        return self._with_entropy(loss, tokens, weights_M), metrics


@loss_for(GspoPolicyLossSpec)
class GspoPolicyLoss(PolicyLoss[GspoPolicyLossSpec]):
    """Group sequence policy optimisation (arXiv 2507.18071).

    With s = exp(mean over the row's unmasked tokens of logprobs - old logprobs) (eq. 7), the loss
    at each token of the row is

        max(-s A, -clip(s, 1 - clip_low, 1 + clip_high) A)

    whose mean over the tokens of a row is eq. 5, since there A is one number a row. At level
    "token" (GSPO-token, eq. 13 and 14) s keeps its value, but its gradient at a token is that of
    the token's own log-prob alone: s = stop(s) * exp(logprob - stop(logprob)). With one A a row
    and the mean over its tokens the two levels have the same gradient.
    """

    def token_losses(self, tokens: PolicyTokens) -> TokenLosses:
        """See the class."""
        log_ratio_M = row_mean_of_each(tokens.logprobs_M - tokens.old_M, tokens.counts_B)
        ratio_M = bounded(log_ratio_M).exp()
        if self.spec.level == "token":
            own_M = (tokens.logprobs_M - tokens.logprobs_M.detach()).exp()
            ratio_M = ratio_M.detach() * own_M
        losses_M, metrics = _clipped(ratio_M, tokens.advantages_M, self.spec)
        return TokenLosses(losses_M, ratio_M, metrics)


@loss_for(CispoPolicyLossSpec)
class CispoPolicyLoss(PolicyLoss[CispoPolicyLossSpec]):
    """Clipped importance weights (CISPO, arXiv 2506.13585, eq. 4 and 5).

        -stop(clip(ratio, 1 - clip_low, 1 + clip_high)) A logprob

    Unlike PPO's, the clip only bounds the weight: no token loses its gradient.
    """

    def token_losses(self, tokens: PolicyTokens) -> TokenLosses:
        """See the class."""
        spec = self.spec
        ratio_M = ratios(tokens.logprobs_M, tokens.old_M).detach()
        lowest = 0.0 if spec.clip_low is None else 1 - spec.clip_low
        weight_M = ratio_M.clamp(lowest, 1 + spec.clip_high)
        losses_M = -weight_M * tokens.advantages_M * tokens.logprobs_M
        metrics = {
            "clip_fraction_high": ratio_M > 1 + spec.clip_high,
            "clip_fraction_low": ratio_M < lowest,
        }
        return TokenLosses(losses_M, ratio_M, metrics)


@loss_for(ReinforcePolicyLossSpec)
class ReinforcePolicyLoss(PolicyLoss[ReinforcePolicyLossSpec]):
    """The plain policy gradient: -A logprob (as in arXiv 2402.14740 and 2310.10505)."""

    def token_losses(self, tokens: PolicyTokens) -> TokenLosses:
        """See the class."""
        losses_M = -tokens.advantages_M * tokens.logprobs_M
        return TokenLosses(losses_M, ratios(tokens.logprobs_M.detach(), tokens.old_M), {})


def ratios(logprobs_M: torch.Tensor, old_M: torch.Tensor) -> torch.Tensor:
    """exp(logprobs - old), floating [M] with gradient, held where exp overflows."""
    return bounded(logprobs_M - old_M).exp()


def _clipped(
    ratio_M: torch.Tensor, advantages_M: torch.Tensor, spec: PpoPolicyLossSpec | GspoPolicyLossSpec
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Clipped losses [M], and where the clip takes the gradient away."""
    lowest, highest = 1 - spec.clip_low, 1 + spec.clip_high
    clipped_M = ratio_M.clamp(lowest, highest)
    losses_M = torch.maximum(-ratio_M * advantages_M, -clipped_M * advantages_M)
    ratio_M = ratio_M.detach()
    return losses_M, {
        "clip_fraction_high": (advantages_M > 0) & (ratio_M > highest),
        "clip_fraction_low": (advantages_M < 0) & (ratio_M < lowest),
    }
