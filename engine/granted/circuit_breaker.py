"""A circuit breaker: a server that fails again and again has a pause."""

from __future__ import annotations

from collections.abc import Callable


class CircuitBreaker:
    """Says whether a server may be asked. Owner: one loop.

    Invariant: while it is open, the server is not asked. After the pause, one request at a time
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
        """Notes that the trial was cancelled, which says nothing of the server."""
        self._is_tried = False
