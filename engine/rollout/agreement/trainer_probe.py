"""The trainer's side of a check of its samplers: what its weights give a row."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.models.rank_model import RankModel
from rolemesh.engine.models.scoring import compute_logprobs
from rolemesh.engine.parallel.agreement import gather_facts
from rolemesh.engine.rollout.agreement.probe import (
    LONG_PROBE_EVERY,
    LONG_PROBE_TOKENS,
    PROBE_TOKENS,
    ProbeScores,
)


class TrainerProbe:
    """Scores a row by a trainer's weights, once for each version of them.

    Of the first version, and then of every tenth, more of the row.

    Owned by the compute thread; all ranks of the mesh make it and call it together.

    Example::

        probe = TrainerProbe(prompt_tokens)
        scores = probe.scores(policy, version=7)
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        """Takes the beginning of a row, e.g. of a prompt; at least two tokens."""
        self._tokens = tuple(tokens[:LONG_PROBE_TOKENS])
        self._num_scored = 0
        self._known: tuple[int, ProbeScores] | None = None

    def scores(self, policy: RankModel, *, version: int) -> ProbeScores:
        """Scores the row by the weights of the moment.

        Args:
            policy: Whose weights are handed over.
            version: Of them; the same one gives the same scores without a pass.
        """
        if self._known is None or self._known[0] != version:
            is_long = self._num_scored % LONG_PROBE_EVERY == 0
            tokens = self._tokens if is_long else self._tokens[:PROBE_TOKENS]
            scores = ProbeScores(tokens, self._scored(policy, tokens), policy.model.rounds_to)
            self._known = version, scores
            self._num_scored += 1
        return self._known[1]

    def start_over(self) -> None:
        """Forgets the scores: the weights have been replaced, whatever their version says."""
        self._known = None

    def _scored(self, policy: RankModel, row: Sequence[int]) -> tuple[float, ...]:
        tokens = torch.tensor(row)
        batch = Experience(
            {
                "tokens": Column.ragged(ColumnKind.SEQUENCE, [tokens], torch.int64),
                "prompt_lengths": Column(ColumnKind.ROW, torch.ones(1, dtype=torch.int64)),
            }
        )
        scored = compute_logprobs(policy, batch, temperature=1.0)
        # The last stages have them, and all of them the same.
        values = scored["logprobs"].values.tolist()
        facts = gather_facts(values, policy.mesh.world, policy.device)
        return tuple(next(filter(None, facts)))
