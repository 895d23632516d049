"""A teacher's say of the tokens that were sampled, as their advantages.

Shape letters: N packed completion tokens, M those of them with loss mask 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch

from rolemesh.engine.algorithms.estimators.estimation import EstimatorInput, estimator_for
from rolemesh.engine.algorithms.estimators.token_rewards import (
    BatchTokens,
    advantage_metrics,
    read_rows,
    reward_metrics,
)
from rolemesh.engine.algorithms.ragged import decayed_sums
from rolemesh.engine.experience import Experience
from rolemesh.engine.specs import ReverseKlSpec, TeacherRouteSpec, routed_value
from rolemesh.engine.specs.columns import teacher_voices, weights_column


@estimator_for(ReverseKlSpec)
def reverse_kl_advantages(
    given: EstimatorInput, spec: ReverseKlSpec
) -> tuple[Experience, dict[str, float]]:
    """Minus the KL of each token to the teacher, as its spec says.

    The metrics kl/teacher and kl/teacher_per_row are the k1 estimate over unmasked tokens and rows,
    with the log-probs of the sampler; kl/teacher/<name> is that to one of several teachers, over
    the tokens of its rows.
    """
    tokens, experience = BatchTokens.of(given.experience), given.experience
    voices = _Voices.of(experience, tokens, spec.route)
    teacher_N = voices.mean()
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
        **voices.metrics(tokens.read(experience, "logprobs")),
        **advantage_metrics(advantages_N, tokens.mask_N),
    }
    if "rewards" in experience:
        metrics |= reward_metrics(read_rows(experience, "rewards", tokens), tokens)
    return Experience({"advantages": tokens.column(advantages_N)}), metrics


class _Voices:
    """What the teachers of each row say of its tokens; most rows have one."""

    def __init__(
        self,
        tokens: BatchTokens,
        logprobs_VN: torch.Tensor,
        weights_VB: torch.Tensor,
        names: Sequence[Sequence[str]],
    ) -> None:
        self._tokens = tokens
        self._logprobs_VN = logprobs_VN
        self._weights_VB = weights_VB
        self._names = names

    @classmethod
    def of(
        cls, experience: Experience, tokens: BatchTokens, route: TeacherRouteSpec | None
    ) -> Self:
        """Reads the columns of the teachers, and who they are where there are several."""
        columns = teacher_voices(1 if route is None else route.most_teachers)
        logprobs_VN = torch.stack([tokens.read(experience, name) for name in columns])
        weights_VB = torch.ones(1, experience.num_rows, dtype=torch.float64)
        if len(columns) > 1:
            read = [read_rows(experience, weights_column(name), tokens) for name in columns]
            weights_VB = torch.stack(read)
        names: list[tuple[str, ...]] = []
        if route is not None:
            texts = [""] * experience.num_rows
            if route.field:
                texts = experience["metadata"].strings()
            values = (routed_value(text, route.field) if route.field else None for text in texts)
            names = [route.teachers_of(value) for value in values]
        return cls(tokens, logprobs_VN, weights_VB, names)

    def mean(self) -> torch.Tensor:
        """float64 [N], the log-probs of a row's teachers by their weights."""
        if len(self._logprobs_VN) == 1:
            return self._logprobs_VN[0]
        weights_VN = [self._tokens.to_each_token(weights_B) for weights_B in self._weights_VB]
        return (torch.stack(weights_VN) * self._logprobs_VN).sum(0)

    def metrics(self, sampled_N: torch.Tensor) -> dict[str, float]:
        """The KL to each of several teachers, a token of its rows, in nats."""
        found = {}
        for name in sorted({name for names in self._names for name in names}):
            total, num_tokens = 0.0, 0
            for voice, logprobs_N in enumerate(self._logprobs_VN):
                own_B = torch.tensor([names[voice : voice + 1] == (name,) for names in self._names])
                own_N = self._tokens.to_each_token(own_B)
                total += float((sampled_N - logprobs_N)[own_N].sum())
                num_tokens += int(own_N.sum())
            if num_tokens:
                found[f"kl/teacher/{name}"] = total / num_tokens
        return found
