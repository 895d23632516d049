"""The servers of one rank: which is asked, which is left alone, and when a request is repeated."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

from rolemesh.engine.granted.circuit_breaker import CircuitBreaker
from rolemesh.engine.rollout.servers.client import (
    SamplersUnavailableError,
    ServerClient,
    ServerError,
    ServerRefusedError,
    ServerUnavailableError,
    WeightsLostError,
)
from rolemesh.engine.specs import ServersSpec

logger = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT")

BACKOFF_S = 0.25
"""Upper end of the first random wait; it doubles with every further one (full jitter)."""

LONGEST_BACKOFF_S = 5.0
"""Upper end of the longest one: a server that is back is asked again soon."""

LISTENING_S = 10.0
"""Longest wait at the start for all servers to listen, where some do."""

INTERNAL_ERROR = 500
MOST_FAULTS = 3
"""Errors within servers, after which a request is taken to be what makes them. vLLM gives one to
all that runs when its engine dies, and for log-probs that are NaN."""

_REMEDY = (
    "start them again at the same addresses, or correct urls; the run goes on when one of them is "
    "back, within deadline_s"
)


class Server:
    """One server, as this rank knows it."""

    def __init__(self, client: ServerClient, breaker: CircuitBreaker) -> None:
        self.client = client
        self.breaker = breaker
        self.in_flight = 0
        self.is_admitted = False
        """Whether it was found fit, and holds the weights, since it was unreachable last."""
        self.is_processed = True
        """Whether its log-probs are those of the distribution that it draws from."""
        self.name = ""
        """Of the model that it serves, without an adapter."""
        self.max_model_len: int | None = None
        """Of a teacher: most tokens that it takes; None: it does not say."""
        self.last_error: ServerError | None = None
        self.admission = asyncio.Lock()
        """One at a time."""

    @property
    def url(self) -> str:
        """Where it is."""
        return self.client.url


class Admission(Protocol):
    """What a server has to pass before it is asked for anything."""

    async def admit(self, server: Server) -> None:
        """Checks a server, and brings it what it lacks.

        Raises:
            ServerError: It cannot be used, now or as it was started.
        """


class Fleet:
    """Servers that all serve the same weights. Owner: one loop.

    Invariant: a server is asked only after its admission, and again after it was unreachable: it
    may be another process by then. Each has at most max_num_seqs requests in flight.

    Example: of two servers one dies. Its requests fail, wait a little, and go to the other one; its
    breaker opens after some failures, and from then on one request at a time looks whether it is
    back. That one has it admitted first, which brings it the newest weights.
    """

    def __init__(
        self,
        spec: ServersSpec,
        admission: Admission,
        *,
        field: str = "rollout",
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Prepares; opens no connection yet.

        Args:
            spec: Addresses and bounds.
            admission: What makes a server fit.
            field: Of the recipe that names the servers, for errors.
            clock: Returns seconds.
            sleep: Coroutine that waits between tries.

        Raises:
            ValueError: A URL cannot be used, or the token is not set.
        """
        self._spec = spec
        self._admission = admission
        self._field = field
        self._clock = clock
        self._sleep = sleep
        self._waiting: deque[asyncio.Future[None]] = deque()
        """Of requests that wait for a place, first come first."""
        self.servers = [
            Server(
                ServerClient(url, spec),
                CircuitBreaker(spec.breaker_failures, spec.breaker_pause_s, clock),
            )
            for url in spec.urls
        ]

    async def open(self) -> None:
        """Has the servers admitted: all that listen, and one at least.

        Raises:
            ServerError: One cannot be used as it was started.
            SamplersUnavailableError: None can be reached within deadline_s.
        """
        started = self._clock()
        while True:
            await self.on_each(_nothing)
            absent = [one for one in self.servers if not one.is_admitted]
            waited = self._clock() - started
            if not absent or (len(absent) < len(self.servers) and waited >= LISTENING_S):
                for server in absent:
                    logger.warning("goes on without %s: %s", server.url, server.last_error)
                return
            if waited >= self._spec.deadline_s:
                raise self.unavailable()
            await self._sleep(1.0)

    async def ask(self, work: Callable[[Server], Awaitable[AnswerT]]) -> AnswerT:
        """Has one server do something, and after a failure another one, or the same again.

        Args:
            work: Asks a server; begins anew when it is called again.

        Raises:
            SamplersUnavailableError: No server did it within deadline_s of the first failure.
            ServerError: One refused, or answered with nonsense.
        """
        failed: Server | None = None
        ends_at, num_failures, num_faults = 0.0, 0, 0
        while True:
            async with self._place(but=failed, ends_at=ends_at) as server:
                try:
                    await self._admitted(server)
                    answer = await work(server)
                except ServerUnavailableError as error:
                    self._note(server, error)
                    num_faults += error.status == INTERNAL_ERROR
                    if num_faults == MOST_FAULTS:
                        raise ServerRefusedError(
                            f"{error}; so it was {num_faults} times: look into the server's log",
                            status=INTERNAL_ERROR,
                            words=str(error),
                        ) from error
                except ServerError:
                    # An answer, even a wrong one, is a sign of life.
                    server.breaker.succeeded()
                    raise
                else:
                    server.breaker.succeeded()
                    return answer
            failed, num_failures = server, num_failures + 1
            ends_at = ends_at or self._clock() + self._spec.deadline_s
            wait_s = random.uniform(0, min(LONGEST_BACKOFF_S, BACKOFF_S * 2**num_failures))
            if self._clock() + wait_s >= ends_at:
                raise self.unavailable()
            await self._sleep(wait_s)

    async def on_some(self, work: Callable[[Server], Awaitable[AnswerT]]) -> dict[str, AnswerT]:
        """As `on_each`, but waits until one can be reached at least.

        Raises:
            SamplersUnavailableError: None could, within deadline_s.
        """
        ends_at = self._clock() + self._spec.deadline_s
        while not (found := await self.on_each(work)):
            if self._clock() >= ends_at:
                raise self.unavailable()
            await self._sleep(1.0)
        return found

    async def on_each(self, work: Callable[[Server], Awaitable[AnswerT]]) -> dict[str, AnswerT]:
        """Has every server do something, at the same time, beside what it does else.

        Args:
            work: Asks a server, which has been admitted.

        Returns:
            By URL, what those said that could be reached. The others are left out, and will be
            admitted anew.

        Raises:
            ServerError: One refused, or answered with nonsense.
        """

        async def one(server: Server) -> tuple[str, AnswerT] | None:
            try:
                await self._admitted(server)
                answer = await work(server)
            except ServerUnavailableError as error:
                self._note(server, error)
                return None
            server.breaker.succeeded()
            return server.url, answer

        tasks = [asyncio.ensure_future(one(server)) for server in self.servers]
        try:
            found = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self._wake(len(self._waiting))
        return dict(filter(None, found))

    def unavailable(self) -> SamplersUnavailableError:
        """The error where no server can be reached."""
        found = "; ".join(
            f"{one.url}: {one.last_error or 'its breaker is open'}" for one in self.servers
        )
        return SamplersUnavailableError(
            f"none of the {len(self.servers)} servers in {self._field}.urls does what it is asked "
            f"({found}): {_REMEDY}"
        )

    async def close(self) -> None:
        """Closes all connections."""
        for server in self.servers:
            await server.client.close()

    async def _admitted(self, server: Server) -> None:
        """Has a server admitted unless it is; several may ask for that at once."""
        if server.is_admitted:
            return
        async with server.admission:
            if not server.is_admitted:
                await self._admission.admit(server)
                server.is_admitted = True

    def _note(self, server: Server, error: ServerUnavailableError) -> None:
        if server.last_error is None or str(server.last_error) != str(error):
            logger.warning("%s; it will be asked again", error)
        server.last_error = error
        # Whatever listens there next may be another process, without our weights.
        server.is_admitted = False
        if isinstance(error, WeightsLostError):
            server.breaker.succeeded()
        else:
            server.breaker.failed()

    @asynccontextmanager
    async def _place(self, *, but: Server | None, ends_at: float) -> AsyncIterator[Server]:
        """A place at the least busy server, if possible another one than `but`.

        Raises:
            SamplersUnavailableError: There is none before `ends_at`, where that is not 0.
        """
        while (server := self._least_busy(but)) is None:
            if ends_at and self._clock() >= ends_at:
                raise self.unavailable()
            waits = [one.breaker.wait_s for one in self.servers if one.breaker.wait_s > 0]
            wake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(wake)
            try:
                await asyncio.wait([wake], timeout=min(waits, default=None))
            except asyncio.CancelledError:
                if wake.done():
                    self._wake(1)
                raise
            finally:
                if not wake.done():
                    self._waiting.remove(wake)
        server.in_flight += 1
        is_trial = server.breaker.begin()
        try:
            yield server
        finally:
            server.in_flight -= 1
            if is_trial:
                server.breaker.given_up()  # where it was cancelled; else the breaker knows
            # After a trial all that wait may have a place.
            self._wake(len(self._waiting) if is_trial else 1)

    def _least_busy(self, but: Server | None) -> Server | None:
        ready = [
            one
            for one in self.servers
            if one.breaker.wait_s == 0 and one.in_flight < self._spec.max_num_seqs
        ]
        ready = [one for one in ready if one is not but] or ready
        if not ready:
            return None
        # One that is due for a trial must get a request at some time, even if it is busy.
        return min(ready, key=lambda one: (not one.breaker.is_open, one.in_flight))

    def _wake(self, count: int) -> None:
        while count > 0 and self._waiting:
            wake = self._waiting.popleft()
            if not wake.done():
                wake.set_result(None)
                count -= 1


async def _nothing(_: Server) -> None:
    """What a server is asked that is only admitted."""
