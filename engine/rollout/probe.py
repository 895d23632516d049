"""Whether a sampler computes with the weights that it was given: one row, scored by both sides.

After an update the trainer's log-probs of a short row are compared with the sampler's. A bound on
the difference alone would have to be as wide as the rounding of bfloat16, within which a stale
sampler stays for many steps. So the sampler's are also compared with those of earlier weights: a
sampler that is much nearer to them has not got the new ones. Faults of this kind that others have
had: the sampler serves the base while an adapter is trained, or weights of an update before.

The trainer's side is `trainer_probe.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from rolemesh.engine.parallel.agreement import gather_facts
from rolemesh.engine.parallel.mesh import RankGroup
from rolemesh.engine.rollout.base import RolloutBackend

PROBE_TOKENS = 16
"""Longest row. Its pass reads each weight once, which is all that it costs."""

FARTHEST = 1.0
"""Nats a token in the mean. Two programs that round to bfloat16 in their own ways are 0.03 apart
(SmolLM2-135M), and no pair that computes with the same weights is near this."""

NEAR_PART = 0.5
"""A sampler is taken to hold earlier weights if its distance to them is at most this part of that
to the new ones. With the new ones both distances are those of rounding, or the one to the earlier
weights is the larger."""

LEAST = 1e-4
"""Nats a token in the mean; distances below it are rounding of float32 (1e-5 at most, measured)."""


class SamplerStaleError(RuntimeError):
    """The sampler does not compute with the weights that it was given; says how far they are."""


@dataclass(frozen=True, slots=True)
class ProbeScores:
    """What a trainer gives a row, by the weights of the moment and by earlier ones."""

    tokens: tuple[int, ...]
    """Of the row, at least two."""
    logprobs: tuple[float, ...]
    """Natural log-probs of all tokens but the first, by the weights that are handed over."""
    earlier: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """The same by earlier weights, by what they are called, e.g. "the weights at first"."""

    def check(self, found: Sequence[float]) -> None:
        """Compares a sampler's log-probs of the row.

        Args:
            found: Natural log-probs of all tokens but the first, at temperature 1.

        Raises:
            SamplerStaleError: They are not those of the weights that were handed over.
        """
        distance = _distance(found, self.logprobs)
        for name, logprobs in self.earlier.items():
            earlier = _distance(found, logprobs)
            if distance > LEAST and earlier <= NEAR_PART * distance:
                raise SamplerStaleError(
                    f"the sampler's log-probs of a row of {len(self.tokens)} tokens are "
                    f"{earlier:.2g} nats a token from those of {name}, but {distance:.2g} from "
                    "those of the weights that it was given: it did not take them"
                )
        if not distance <= FARTHEST:
            raise SamplerStaleError(
                f"the sampler's log-probs of a row of {len(self.tokens)} tokens are "
                f"{distance:.2g} nats a token from the trainer's, where at most {FARTHEST:g} is "
                "rounding: it does not compute with the weights that it was given"
            )


def _distance(left: Sequence[float], right: Sequence[float]) -> float:
    """Mean absolute difference; NaN where one of them is."""
    pairs = zip(left, right, strict=True)
    return math.fsum(abs(one - other) for one, other in pairs) / len(left)


def check_sampler(
    backend: RolloutBackend, scores: ProbeScores | None, group: RankGroup, device: torch.device
) -> None:
    """Has a sampler score a row, and compares. All ranks of the group call it together.

    Args:
        backend: The sampler, which has just taken weights.
        scores: What those give the row; None: not known, and nothing is checked.
        group: The ranks of all samplers that took them.
        device: Where the group's messages lie.

    Raises:
        SamplerStaleError: The sampler of some rank does not compute with them. On all ranks.
    """
    if scores is None:
        return
    refusal = ""
    found = backend.score(scores.tokens)
    if found is not None:
        try:
            scores.check(found)
        except SamplerStaleError as error:
            refusal = str(error)
    refusals = gather_facts(refusal, group, device)
    if any(refusals):
        raise SamplerStaleError(refusal or next(filter(None, refusals)))
