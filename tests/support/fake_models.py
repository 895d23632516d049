"""One-number models: what the fake roles compute, as plain functions and as an oracle of a run.

The policy is one weight w, the critic one bias b. A completion of the policy is a number, w plus a
small offset that depends on prompt and sample; its reward is 1 - |1 - number|. Training moves w
towards 1 by a fixed stride and b by half the mean return.
"""

from __future__ import annotations

STRIDE = 0.125
"""How far one update moves the policy; a power of two, so that sums are exact."""
PROMPT_TOKENS = 4


def completion(weight: float, prompt: int, sample: int) -> float:
    """The number that the fake policy answers with; offsets are multiples of 1/64."""
    return weight + ((prompt * 3 + sample) % 5) / 64


def reward_of(number: float) -> float:
    """1 for the number 1, less the farther away."""
    return 1 - abs(1 - number)


def expected_weight(steps: int) -> float:
    """The policy's weight after so many updates, while every completion lies below 1."""
    return steps * STRIDE
