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
    """Scores a row by a trainer's weights, and remembers what earlier ones gave it.

    Owned by the compute thread; all ranks of the mesh make it and call it together.

    Example::

        probe = TrainerProbe(prompt_tokens)
        scores = probe.scores(policy, version=7)
        scores.check(backend.score(scores.tokens))
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        """Takes the beginning of a row, e.g. of a prompt; at least two tokens."""
        self._tokens = tuple(tokens[:PROBE_TOKENS])
        self._version = -1
        self._now: tuple[float, ...] = ()
        self._earlier: dict[str, tuple[float, ...]] = {}

    def scores(self, policy: RankModel, *, version: int) -> ProbeScores:
        """Scores the row by the weights of the moment.

        Args:
            policy: Whose weights are handed over.
            version: Of them; the same one gives the same scores without a pass.
        """
        if version != self._version or not self._now:
            self._note(policy)
            self._version = version
        return ProbeScores(self._tokens, self._now, dict(self._earlier))

    def start_over(self) -> None:
        """Forgets the scores: the weights have been replaced, whatever their version says."""
        self._now, self._earlier = (), {}

    def _note(self, policy: RankModel) -> None:
        if self._now:
            self._earlier.setdefault("the weights at first", self._now)
            self._earlier["the weights before"] = self._now
        elif policy.model.adapter_targets:
            self._earlier["the base without its adapter"] = self._scored(policy, of_base=True)
        self._now = self._scored(policy)

    def _scored(self, policy: RankModel, *, of_base: bool = False) -> tuple[float, ...]:
        tokens = torch.tensor(self._tokens)
        batch = Experience(
            {
                "tokens": Column.ragged(ColumnKind.SEQUENCE, [tokens], torch.int64),
                "prompt_lengths": Column(ColumnKind.ROW, torch.ones(1, dtype=torch.int64)),
            }
        )
        scored = compute_logprobs(policy, batch, temperature=1.0, without_adapter=of_base)
        # The last stages have them, and all of them the same.
        values = scored["logprobs"].values.tolist()
        facts = gather_facts(values, policy.mesh.world, policy.device)
        return tuple(next(filter(None, facts)))
