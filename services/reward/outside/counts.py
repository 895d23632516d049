"""Counters of outside rewards: scalars of one judgement, and totals for Prometheus."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rolemesh.services.reward.outside.base import OutsideRewardError


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

    @contextlib.asynccontextmanager
    async def place(self, places: asyncio.Semaphore) -> AsyncIterator[None]:
        """Waits until one more request may be in flight, which it is in the block."""
        self.waiting += 1
        self.queue_peak = max(self.queue_peak, self.waiting)
        try:
            await places.acquire()
        finally:
            self.waiting -= 1
        try:
            yield
        finally:
            places.release()

    @contextlib.contextmanager
    def request(self, name: str, observer: RequestObserver | None) -> Iterator[None]:
        """Counts the request that the block makes, unless it is cancelled.

        Args:
            name: Name of the reward.
            observer: Is told how the request ended.
        """
        started, outcome = time.monotonic(), "cancelled"
        try:
            yield
            outcome = "ok"
            self.seconds.append(time.monotonic() - started)
        except OutsideRewardError as error:
            outcome = type(error).__name__
            self.errors += 1
            raise
        finally:
            if outcome != "cancelled" and observer is not None:
                observer.reward_request(name, outcome, time.monotonic() - started)

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
