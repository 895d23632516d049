"""A teacher's say of the tokens that were sampled, as their advantages.

Shape letters: N packed completion tokens, M those of them with loss mask 1.
"""

from __future__ import annotations

import torch

from rolemesh.engine.algorithms.estimation import EstimatorInput, estimator_for
from rolemesh.engine.algorithms.ragged import decayed_sums
from rolemesh.engine.algorithms.token_rewards import (
    BatchTokens,
    advantage_metrics,
    read_rows,
    reward_metrics,
)
from rolemesh.engine.experience import Experience
from rolemesh.engine.specs import ReverseKlSpec
from rolemesh.engine.specs.columns import TEACHER_LOGPROBS, teacher_voices, weights_column


@estimator_for(ReverseKlSpec)
def reverse_kl_advantages(
    given: EstimatorInput, spec: ReverseKlSpec
) -> tuple[Experience, dict[str, float]]:
    """Minus the KL of each token to the teacher, as its spec says.

    The metrics kl/teacher and kl/teacher_per_row are the k1 estimate over unmasked tokens and rows,
    with the log-probs of the sampler.
    """
    tokens, experience = BatchTokens.of(given.experience), given.experience
    teacher_N = _of_teachers(experience, tokens, spec.teachers)
    gap_N = teacher_N - tokens.read(experience, "logprobs")
    advantages_N = spec.coefficient * gap_N
    if spec.gamma > 0:
        # A masked token passes on what follows it, undiminished: it is no step of the policy.
        sums_M = decayed_sums(advantages_N[tokens.mask_N], tokens.counts_B, spec.gamma)
        advantages_N = torch.zeros_like(advantages_N)
        advantages_N[tokens.mask_N] = sums_M
    kl = -float(gap_N.sum())
    metrics = {
        "kl/teacher": kl / max(tokens.num_unmasked, 1),
        "kl/teacher_per_row": kl / max(tokens.num_rows, 1),
        **advantage_metrics(advantages_N, tokens.mask_N),
    }
    if "rewards" in experience:
        metrics |= reward_metrics(read_rows(experience, "rewards", tokens), tokens)
    return Experience({"advantages": tokens.column(advantages_N)}), metrics


def _of_teachers(experience: Experience, tokens: BatchTokens, number: int) -> torch.Tensor:
    """float64 [N], the teacher's log-probs; of several teachers of a row the mean by weight."""
    if number == 1:
        return tokens.read(experience, TEACHER_LOGPROBS)
    voices_N = [
        tokens.to_each_token(read_rows(experience, weights_column(name), tokens))
        * tokens.read(experience, name)
        for name in teacher_voices(number)
    ]
    return torch.stack(voices_N).sum(0)
