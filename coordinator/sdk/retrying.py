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

from rolemesh.rpc.errors import DeadlineError, RolemeshError, UnavailableError

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
    first_contact_s: float = 5.0
    """The same for a coordinator that has not answered this client yet: its address may be wrong.
    At most budget_s counts."""
    first_s: float = 0.2
    longest_s: float = 5.0
    sleep: Callable[[float], Awaitable[None]] = field(default=asyncio.sleep, repr=False)
    draw: Callable[[], float] = field(default=random.random, repr=False)
    """A number from 0 to 1."""
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)
    """Seconds."""

    def __post_init__(self) -> None:
        is_timed = self.budget_s >= 0 and self.first_contact_s >= 0
        if not is_timed or self.first_s <= 0 or self.longest_s < self.first_s:
            raise ValueError(
                f"budget_s={self.budget_s}, first_contact_s={self.first_contact_s}, "
                f"first_s={self.first_s}, longest_s={self.longest_s}: give budget_s >= 0, "
                "first_contact_s >= 0 and 0 < first_s <= longest_s"
            )


class Contact:
    """Whether a peer has ever answered. Owner: the loop of its client."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.has_answered = False


class Retries:
    """The repeats of one call, or of one watch. Owner: one task."""

    def __init__(self, policy: RetryPolicy, contact: Contact | None = None) -> None:
        """Prepares.

        Args:
            policy: How often, and how long.
            contact: With the peer; None: its budget is the same whether it has answered or not.
        """
        self._policy = policy
        self._contact = contact
        self._number = 0
        self._since: float | None = None

    def succeeded(self) -> None:
        """The call did what it is for: budget and pauses begin anew."""
        self._number, self._since = 0, None
        if self._contact is not None:
            self._contact.has_answered = True

    def is_back(self) -> None:
        """The peer answers again, to something else: the budget begins anew."""
        self._since = None

    async def pause(self, error: RolemeshError) -> None:
        """Waits before the next repeat; raises the error when the budget is used up."""
        policy, contact = self._policy, self._contact
        is_unknown = contact is not None and not contact.has_answered
        budget_s = min(policy.budget_s, policy.first_contact_s) if is_unknown else policy.budget_s
        now = policy.clock()
        self._since = now if self._since is None else self._since
        # Past 2^32 the longest pause has been reached whatever the units are.
        longest = min(policy.longest_s, policy.first_s * 2 ** min(self._number, 32))
        pause_s = policy.draw() * longest
        if now + pause_s - self._since > budget_s or budget_s == 0:
            if contact is None or not is_unknown:
                raise error
            raise UnavailableError(
                f"{error.message}; nothing has answered at {contact.address} within {budget_s:g} "
                "s: look whether the address is right and a coordinator runs there, or give "
                "retry=RetryPolicy(first_contact_s=...) to wait longer for one that starts",
                metadata=error.metadata,
            ) from error
        if self._number == 0:
            # Programs without logging of their own see it too: what follows may be a minute.
            logger.warning("%s; it is asked again for up to %g s", error.message, budget_s)
        else:
            logger.info("%s: again in %.1f s", error.message, pause_s)
        self._number += 1
        await policy.sleep(pause_s)


async def repeated(
    policy: RetryPolicy,
    call: Callable[[], Awaitable[Result]],
    contact: Contact | None = None,
) -> Result:
    """The result of a call, made anew while its peer does not answer.

    Args:
        policy: How often.
        call: Makes the call; each time with the same request, and so with the same key.
        contact: With the peer; see Retries.

    Raises:
        RolemeshError: What the peer answered, or that it did not.
    """
    retries = Retries(policy, contact)
    while True:
        try:
            result = await call()
        except UnavailableError as error:
            if not error.retryable:
                raise
            await retries.pause(error)
        except RolemeshError as error:
            if not isinstance(error, DeadlineError):
                # A refusal is an answer.
                retries.succeeded()
            raise
        else:
            retries.succeeded()
            return result
