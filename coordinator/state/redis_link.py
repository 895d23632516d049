"""A connection to a Redis server that may go away and come back: commands are repeated."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ExternalAuthProviderError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from rolemesh.coordinator.state.errors import StoreRefusedError, StoreUnavailableError
from rolemesh.engine.specs.urls import masked_url

OUTAGE_S = 60.0
"""How long a command is repeated while the server does not answer."""

COMMAND_TIMEOUT_S = 10.0
"""Longest wait for an answer, and for a free connection."""

_CONNECT_TIMEOUT_S = 5.0
_MAX_CONNECTIONS = 16
"""Calls of hundreds of services may end at once; their entries then wait for a connection."""

_FIRST_WAIT_S = 0.05
_LONGEST_WAIT_S = 2.0

# The client makes connection errors of these, too. They are refusals, which no repeat changes.
_REFUSALS = (AuthenticationError, AuthorizationError, ExternalAuthProviderError, ResponseError)
# A server that is loading its data answers with BusyLoadingError, which is a connection error.
_OUTAGES = (RedisConnectionError, RedisTimeoutError, OSError)


class RedisLink:
    """Sends commands, and repeats those whose connection fails until a bound on time has passed.

    A command whose answer was lost may have had its effect, so it is repeated as it is: every
    command that goes through here must be safe to repeat.

    Invariant: while the server is away, commands wait in the order in which they came, and reach
    it in that order when it is back.

    Owner: one asyncio loop.
    """

    def __init__(
        self,
        url: str,
        *,
        password: str | None = None,
        client: redis.asyncio.Redis | None = None,
        outage_s: float = OUTAGE_S,
    ) -> None:
        """Prepares; nothing is sent before the first command.

        Args:
            url: URL of the server.
            password: Of its user; None: it asks for none.
            client: A client to use instead of one made from the URL (for tests).
            outage_s: How long a command is repeated, in seconds. Before the server has answered
                for the first time, nothing is repeated: its URL is more likely wrong.

        Raises:
            ValueError: The URL cannot be read.
        """
        self.outage_s = outage_s
        self._url = url
        self._client = client or _client(url, password)
        self._has_answered = False
        self._last_failure: BaseException = ConnectionError("no answer yet")
        self._turn = asyncio.Lock()
        self._num_waiting = 0

    async def ping(self) -> None:
        """Returns when the server answers. It is asked once only."""
        try:
            await self._once(lambda: self._client.execute_command("PING"))  # type: ignore[no-untyped-call]
        except _OUTAGES as error:
            raise StoreUnavailableError(self._url, error) from error

    async def close(self) -> None:
        """Closes the connections."""
        try:
            await self._client.aclose()
        except _OUTAGES as error:
            raise StoreUnavailableError(self._url, error) from error

    async def command(self, *arguments: Any) -> Any:
        """Sends a command that may be repeated, and returns its answer.

        Raises:
            StoreRefusedError: The server refuses it.
            StoreUnavailableError: The server has not answered for `outage_s` seconds.
        """
        return await self._sent(lambda: self._client.execute_command(*arguments))  # type: ignore[no-untyped-call]

    async def script(self, script: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        """Runs a script that may be repeated; raises as `command` does."""
        return await self._sent(lambda: self._client.eval(script, len(keys), *keys, *arguments))

    async def _sent(self, make: Callable[[], Awaitable[Any]]) -> Any:
        if self._num_waiting == 0:
            try:
                return await self._once(make)
            except _OUTAGES as error:
                if not self._has_answered:
                    raise StoreUnavailableError(self._url, error) from error
                self._last_failure = error
        began = asyncio.get_running_loop().time()
        self._num_waiting += 1
        try:
            async with self._turn_before(began + self.outage_s):
                return await self._repeated(make, began)
        finally:
            self._num_waiting -= 1

    @asynccontextmanager
    async def _turn_before(self, deadline: float) -> AsyncIterator[None]:
        """Waits for the commands that came before."""
        try:
            async with asyncio.timeout_at(deadline):
                await self._turn.acquire()
        except TimeoutError as late:
            raise StoreUnavailableError(self._url, self._last_failure, self.outage_s) from late
        try:
            yield
        finally:
            self._turn.release()

    async def _repeated(self, make: Callable[[], Awaitable[Any]], began: float) -> Any:
        loop = asyncio.get_running_loop()
        longest_s = _FIRST_WAIT_S
        while True:
            try:
                return await self._once(make)
            except _OUTAGES as error:
                self._last_failure = error
                tried_s = loop.time() - began
                if tried_s >= self.outage_s:
                    raise StoreUnavailableError(self._url, error, tried_s) from error
            # Full jitter: coordinators that share a server do not come back in step.
            await asyncio.sleep(min(random.uniform(0, longest_s), self.outage_s - tried_s))
            longest_s = min(2 * longest_s, _LONGEST_WAIT_S)

    async def _once(self, make: Callable[[], Awaitable[Any]]) -> Any:
        """Awaits a command in such a way that the caller can always be cancelled.

        The client writes through asyncio.wait_for. Before Python 3.12 this loses a cancellation
        that comes just as the write ends (CPython issue 86296), and a run that waited for a
        cancelled watcher never ended. The command itself is finished in the background.
        """
        task = asyncio.ensure_future(make())
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            answer = await asyncio.shield(task)
        except _REFUSALS as error:
            self._has_answered = True
            raise StoreRefusedError(self._url, error) from error
        except RedisConnectionError as error:
            # As which the client raises whatever a server refuses while a socket is opened.
            cause = error.__cause__
            if not isinstance(cause, _REFUSALS):
                raise
            self._has_answered = True
            raise StoreRefusedError(self._url, cause) from cause
        self._has_answered = True
        return answer


def _client(url: str, password: str | None) -> redis.asyncio.Redis:
    try:
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            url,
            password=password,
            max_connections=_MAX_CONNECTIONS,
            # Seconds that a command waits for a connection.
            timeout=COMMAND_TIMEOUT_S,
            # RESP2: the answers of stream commands have another shape in RESP3.
            protocol=2,
            socket_connect_timeout=_CONNECT_TIMEOUT_S,
            socket_timeout=COMMAND_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
        )
        return redis.asyncio.Redis.from_pool(pool)
    except ValueError as error:
        shown = masked_url(url)
        # The cause may contain a part of the password, so it is not chained.
        cause = f" ({error})" if shown == url else ""
        raise ValueError(
            f"store.url is {shown!r}, which cannot be read{cause}: give host, port and number, "
            "e.g. redis://127.0.0.1:6379/0"
        ) from None
