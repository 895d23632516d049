"""Losses and slow spells of simulated services, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What goes wrong in a simulated run. The same seed draws the same."""

    seed: int = 0
    losses: int = 0
    """Processes that end, each at a time of its own."""
    within_s: float = 0.0
    """Seconds from the begin in which they do."""
    stragglers: float = 0.0
    """Share of services that are slow, drawn anew for each step."""
    slow_by: float = 1.0
    """How many times as long a slow one takes."""

    def loss_times(self) -> list[float]:
        """When processes end, ascending, in virtual seconds."""
        generator = random.Random(f"{self.seed}/losses")
        return sorted(generator.random() * self.within_s for _ in range(self.losses))

    def victim(self, number: int, alive: Sequence[str]) -> str:
        """Whose process ends, of those that are there."""
        return random.Random(f"{self.seed}/victim/{number}").choice(alive)

    def factor(self, service: str, step: int) -> float:
        """By how much the calls of a service in a step take longer."""
        if not self.stragglers:
            return 1.0
        draw = random.Random(f"{self.seed}/slow/{service}/{step}").random()
        return self.slow_by if draw < self.stragglers else 1.0
