"""Losses of policy and value models, one for each spec; `make_loss` finds it.

A loss sees one micro-batch and the counts of the whole mini-batch (`LossScale`), and returns its
share: the shares add up, so cutting the batch differently changes no gradient.

Shape letters: N packed completion tokens of the micro-batch, M those of them with loss mask 1.
Only the M are ever read: a masked token has gradient exactly 0, whatever it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from rolemesh.engine.algorithms.aggregation import LossScale, token_weights
from rolemesh.engine.algorithms.kl import MAX_LOG_RATIO, kl_loss
from rolemesh.engine.algorithms.ragged import completion_values, loss_mask_of
from rolemesh.engine.experience import Experience
from rolemesh.engine.specs import PpoPolicyLossSpec, PpoValueLossSpec, Spec

__all__ = [
    "Loss",
    "LossScale",
    "ModelOutputs",
    "PpoPolicyLoss",
    "PpoValueLoss",
    "add_metrics",
    "loss_for",
    "make_loss",
    "to_numbers",
]


@dataclass(slots=True)
class ModelOutputs:
    """What a forward pass gives for the completion tokens of a micro-batch, packed."""

    logprobs_N: torch.Tensor | None = None
    """float [N], log-probs of the completion tokens."""
    entropy_N: torch.Tensor | None = None
    """float [N], entropy of the distribution that each token was drawn from, in nats."""
    values_N: torch.Tensor | None = None
    """float [N], values of the states before each token."""
    scores_B: torch.Tensor | None = None
    """float [B], a reward model's scores of the rows."""


class Loss(Protocol):
    """A loss over one micro-batch."""

    columns: tuple[str, ...]
    """Columns it reads, besides tokens and prompt_lengths."""
    needs: Literal["logprobs", "values", "scores"]
    """The model output that it trains."""
    needs_entropy: bool
    """Whether it reads entropy."""

    def __call__(
        self, outputs: ModelOutputs, batch: Experience, scale: LossScale
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Computes this micro-batch's share of the mini-batch loss.

        Args:
            outputs: of this micro-batch.
            batch: the same rows, with `columns`.
            scale: counts over the whole mini-batch.

        Returns:
            The scalar to run backward on, and metrics to combine with `add_metrics`. Without
            unmasked tokens (or pairs) the scalar is 0 and still has a gradient, of zeros.
        """


def add_metrics(totals: dict[str, float], share: Mapping[str, float]) -> None:
    """Adds a micro-batch's metrics to those of its mini-batch, in place.

    The one rule: a name that ends in "_max" combines by maximum, every other one by sum. Means
    are sums too, since each share is already divided by the counts of the whole mini-batch.
    """
    for name, number in share.items():
        if name not in totals:
            totals[name] = number
        elif name.endswith("_max"):
            totals[name] = max(totals[name], number)
        else:
            totals[name] += number


_LOSSES: dict[type[Spec], Callable[[Any], Loss]] = {}


def loss_for(spec_class: type[Spec]) -> Callable[[type], type]:
    """Registers the decorated class as the loss of a spec; it is built with the spec alone."""

    def register(loss_class: type) -> type:
        if spec_class in _LOSSES:
            raise ValueError(f"{spec_class.__name__} has a loss already: {_LOSSES[spec_class]}")
        _LOSSES[spec_class] = loss_class
        return loss_class

    return register


def make_loss(spec: Spec) -> Loss:
    """Builds the loss of a spec; raises ValueError for a spec without one."""
    try:
        loss_class = _LOSSES[type(spec)]
    except KeyError:
        known = sorted(spec_class.__name__ for spec_class in _LOSSES)
        raise ValueError(f"no loss for {type(spec).__name__}: give one of {known}") from None
    return loss_class(spec)


@loss_for(PpoPolicyLossSpec)
class PpoPolicyLoss:
    """The clipped policy loss of PPO (arXiv 1707.06347, eq. 7), with its usual additions.

    With ratio = exp(logprobs - old logprobs), a token's loss is

        max(-ratio A, -clip(ratio, 1 - clip_low, 1 + clip_high) A)

    and, with dual clip and A < 0, at most -dual_clip A (arXiv 1912.09729, eq. 5). Entropy and
    KL to the reference are aggregated as the policy loss is:

        loss = policy_loss - entropy_coefficient * entropy + kl_in_loss * kl

    The old log-probs are the column logprobs, those of the sampler. Where sampler and trainer
    still have the same weights (the first mini-batch after a weight sync), the metrics
    sampler_logprob_diff_* are therefore the numerical difference between the two.
    """

    needs: Literal["logprobs", "values"] = "logprobs"
    needs_entropy = True

    def __init__(self, spec: PpoPolicyLossSpec) -> None:
        self.spec = spec
        self.columns = spec.columns()

    def __call__(
        self, outputs: ModelOutputs, batch: Experience, scale: LossScale
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Computes this micro-batch's share; see `Loss`."""
        spec = self.spec
        read = _UnmaskedReader(batch)
        logprobs_M = read.output("logprobs_N", outputs.logprobs_N)
        entropy_M = read.output("entropy_N", outputs.entropy_N)
        old_logprobs_M = read.column("logprobs", like=logprobs_M)
        advantages_M = read.column("advantages", like=logprobs_M)
        weights_M = token_weights(batch, scale, spec.aggregation, spec.norm_length, like=logprobs_M)

        log_ratio_M = logprobs_M - old_logprobs_M
        # Far outside any clip range: where exp overflows, the branch of the maximum that is not
        # selected would send NaN (0 * inf) into the gradient.
        bounded_log_ratio_M = log_ratio_M.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio_M = bounded_log_ratio_M.exp()
        clipped_ratio_M = ratio_M.clamp(1 - spec.clip_low, 1 + spec.clip_high)
        losses_M = torch.maximum(-ratio_M * advantages_M, -clipped_ratio_M * advantages_M)
        if spec.dual_clip is not None:
            bounded_M = torch.minimum(losses_M, -spec.dual_clip * advantages_M)
            losses_M = torch.where(advantages_M < 0, bounded_M, losses_M)
        policy_loss = (weights_M * losses_M).sum()

        loss = policy_loss
        if spec.entropy_coefficient > 0:
            loss = loss - spec.entropy_coefficient * (weights_M * entropy_M).sum()
        metrics: dict[str, torch.Tensor] = {}
        if spec.kl_in_loss > 0:
            reference_logprobs_M = read.column("reference_logprobs", like=logprobs_M)
            kl = (weights_M * kl_loss(logprobs_M, reference_logprobs_M, spec.kl_form)).sum()
            loss = loss + spec.kl_in_loss * kl
            metrics["kl_loss"] = kl

        with torch.no_grad():
            difference_M = log_ratio_M.abs()
            per_token = {
                "entropy": entropy_M,
                "ratio_mean": ratio_M,
                # KL(old || new) from samples of old, by k3: r is the log-ratio itself.
                "approx_kl": torch.expm1(bounded_log_ratio_M) - bounded_log_ratio_M,
                "clip_fraction_high": (advantages_M > 0) & (ratio_M > 1 + spec.clip_high),
                "clip_fraction_low": (advantages_M < 0) & (ratio_M < 1 - spec.clip_low),
                "sampler_logprob_diff_mean": difference_M,
            }
            if spec.dual_clip is not None:
                per_token["dual_clip_fraction"] = (advantages_M < 0) & (ratio_M > spec.dual_clip)
            metrics |= {name: _share(numbers_M, scale) for name, numbers_M in per_token.items()}
            metrics["ratio_max"] = _maximum(ratio_M)
            metrics["sampler_logprob_diff_max"] = _maximum(difference_M)
        return loss, to_numbers({"loss": loss, "policy_loss": policy_loss, **metrics})


@loss_for(PpoValueLossSpec)
class PpoValueLoss:
    """The clipped squared error of values (arXiv 2006.05990, section 3.1).

    With clipped = clip(values, old - clip, old + clip), a token's loss is

        0.5 max((values - returns)^2, (clipped - returns)^2)

    The old values are the column values, those of the critic when advantages were estimated.
    """

    needs: Literal["logprobs", "values"] = "values"
    needs_entropy = False

    def __init__(self, spec: PpoValueLossSpec) -> None:
        self.spec = spec
        self.columns = spec.columns()

    def __call__(
        self, outputs: ModelOutputs, batch: Experience, scale: LossScale
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Computes this micro-batch's share; see `Loss`."""
        spec = self.spec
        read = _UnmaskedReader(batch)
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
                "value_clip_fraction": _share(is_clipped_M, scale),
                "values_mean": _share(values_M, scale),
                "value_error_max": _maximum((values_M - returns_M).abs()),
            }
        return loss, to_numbers(metrics)


class _UnmaskedReader:
    """Reads model outputs and columns at the unmasked tokens of a micro-batch."""

    def __init__(self, batch: Experience) -> None:
        self._batch = batch
        self._mask_N, _ = loss_mask_of(batch)

    def output(self, name: str, output_N: torch.Tensor | None) -> torch.Tensor:
        """Reads a model output: float32 [M], or float64 if it came so."""
        if output_N is None:
            raise ValueError(f"{name} is None: the loss needs this output of the model")
        if output_N.shape != self._mask_N.shape:
            raise ValueError(
                f"{name} has shape {tuple(output_N.shape)}, but the batch has "
                f"{len(self._mask_N)} completion tokens: give one number a token"
            )
        output_M = output_N[self._mask_N.to(output_N.device)]
        return output_M if output_M.dtype == torch.float64 else output_M.float()

    def column(self, name: str, *, like: torch.Tensor) -> torch.Tensor:
        """Reads a column: [M], with the type and device of `like`, without gradient."""
        values_N = completion_values(self._batch, name)
        values_M = values_N[self._mask_N.to(values_N.device)]
        return values_M.detach().to(device=like.device, dtype=like.dtype)


def _share(numbers_M: torch.Tensor, scale: LossScale) -> torch.Tensor:
    """Sum over this micro-batch, in float64, divided by the tokens of the whole mini-batch."""
    return numbers_M.sum(dtype=torch.float64) / scale.token_divisor


def _maximum(numbers_M: torch.Tensor) -> torch.Tensor:
    """Largest of numbers that are not negative; 0 of none."""
    return numbers_M.max() if len(numbers_M) else numbers_M.new_zeros(())


def to_numbers(metrics: dict[str, torch.Tensor]) -> dict[str, float]:
    """Moves all metrics off the device in one copy."""
    stacked = torch.stack([number.detach().double() for number in metrics.values()])
    return dict(zip(metrics, stacked.tolist(), strict=True))
