"""The trainer's side of a check of its samplers: what its weights give a row."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.models.rank_model import RankModel
from rolemesh.engine.models.scoring import compute_logprobs
from rolemesh.engine.parallel.agreement import gather_facts
from rolemesh.engine.rollout.probe import PROBE_TOKENS, ProbeScores


class TrainerProbe:
    """Scores a row by a trainer's weights, once for each version of them.

    Owned by the compute thread; all ranks of the mesh make it and call it together.

    Example::

        probe = TrainerProbe(prompt_tokens)
        scores = probe.scores(policy, version=7)
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        """Takes the beginning of a row, e.g. of a prompt; at least two tokens."""
        self._tokens = tuple(tokens[:PROBE_TOKENS])
        self._known: tuple[int, ProbeScores] | None = None

    def scores(self, policy: RankModel, *, version: int) -> ProbeScores:
        """Scores the row by the weights of the moment.

        Args:
            policy: Whose weights are handed over.
            version: Of them; the same one gives the same scores without a pass.
        """
        if self._known is None or self._known[0] != version:
            scores = ProbeScores(self._tokens, self._scored(policy), policy.model.rounds_to)
            self._known = version, scores
        return self._known[1]

    def start_over(self) -> None:
        """Forgets the scores: the weights have been replaced, whatever their version says."""
        self._known = None

    def _scored(self, policy: RankModel) -> tuple[float, ...]:
        tokens = torch.tensor(self._tokens)
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
