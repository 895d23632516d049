"""A replica of a reward, and its circuit breaker: one that fails again and again has a pause."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from rolemesh.services.reward.outside.base import Judgement, OutsideRewardError, RewardClient


class CircuitBreaker:
    """Says whether a replica may be asked. Owner: one loop.

    Invariant: while it is open, the replica is not asked. After the pause, one request at a time
    tries it: a success closes the breaker, a failure opens it again.

    Example, with `failures=2` and `pause_s=10`: two failures in a row at 0 s open it; at 10 s one
    request may go; if that succeeds, all may.
    """

    def __init__(self, failures: int, pause_s: float, clock: Callable[[], float]) -> None:
        self._allowed = failures
        self._pause_s = pause_s
        self._clock = clock
        self._in_a_row = 0
        self._opened_at: float | None = None
        self._is_tried = False

    @property
    def is_open(self) -> bool:
        """Whether failures have opened it and no success has closed it."""
        return self._opened_at is not None

    @property
    def wait_s(self) -> float:
        """Seconds until a request may be sent; 0: now."""
        if self._opened_at is None:
            return 0.0
        if self._is_tried:
            return self._pause_s
        return max(0.0, self._opened_at + self._pause_s - self._clock())

    def begin(self) -> bool:
        """Notes that a request is sent when wait_s is 0; returns whether it is the trial."""
        self._is_tried = self.is_open
        return self._is_tried

    def succeeded(self) -> None:
        """Notes that a request was answered."""
        self._in_a_row, self._opened_at, self._is_tried = 0, None, False

    def failed(self) -> None:
        """Notes that a request was not answered."""
        self._in_a_row += 1
        if self._opened_at is not None or self._in_a_row >= self._allowed:
            self._opened_at, self._is_tried = self._clock(), False

    def given_up(self) -> None:
        """Notes that the trial was cancelled, which says nothing of the replica."""
        self._is_tried = False


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
