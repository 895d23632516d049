"""KL between policy and reference: estimators from samples, and control of its weight.

Shape letters: N completion tokens. Log-probs are natural logs of sampled tokens. With
x ~ policy and r = log reference(x) - log policy(x), the estimators of KL(policy || reference)
are those of http://joschu.net/blog/kl-approx.html:

    k1 = -r              unbiased, high variance, can be negative
    k2 = r^2 / 2         biased, low variance, never negative
    k3 = exp(r) - 1 - r  unbiased, low variance, never negative

k3 takes r as at most 20: beyond, its value is exp(20) - 21 = 4.9e8 and its gradient 0, where the
formula would overflow float32 at r = 89 and send infinity or NaN into every weight. The mean of
exp(r) over the policy's own samples is 1, so that by Markov's inequality at most exp(-20) = 2e-9
of them have such an r. Below there is no bound: towards r = -infinity k3 grows like -r only, and
its pull on a policy that is surer than the reference stays whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from rolemesh.engine.specs import FixedKlSpec, KlControllerSpec, KlForm

MAX_LOG_RATIO = 20.0
"""Bound of a log-ratio in an exponent: exp of a larger one overflows float32 before long."""

MAX_RELATIVE_ERROR = 0.2
"""Clip of the proportional error of the adaptive controller (arXiv 1909.08593, section 2.2)."""


def kl_penalty(
    logprobs_N: torch.Tensor, reference_logprobs_N: torch.Tensor, form: KlForm
) -> torch.Tensor:
    """Estimates the KL of each token, as a number to subtract from rewards or to report.

    Args:
        logprobs_N: float [N], log-probs of the policy.
        reference_logprobs_N: float [N], log-probs of the reference.
        form: The estimator.

    Returns:
        float [N]. Its gradient is the plain derivative of the formula: for a loss use `kl_loss`.

    Example: log-probs (-1, -2) against (-1.5, -2) give k1 = (0.5, 0) and k2 = (0.125, 0).
    """
    log_ratio_N = reference_logprobs_N - logprobs_N
    if form == "k1":
        return -log_ratio_N
    if form == "k2":
        return 0.5 * log_ratio_N.square()
    if form == "k3":
        # expm1 keeps its digits where policy and reference almost agree; exp(r) - 1 does not.
        bounded_N = log_ratio_N.clamp(max=MAX_LOG_RATIO)
        return torch.expm1(bounded_N) - bounded_N
    raise ValueError(f"kl_form is {form!r}: give k1, k2 or k3")


def kl_loss(
    logprobs_N: torch.Tensor, reference_logprobs_N: torch.Tensor, form: KlForm
) -> torch.Tensor:
    """Estimates the KL of each token, as a loss term whose gradient pulls to the reference.

    The value is that of `kl_penalty`. The gradient, in expectation over on-policy samples, is

        k2: grad KL(policy || reference), since d k2 = -r d log policy
        k3: grad KL(reference || policy), since d k3 = (1 - exp(r)) d log policy; as in GRPO
            (arXiv 2402.03300, eq. 4); 0 for r above 20
        k1: its own derivative, d log policy, has expectation 0 and carries no pull at all. The
            value of k1 is therefore given the gradient of k2.

    Args:
        logprobs_N: float [N], log-probs of the policy, with gradient.
        reference_logprobs_N: float [N], log-probs of the reference; no gradient reaches it.
        form: The estimator.

    Returns:
        float [N].
    """
    reference_logprobs_N = reference_logprobs_N.detach()
    if form != "k1":
        return kl_penalty(logprobs_N, reference_logprobs_N, form)
    value_N = kl_penalty(logprobs_N.detach(), reference_logprobs_N, "k1")
    carrier_N = kl_penalty(logprobs_N, reference_logprobs_N, "k2")
    return value_N + (carrier_N - carrier_N.detach())


class KlController:
    """Holds the weight of the KL term; part of the trainer's state.

    A fixed one never moves, and a resumed run takes it from its recipe. An adaptive one is the
    proportional controller of Ziegler et al. (arXiv 1909.08593, section 2.2):

        e    = clip(KL / target - 1, -0.2, 0.2)
        beta = beta * (1 + e * num_rows / horizon)

    The paper fixes the gain at 0.1 a step; num_rows / horizon keeps the speed per trajectory
    the same at any batch size.

    Owned by the compute thread. The order within a step is: read `coefficient`, penalise with
    it, then `update` once with the KL that was measured.

    Example: beta 0.1, target 6, horizon 100; 10 rows with KL 12 give e = 0.2 and beta 0.102.
    """

    def __init__(self, spec: KlControllerSpec) -> None:
        self.coefficient = spec.coefficient
        """Weight of the KL term now."""
        self._spec = spec

    def update(self, mean_kl_per_row: float, num_rows: int) -> None:
        """Raises an adaptive coefficient after a step with a KL above target, lowers it below.

        Args:
            mean_kl_per_row: KL summed over the tokens of a row, averaged over rows, in nats.
            num_rows: Rows that were averaged.
        """
        if not math.isfinite(mean_kl_per_row):
            raise ValueError(
                f"mean KL per row is {mean_kl_per_row}: check the log-probs of policy and reference"
            )
        if num_rows < 0:
            raise ValueError(f"num_rows is {num_rows}: give a count of rows, 0 or more")
        spec = self._spec
        if isinstance(spec, FixedKlSpec):
            return
        error = mean_kl_per_row / spec.target - 1
        error = min(max(error, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
        factor = 1 + error * num_rows / spec.horizon
        if factor <= 0:
            raise ValueError(
                f"horizon is {spec.horizon} with {num_rows} rows a step: the KL coefficient "
                f"would be multiplied by {factor:.3g}; raise horizon above {num_rows // 5}"
            )
        self.coefficient *= factor

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: the type, and a coefficient that moves."""
        moved = {} if isinstance(self._spec, FixedKlSpec) else {"coefficient": self.coefficient}
        return {"type": self._spec.type, **moved}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` gave; target and horizon stay those of the recipe.

        Raises:
            ValueError: The state does not fit.
        """
        keys = set(self.state_dict())
        if state.get("type") != self._spec.type or set(state) != keys:
            raise ValueError(
                f"state of the KL controller is {dict(state)}, but the recipe asks for "
                f"{self._spec.type!r}, with the keys {sorted(keys)}: resume with the recipe of the "
                "checkpoint"
            )
        if isinstance(self._spec, FixedKlSpec):
            return
        coefficient = float(state["coefficient"])
        if not (math.isfinite(coefficient) and coefficient > 0):
            raise ValueError(
                f"coefficient of the KL controller's state is {coefficient}: it must be positive "
                "and finite; take an older checkpoint"
            )
        self.coefficient = coefficient
