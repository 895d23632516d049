"""Counters of outside rewards: scalars of one judgement, and totals for Prometheus."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


class RequestObserver(Protocol):
    """Observer of requests that have ended."""

    def reward_request(self, name: str, outcome: str, seconds: float) -> None:
        """A request of the reward `name` ended.

        Args:
            name: Name of the reward.
            outcome: "ok", or the class of the error.
            seconds: Duration of the request.
        """


@dataclass(slots=True)
class RequestCounts:
    """Counts of one judgement. Owner: the loop."""

    seconds: list[float] = field(default_factory=list)
    """Duration of each answered request."""
    errors: int = 0
    """Requests that were not answered, or answered wrongly."""
    retries: int = 0
    hedged: int = 0
    cache_hits: int = 0
    waiting: int = 0
    """Requests that wait for a free place now."""
    queue_peak: int = 0
    """Largest number of waiting requests so far."""

    def enter_queue(self) -> None:
        """A request begins to wait."""
        self.waiting += 1
        self.queue_peak = max(self.queue_peak, self.waiting)

    def metrics(self) -> dict[str, float]:
        """The counts as scalars; latencies only if a request was answered."""
        latencies = (
            {
                "latency_p50_seconds": quantile(self.seconds, 0.5),
                "latency_p99_seconds": quantile(self.seconds, 0.99),
            }
            if self.seconds
            else {}
        )
        return {
            **latencies,
            "errors": float(self.errors),
            "retries": float(self.retries),
            "hedged": float(self.hedged),
            "cache_hits": float(self.cache_hits),
            "queue_peak": float(self.queue_peak),
        }


def quantile(numbers: Sequence[float], share: float) -> float:
    """The smallest of the numbers for which at least this share of all numbers is not larger."""
    ordered = sorted(numbers)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
