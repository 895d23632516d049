"""Whether a sampler computes with the weights that it was given: one row, scored by both sides.

After an update the trainer's log-probs of a short row are compared with the sampler's. Where both
compute in float32 with the same rounded weights, they have to be equal but for the order of sums.
Elsewhere the bound has to be as wide as the rounding of bfloat16, within which a stale sampler
stays for many steps. There it counts how both have moved: where the trainer's log-probs have and
the sampler's have not, it did not take the weights. Faults of this kind that others have had: the
sampler serves the base while an adapter is trained, or weights of an update before.

The trainer's side is `trainer_probe.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rolemesh.engine.parallel.agreement import gather_facts
from rolemesh.engine.parallel.mesh import RankGroup
from rolemesh.engine.rollout.base import RolloutBackend

PROBE_TOKENS = 16
"""Longest row. Its pass reads each weight once, which is all that it costs."""

FARTHEST = 1.0
"""Nats a token in the mean. Two programs that round to bfloat16 in their own ways are 0.03 apart
(SmolLM2-135M), and no pair that computes with the same weights is near this."""

FARTHEST_EXACT = 1e-3
"""The same of two that round alike: 100 times what float32 sums in another order make (1e-5)."""

LEAST_MOVE = 1e-4
"""Nats a token in the mean, below which a trainer's move may be rounding of float32."""

STILL = 0.1
"""A sampler that has moved by at most this part of what the trainer has is taken to stand still.
One that took the weights moves as far, give or take the rounding of both."""


class SamplerStaleError(RuntimeError):
    """The sampler does not compute with the weights that it was given; says how far they are."""


@dataclass(frozen=True, slots=True)
class ProbeScores:
    """What a trainer's weights give a row."""

    tokens: tuple[int, ...]
    """Of the row, at least two."""
    logprobs: tuple[float, ...]
    """Natural log-probs, at temperature 1, of all tokens but the first."""
    rounds_to: str = ""
    """Type to which weights were rounded, with all else in float32; empty where more is rounded."""


class SamplerCheck:
    """Compares a sampler with its trainer, update by update. Owned by the sampler's compute thread.

    A sampler that differs by its rounding alone is never refused, however far the policy goes: it
    moves as the trainer does. Where it has several engines, each is compared for itself.

    Example::

        check = SamplerCheck()
        check.compare(scores, backend.score(scores.tokens), rounds_to=backend.rounds_to)
    """

    def __init__(self) -> None:
        self._passed: dict[str, list[tuple[Sequence[float], Sequence[float]]]] = {}
        """By engine, the trainer's and its log-probs, of the first and of the newest check."""

    def compare(
        self,
        scores: ProbeScores,
        found: Sequence[float],
        *,
        rounds_to: str,
        engine: str = "the sampler",
    ) -> None:
        """Compares, and remembers both sides.

        Args:
            scores: Of the weights that the sampler was given; each time of the same row.
            found: What the sampler gives all tokens but the first.
            rounds_to: As `ProbeScores.rounds_to`, of the sampler.
            engine: Which of several it is, for messages.

        Raises:
            SamplerStaleError: It does not compute with those weights.
        """
        told = f"{engine}'s log-probs of a row of {len(scores.tokens)} tokens"
        passed = self._passed.get(engine, [])
        for earlier, found_earlier in passed:
            moved, trained = _distance(found, found_earlier), _distance(scores.logprobs, earlier)
            if trained > LEAST_MOVE and moved <= STILL * trained:
                raise SamplerStaleError(
                    f"{told} have moved by {moved:.2g} nats a token since an earlier update, and "
                    f"the trainer's by {trained:.2g}: it did not take the weights that it was given"
                )
        is_exact = rounds_to != "" and rounds_to == scores.rounds_to
        farthest = FARTHEST_EXACT if is_exact else FARTHEST
        distance = _distance(found, scores.logprobs)
        if not distance <= farthest:
            raise SamplerStaleError(
                f"{told} are {distance:.2g} nats a token from the trainer's, where at most "
                f"{farthest:g} is rounding: it does not compute with the weights that it was given"
            )
        self._passed[engine] = [*passed[:1], (scores.logprobs, found)]


def _distance(left: Sequence[float], right: Sequence[float]) -> float:
    """Mean absolute difference; NaN where one of them is."""
    pairs = zip(left, right, strict=True)
    return math.fsum(abs(one - other) for one, other in pairs) / len(left)


def check_sampler(
    backend: RolloutBackend,
    check: SamplerCheck,
    scores: ProbeScores | None,
    group: RankGroup,
    device: torch.device,
) -> None:
    """Has a sampler score a row, and compares. All ranks of the group call it together.

    Args:
        backend: The sampler, which has just taken weights.
        check: Of this sampler.
        scores: What those weights give the row; None: not known, and nothing is checked.
        group: The ranks of all samplers that took them.
        device: Where the group's messages lie.

    Raises:
        SamplerStaleError: The sampler of some rank does not compute with them, or could not be
            asked. On all ranks, but for those that could not ask.
    """
    if scores is None:
        return
    failure: Exception | None = None
    try:
        for engine, found in (backend.score_each(scores.tokens) or {}).items():
            check.compare(scores, found, rounds_to=backend.rounds_to, engine=engine)
    except Exception as error:
        # Also what a sampler could not be asked: the other ranks wait for this one.
        failure = error
    refusals = gather_facts("" if failure is None else str(failure), group, device)
    if failure is not None:
        raise failure
    if any(refusals):
        raise SamplerStaleError(next(filter(None, refusals)))
