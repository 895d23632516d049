"""Repeats of calls whose repeat is safe, with full jitter and a bound on the time that they take.

Every method of rolemesh is: it reads, sets a state, or carries a key under which a service gives
its first answer again. What is not repeated is a call whose deadline passed: the time it was given
is over.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from rolemesh.rpc.errors import RolemeshError, UnavailableError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how long a call is repeated whose peer does not answer.

    The pause before repeat n is drawn from 0 to min(longest_s, first_s * 2^n): callers that lost
    one peer together do not come back together.
    """

    budget_s: float = 60.0
    """Time from the first failure until the error is raised; 0: no repeat."""
    first_s: float = 0.2
    longest_s: float = 5.0
    sleep: Callable[[float], Awaitable[None]] = field(default=asyncio.sleep, repr=False)
    draw: Callable[[], float] = field(default=random.random, repr=False)
    """A number from 0 to 1."""
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)
    """Seconds."""

    def __post_init__(self) -> None:
        if self.budget_s < 0 or self.first_s <= 0 or self.longest_s < self.first_s:
            raise ValueError(
                f"budget_s={self.budget_s}, first_s={self.first_s}, longest_s={self.longest_s}: "
                "give budget_s >= 0 and 0 < first_s <= longest_s"
            )


class Retries:
    """The repeats of one call, or of one watch. Owner: one task."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._number = 0
        self._since: float | None = None

    def succeeded(self) -> None:
        """The call did what it is for: budget and pauses begin anew."""
        self._number, self._since = 0, None

    def is_back(self) -> None:
        """The peer answers again, to something else: the budget begins anew."""
        self._since = None

    async def pause(self, error: RolemeshError) -> None:
        """Waits before the next repeat; raises the error when the budget is used up."""
        policy = self._policy
        now = policy.clock()
        self._since = now if self._since is None else self._since
        # Past 2^32 the longest pause has been reached whatever the units are.
        longest = min(policy.longest_s, policy.first_s * 2 ** min(self._number, 32))
        pause_s = policy.draw() * longest
        if now + pause_s - self._since > policy.budget_s or policy.budget_s == 0:
            raise error
        logger.info("%s: again in %.1f s", error.message, pause_s)
        self._number += 1
        await policy.sleep(pause_s)


async def repeated(policy: RetryPolicy, call: Callable[[], Awaitable[Result]]) -> Result:
    """The result of a call, made anew while its peer does not answer.

    Args:
        policy: How often.
        call: Makes the call; each time with the same request, and so with the same key.

    Raises:
        RolemeshError: What the peer answered, or that it did not.
    """
    retries = Retries(policy)
    while True:
        try:
            return await call()
        except UnavailableError as error:
            if not error.retryable:
                raise
            await retries.pause(error)
