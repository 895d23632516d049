"""Whether a sampler computes with the weights that it was given: a row, scored by both sides.

After each update the trainer's log-probs of a short row are compared with the sampler's; after the
first, and then after every tenth, of a longer one, whose tokens reach more experts. Where both
compute in float32 with the same rounded weights, they have to be equal but for the order of sums.
Elsewhere the bound has to be as wide as the rounding of bfloat16, within which a stale sampler
stays for many steps. There it counts how both have moved: where the trainer's log-probs have and
the sampler's have not, it did not take the weights. Faults of this kind that others have had: the
sampler serves the base while an adapter is trained, or weights of an update before.

The trainer's side is `trainer_probe.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from rolemesh.engine.parallel.agreement import gather_facts
from rolemesh.engine.parallel.mesh import RankGroup
from rolemesh.engine.rollout.base import RolloutBackend

PROBE_TOKENS = 16
"""Of the row after most updates. Its pass reads each weight once, which is all that it costs."""

LONG_PROBE_TOKENS = 64
"""Of the row after the first update and every LONG_PROBE_EVERY-th. It begins as the short one."""

LONG_PROBE_EVERY = 10
"""On a CPU a long row takes both sides twice as long as a short one (SmolLM2-135M): a tenth more of
what all checks cost."""

FARTHEST = 0.5
"""Nats a token in the mean, where either side rounds activations to bfloat16. Two programs that do
so in their own ways are 0.03 apart in a prompt and 0.1 in random tokens (SmolLM2-135M; a random
Qwen3-MoE 0.12); with experts that vLLM had packed wrongly they were 0.8 apart."""

FARTHEST_EXACT = 1e-3
"""The same of two that round alike: 100 times what float32 sums in another order make (1e-5)."""

LEAST_MOVE = 1e-4
"""Nats a token in the mean, below which a trainer's move may be rounding of float32."""

_NAMED = 8
"""Weights that a message names."""

STILL = 0.1
"""A sampler that has moved by at most this part of what the trainer has is taken to stand still.
One that took the weights moves as far, give or take the rounding of both."""


class SamplerStaleError(RuntimeError):
    """The sampler does not compute with the weights that it was given; says how far they are."""


class WeightsNotFiniteError(RuntimeError):
    """The trainer's own log-probs are not finite, so that nothing can be sampled."""


@dataclass(frozen=True, slots=True)
class ProbeScores:
    """What a trainer's weights give a row."""

    tokens: tuple[int, ...]
    """Of the row, at least two. Of two rows of a run the longer begins as the shorter."""
    logprobs: tuple[float, ...]
    """Natural log-probs, at temperature 1, of all tokens but the first."""
    rounds_to: str = ""
    """Type to which weights were rounded, with all else in float32; empty where more is rounded."""

    def up_to(self, num_tokens: int) -> ProbeScores:
        """Those of the row's beginning: log-probs do not depend on later tokens."""
        if len(self.tokens) <= num_tokens:
            return self
        return replace(
            self, tokens=self.tokens[:num_tokens], logprobs=self.logprobs[: num_tokens - 1]
        )


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
            scores: Of the weights that the sampler was given; each time of the same row, or of its
                beginning.
            found: What the sampler gives all tokens but the first.
            rounds_to: As `ProbeScores.rounds_to`, of the sampler.
            engine: Which of several it is, for messages.

        Raises:
            SamplerStaleError: It does not compute with those weights.
            WeightsNotFiniteError: No sampler could.
        """
        if not all(map(math.isfinite, scores.logprobs)):
            raise WeightsNotFiniteError(
                "the log-probs of the trainer's weights are not finite, so nothing can be sampled: "
                "go back to weights that were saved, and take a smaller learning rate"
            )
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
    """Mean absolute difference over what both have; NaN where one of them is."""
    pairs = list(zip(left, right, strict=False))
    return math.fsum(abs(one - other) for one, other in pairs) / len(pairs)


def check_sampler(
    backend: RolloutBackend,
    check: SamplerCheck,
    scores: ProbeScores | None,
    group: RankGroup,
    device: torch.device,
    weights: Callable[[], Iterable[tuple[str, torch.Tensor]]] | None = None,
) -> None:
    """Has a sampler score a row, and compares. All ranks of the group call it together.

    Args:
        backend: The sampler, which has just taken weights.
        check: Of this sampler.
        scores: What those weights give the row; None: not known, and nothing is checked.
        group: The ranks of all samplers that took them.
        device: Where the group's messages lie.
        weights: Gives the weights that the sampler took, whole and float32, by Hugging Face name,
            where this process has them: those that differ are named then.

    Raises:
        SamplerStaleError: The sampler of some rank does not compute with them, or could not be
            asked. On all ranks, but for those that could not ask.
    """
    if scores is None:
        return
    scores = scores.up_to(backend.longest_prompt)
    failure: Exception | None = None
    try:
        for engine, found in (backend.score_each(scores.tokens) or {}).items():
            check.compare(scores, found, rounds_to=backend.rounds_to, engine=engine)
    except SamplerStaleError as error:
        told = "" if weights is None else f"; {_of_weights(backend, weights())}"
        failure = SamplerStaleError(f"{error}{told}")
    except Exception as error:
        # Also what a sampler could not be asked: the other ranks wait for this one.
        failure = error
    refusals = gather_facts("" if failure is None else str(failure), group, device)
    if failure is not None:
        raise failure
    if any(refusals):
        raise SamplerStaleError(next(filter(None, refusals)))


def _of_weights(backend: RolloutBackend, weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Says which weights the sampler holds otherwise than they were sent."""
    try:
        differing, num_compared = backend.differing_weights(weights)
    except (RuntimeError, ValueError) as error:
        return f"which weights differ cannot be told: {error}"
    if not differing:
        return (
            f"all {num_compared} weights that can be compared are as they were sent, so that what "
            "is computed with them is wrong"
        )
    more = f" and {len(differing) - _NAMED} more" if len(differing) > _NAMED else ""
    names = ", ".join(map(repr, differing[:_NAMED]))
    return f"by their checksums {len(differing)} of {num_compared} weights differ: {names}{more}"
