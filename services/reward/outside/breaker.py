"""A replica of a reward, with a circuit breaker."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from rolemesh.engine.granted.circuit_breaker import CircuitBreaker
from rolemesh.services.reward.outside.base import Judgement, OutsideRewardError, RewardClient


class Replica:
    """One place that serves the reward."""

    def __init__(self, client: RewardClient, breaker: CircuitBreaker) -> None:
        self.client = client
        self.breaker = breaker
        self.in_flight = 0
        self.trial: asyncio.Task[Judgement] | None = None
        """The request that tries it again, while the breaker is open."""
        self.last_error: OutsideRewardError | None = None

    def begin(self, request: Coroutine[Any, Any, Judgement]) -> asyncio.Task[Judgement]:
        """Sends a request. It counts as busy from now on, not only when the task begins to run."""
        self.in_flight += 1
        is_trial = self.breaker.begin()
        task = asyncio.create_task(request)

        def end(task: asyncio.Task[Judgement]) -> None:
            self.in_flight -= 1
            if is_trial:
                self.trial = None
                self.breaker.given_up()  # where it was cancelled; else the breaker knows

        if is_trial:
            self.trial = task
        task.add_done_callback(end)
        return task
