"""Corrections of policy losses for samples of another policy, and how far that policy is.

The forms, with formulas and sources, stand with their specs (`engine/specs/losses/off_policy.py`).
All is made of one log-ratio a token,

    log rho = log-prob under the weights of the start of the update - log-prob when sampled

and nothing here has a gradient.

Shape letters: B rows, M unmasked completion tokens of the micro-batch, row by row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rolemesh.engine.algorithms.aggregation import LossScale
from rolemesh.engine.algorithms.kl import MAX_LOG_RATIO
from rolemesh.engine.algorithms.ragged import row_mean_of_each, row_sum_of_each
from rolemesh.engine.hardware.devices import sent
from rolemesh.engine.specs import (
    GeometricRejectionSpec,
    MaskingSpec,
    OffPolicySpec,
    SequenceTruncationSpec,
    TokenTruncationSpec,
)

OLDEST = 4
"""Ages of this many versions and more are told of together."""

GAP_METRICS = (
    *("sampler_ratio_mean", "sampler_kl_k1", "sampler_kl_k3", "sampler_chi_square"),
    "effective_sample_fraction",
)
"""Names of metrics of the gap, but for those by age."""


@dataclass(frozen=True, slots=True)
class Weights:
    """What a correction makes of the tokens of a micro-batch."""

    weights_M: torch.Tensor
    """float, of each token in the policy term; 0: masked."""
    metrics: dict[str, torch.Tensor]
    """Numbers or truths [M], reported as means over tokens."""


def correction_weights(
    log_ratio_M: torch.Tensor, counts_B: torch.Tensor, spec: OffPolicySpec
) -> Weights:
    """The weights of a form, before any division by their mean.

    A log-ratio that is not a number makes weights that are none, in every form: a broken log-prob
    must not pass for a masked token.

    Args:
        log_ratio_M: float [M], natural log of rho.
        counts_B: int64 [B], unmasked tokens of each row; their sum is M.
        spec: The form.

    Example: log(0.1), 0 and log(3) in one row give by tokens, truncated at 2, the weights 0.1, 1
    and 2, and masked outside of 0.5 and 5 the weights 0, 1 and 3.
    """
    log_ratio_M = log_ratio_M.detach()
    if isinstance(spec, TokenTruncationSpec | SequenceTruncationSpec):
        if isinstance(spec, SequenceTruncationSpec):
            log_ratio_M = row_sum_of_each(log_ratio_M, counts_B)
        ratio_M = bounded(log_ratio_M).exp()
        weights_M, of_form = ratio_M.clamp(max=spec.cap), "importance_capped_fraction"
        struck_M = ratio_M > spec.cap
    else:
        if isinstance(spec, GeometricRejectionSpec):
            log_ratio_M = row_mean_of_each(log_ratio_M, counts_B)
        elif spec.level == "sequence":
            log_ratio_M = row_sum_of_each(log_ratio_M, counts_B)
        ratio_M = bounded(log_ratio_M).exp()
        struck_M = (ratio_M < spec.low) | (ratio_M > spec.high)
        # 1 in the place of the ratio, but for NaN.
        kept_M = ratio_M if isinstance(spec, MaskingSpec) else 0 * ratio_M + 1
        weights_M, of_form = kept_M.masked_fill(struck_M, 0), "importance_masked_fraction"
    return Weights(weights_M, {"importance_weight_mean": weights_M, of_form: struck_M})


def normalized(weights_M: torch.Tensor, scale: LossScale) -> torch.Tensor:
    """Weights [M] divided by their mean over the unmasked tokens of the whole mini-batch.

    Where all are 0 they stay 0.
    """
    if scale.weight_sum == 0:
        return weights_M
    return weights_M * (scale.num_tokens / scale.weight_sum)


def gap_shares(
    log_ratio_M: torch.Tensor, ages_M: torch.Tensor | None, scale: LossScale
) -> dict[str, torch.Tensor]:
    """Shares of what tells how far the policy that sampled is; `finished_gap` makes metrics of it.

    With r = log rho and means over the tokens that the other policy sampled, as in verl's
    off-policy metrics:

        sampler_ratio_mean  mean exp(r), which is 1 but for the draw
        sampler_kl_k1       mean -r
        sampler_kl_k3       mean exp(r) - 1 - r
        sampler_chi_square  mean exp(r)^2 - 1

    The first KL and the second one estimate KL(sampler || trainer), the last is chi^2(trainer ||
    sampler). And by age in versions, for those that occur: age/<age>/fraction of tokens, and
    their KL by k3.

    Args:
        log_ratio_M: float [M].
        ages_M: int64 [M] on the host, versions by which the weights that sampled each token are
            older; None: not known.
        scale: Counts over the whole mini-batch.

    Returns:
        float64 [] each, which add up over micro-batches.
    """
    r_M = bounded(log_ratio_M.detach())
    ratio_M = r_M.exp()
    k3_M = torch.expm1(r_M) - r_M
    sums = torch.stack([ratio_M, -r_M, k3_M, ratio_M * ratio_M - 1]).sum(1, dtype=torch.float64)
    sums = sums / scale.token_divisor
    shares = dict(zip(GAP_METRICS, sums.unbind(), strict=False))
    if ages_M is None or not len(ages_M):
        return shares
    ages_M = ages_M.clamp(0, OLDEST)
    counts = torch.bincount(ages_M, minlength=OLDEST + 1).tolist()
    on_device_M = None if max(counts) == len(ages_M) else sent(ages_M, r_M.device)
    for age, count in enumerate(counts):
        if not count:
            continue
        of_age = shares["sampler_kl_k3"]
        if on_device_M is not None:
            of_age = torch.where(on_device_M == age, k3_M, 0).sum(dtype=torch.float64)
            of_age = of_age / scale.token_divisor
        shares[f"age/{age}/fraction"] = sums.new_full((), count / scale.token_divisor)
        shares[f"age/{age}/sampler_kl_k3"] = of_age
    return shares


def finished_gap(metrics: dict[str, float]) -> dict[str, float]:
    """Metrics of a mini-batch whose shares have been added up.

    effective_sample_fraction is (mean rho)^2 / mean rho^2, the effective sample size of Kish for
    each token. There are none where no rank tells of its loss, as in an estimate of one stage.
    """
    found = dict(metrics)
    if "sampler_ratio_mean" not in metrics:
        return found
    found["effective_sample_fraction"] = metrics["sampler_ratio_mean"] ** 2 / (
        1 + metrics["sampler_chi_square"]
    )
    for name, fraction in metrics.items():
        if name.startswith("age/") and name.endswith("/fraction"):
            of_age = name.removesuffix("fraction") + "sampler_kl_k3"
            found[of_age] = metrics[of_age] / fraction
    return found


def bounded(log_ratio_M: torch.Tensor) -> torch.Tensor:
    """Log-ratios held where exp overflows, far outside any clip range.

    Where exp overflows, the branch of a maximum that is not selected would send NaN (0 * inf)
    into the gradient.
    """
    return log_ratio_M.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
