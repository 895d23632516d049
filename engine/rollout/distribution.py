"""The distribution that a token is drawn from: temperature, then top-k, then top-p.

Shape letters: B rows, V vocabulary.
"""

from __future__ import annotations

import torch

from rolemesh.engine.specs import SamplingSpec


def sampling_logprobs(logits_BV: torch.Tensor, sampling: SamplingSpec) -> torch.Tensor:
    """Log-probs after temperature, top-k and top-p.

    top-k keeps the k largest and all that equal the last of them. top-p then keeps the smallest
    set of likeliest tokens with a mass of at least top_p, at least one. A greedy row has the
    model's own distribution: nothing is cut.

    Args:
        logits_BV: Floating [B, V].
        sampling: How to draw.

    Returns:
        float32 [B, V], natural log; -inf where a token was cut.
    """
    logits_BV = logits_BV.float()
    if not sampling.greedy:
        logits_BV = logits_BV / sampling.temperature
        if 0 < sampling.top_k < logits_BV.shape[-1]:
            logits_BV = _keep_top_k(logits_BV, sampling.top_k)
        if sampling.top_p < 1.0:
            logits_BV = _keep_top_p(logits_BV, sampling.top_p)
    return logits_BV.log_softmax(dim=-1)


def _keep_top_k(logits_BV: torch.Tensor, top_k: int) -> torch.Tensor:
    least_B1 = logits_BV.topk(top_k, dim=-1).values[:, -1:]
    return logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)


def _keep_top_p(logits_BV: torch.Tensor, top_p: float) -> torch.Tensor:
    ascending_BV, order_BV = logits_BV.sort(dim=-1)
    # Mass of the token itself and of all less likely ones: cut while the rest still has top_p.
    tail_BV = ascending_BV.softmax(dim=-1).cumsum(dim=-1)
    cut_BV = tail_BV <= 1.0 - top_p
    cut_BV[:, -1] = False
    return logits_BV.masked_fill(torch.zeros_like(cut_BV).scatter(-1, order_BV, cut_BV), -torch.inf)
