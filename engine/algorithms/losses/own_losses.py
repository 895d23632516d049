"""Policy losses of the user: a function gives the loss of each token, the rest is as for ours.

Shape letters: M unmasked completion tokens of the micro-batch.
"""

from __future__ import annotations

from typing import Any

import torch

from rolemesh.engine.algorithms.losses.base import loss_for
from rolemesh.engine.algorithms.losses.policy_losses import (
    OWN_METRICS,
    PolicyLoss,
    PolicyTokens,
    TokenLosses,
    ratios,
)
from rolemesh.engine.granted.own_functions import OwnFunction
from rolemesh.engine.specs import PythonPolicyLossSpec


@loss_for(PythonPolicyLossSpec)
class PythonPolicyLoss(PolicyLoss[PythonPolicyLossSpec]):
    """Calls `function(tokens, **config)` with the `PolicyTokens` of each micro-batch.

    It answers with the losses, floating [M] with a gradient, or with a mapping:

        losses   floating [M]
        ratio    floating [M], for the metrics ratio_mean and ratio_max; without it
                 exp(logprobs - old log-probs)
        metrics  by name, numbers or truths [M], reported as means over tokens

    M may be 0. It is called on all ranks that end a pipeline, for each of their micro-batches, and
    once for no tokens before each mini-batch.
    """

    def __init__(self, spec: PythonPolicyLossSpec, function: OwnFunction) -> None:
        """Takes the loaded function."""
        super().__init__(spec)
        self.needs_entropy = True  # the function may read it
        self.reads = spec.reads
        self.origin = f"; the loss is {function.name!r}{function.place}"
        self._function = function

    def token_losses(self, tokens: PolicyTokens) -> TokenLosses:
        """See the class; raises UserCodeError for an answer that cannot be used."""
        answer = self._function.fields(self._function(tokens), "losses", ("ratio", "metrics"))
        losses_M = self._checked(answer["losses"], "losses", tokens)
        if not losses_M.dtype.is_floating_point:
            raise self._function.wrong(f"losses of {losses_M.dtype}: give floating numbers")
        if not len(losses_M):
            # A gradient of zeros, whatever an empty answer hangs on.
            losses_M = tokens.logprobs_M
        elif tokens.logprobs_M.requires_grad and not losses_M.requires_grad:
            raise self._function.wrong(
                "losses without a gradient: compute them from tokens.logprobs_M, and not under "
                "torch.no_grad or by detach"
            )
        ratio_M = answer.get("ratio")
        if ratio_M is None:
            ratio_M = ratios(tokens.logprobs_M, tokens.old_M).detach()
        metrics = answer.get("metrics", {})
        taken = [name for name in metrics if name in OWN_METRICS or name.endswith("_max")]
        if taken:
            raise self._function.wrong(
                f"metrics called {', '.join(taken)}: these are ours, or end in _max; name means "
                "over tokens otherwise"
            )
        return TokenLosses(
            losses_M,
            self._checked(ratio_M, "ratio", tokens),
            {
                name: self._checked(each_M, f"the metric {name}", tokens)
                for name, each_M in metrics.items()
            },
        )

    def _checked(self, given: Any, what: str, tokens: PolicyTokens) -> torch.Tensor:
        like_M = tokens.logprobs_M
        wanted = (
            f"give a tensor [M] on {like_M.device}, one number for each sampled token (M was "
            f"{len(like_M)} in this call): do not sum or average"
        )
        if not isinstance(given, torch.Tensor):
            raise self._function.wrong(f"{what} as a {type(given).__name__}: {wanted}")
        if given.shape != like_M.shape or given.device != like_M.device:
            raise self._function.wrong(
                f"{what} of shape {list(given.shape)} on {given.device}: {wanted}"
            )
        return given
