"""Promises of results, which clients fetch by long polling."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Coroutine, Hashable
from dataclasses import dataclass
from typing import Any

from rolemesh.coordinator.tinker.forms.forms import WireError
from rolemesh.coordinator.tinker.models.held_models import NoPlaceError
from rolemesh.rpc.errors import InvalidRequestError, PreconditionError, RolemeshError

logger = logging.getLogger(__name__)

POLL_S = 20.0
"""How long a poll is held. Clients give up after 45 s."""

KEPT_S = 600.0
"""How long a result is kept once it has been fetched, for a client that lost the answer."""

UNFETCHED_S = 3600.0
"""How long a result is kept that nobody has fetched."""

MOST_PENDING = 20_000
"""Promises of one server that have no result yet."""


class UnknownPromiseError(LookupError):
    """No such promise, or its result was fetched long ago."""


class TooManyError(RuntimeError):
    """There are too many promises without a result."""


@dataclass(slots=True, eq=False)
class _Promise:
    owner: str
    task: asyncio.Task[Any]
    made_at: float
    group: Hashable | None
    fetched_at: float | None = None


class _Group:
    """Promises that a client waits for together."""

    def __init__(self) -> None:
        self.ended: dict[int, str] = {}
        """Ids of those that have ended, by a number that counts on. Up to where the client has
        said that it knows of them they are dropped."""
        self.changed = asyncio.Event()
        """Set, and another one put here, when one has ended."""

    def add(self, number: int, promise_id: str) -> None:
        """Told that one has ended."""
        self.ended[number] = promise_id
        self.changed.set()
        self.changed = asyncio.Event()


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as a client gets it."""

    text: str
    category: str
    """"user" where the client can do something about it, else "server"."""


class Promises:
    """Work in progress, by the ids that clients have. Owner: the server's loop."""

    def __init__(self) -> None:
        self._promises: dict[str, _Promise] = {}
        self._by_call: dict[Hashable, str] = {}
        self._groups: dict[Hashable, _Group] = {}
        self._is_ending = asyncio.Event()
        self._numbers = itertools.count(1)
        """Of promises that have ended: of all groups, so that a group that was dropped and is there
        again counts on."""

    def make(
        self,
        owner: str,
        work: Coroutine[Any, Any, Any],
        call: Hashable | None = None,
        *,
        group: Hashable | None = None,
    ) -> str:
        """Begins work, and gives the id of its promise.

        Args:
            owner: Who may fetch it.
            work: What gives the result.
            call: Names the call: where it was made already, that promise's id comes back, and the
                work is dropped. None: each call is a new one.
            group: Of promises that `ended` tells of together, and that may be given up.

        Raises:
            TooManyError: No more is taken in now.
        """
        known = None if call is None else self._by_call.get((owner, call))
        if known is not None and known in self._promises:
            work.close()
            return known
        self._forget()
        if sum(not one.task.done() for one in self._promises.values()) >= MOST_PENDING:
            work.close()
            raise TooManyError(f"{MOST_PENDING} calls have no result yet: try again later")
        promise_id = secrets.token_hex(16)
        task = asyncio.create_task(work)
        promise = _Promise(owner, task, time.monotonic(), group)
        self._promises[promise_id] = promise
        if group is not None:
            waited_for = self._groups.setdefault((owner, group), _Group())
            task.add_done_callback(lambda _: waited_for.add(next(self._numbers), promise_id))
        if call is not None:
            self._by_call[owner, call] = promise_id
        return promise_id

    async def result(self, owner: str, promise_id: str, wait_s: float = POLL_S) -> Any:
        """The result, or a `Failure`; None where it is not there within wait_s.

        Raises:
            UnknownPromiseError: The owner has none of that id.
        """
        promise = self._owned(owner, promise_id)
        await self._wait(promise.task, wait_s)
        if not promise.task.done():
            return None
        promise.fetched_at = time.monotonic()
        if promise.task.cancelled():
            return Failure("it was given up, or the server ended, before it was made", "server")
        error = promise.task.exception()
        return promise.task.result() if error is None else failure_of(error)

    async def ended(
        self, owner: str, group: Hashable, after: int, wait_s: float = POLL_S
    ) -> tuple[list[tuple[str, bool]], int]:
        """Which promises of a group have ended since a client asked last.

        Args:
            owner: Who asks.
            group: As given to `make`.
            after: What came back last time, by which it says that it knows of those; 0: of none.
            wait_s: How long there is to be one.

        Returns:
            Ids, each with whether there is a result and no failure; and what to give as `after`.
        """
        known = self._groups.setdefault((owner, group), _Group())
        known.ended = {number: one for number, one in known.ended.items() if number > after}
        if not known.ended:
            changed = asyncio.ensure_future(known.changed.wait())
            try:
                await self._wait(changed, wait_s)
            finally:
                changed.cancel()
        found = dict(known.ended)
        told = [(one, not self._failed(one)) for one in found.values() if one in self._promises]
        return told, max(found, default=after)

    def give_up(self, owner: str, promise_id: str) -> None:
        """Ends work whose client does not want it any more; one that has ended stays as it is.

        Raises:
            UnknownPromiseError: The owner has none of that id.
            WireError: It must be made: later work counts on it.
        """
        promise = self._owned(owner, promise_id)
        if promise.group is None:
            raise WireError("request_id", promise_id, "samples alone can be given up")
        promise.task.cancel()

    def end_polls(self) -> None:
        """Has all polls return with what there is, now and from now on: the server ends."""
        self._is_ending.set()

    async def close(self) -> None:
        """Ends all work."""
        tasks = [one.task for one in self._promises.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait(self, future: asyncio.Future[Any], wait_s: float) -> None:
        """Returns when it is done, when time is up, or when the server ends."""
        ending = asyncio.ensure_future(self._is_ending.wait())
        try:
            await asyncio.wait(
                [future, ending], timeout=wait_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            ending.cancel()

    def _owned(self, owner: str, promise_id: str) -> _Promise:
        promise = self._promises.get(promise_id)
        if promise is None or promise.owner != owner:
            raise UnknownPromiseError(
                f"request_id {promise_id!r}: there is none: the server was started anew, or the "
                "result was there long ago"
            )
        return promise

    def _failed(self, promise_id: str) -> bool:
        task = self._promises[promise_id].task
        return task.cancelled() or task.exception() is not None

    def _forget(self) -> None:
        """Drops results that were fetched long ago, or that nobody wants."""
        now = time.monotonic()

        def is_old(one: _Promise) -> bool:
            if one.fetched_at is not None:
                return one.fetched_at < now - KEPT_S
            return one.task.done() and one.made_at < now - UNFETCHED_S

        self._promises = {key: one for key, one in self._promises.items() if not is_old(one)}
        self._by_call = {call: key for call, key in self._by_call.items() if key in self._promises}
        used = {(one.owner, one.group) for one in self._promises.values()}
        self._groups = {key: one for key, one in self._groups.items() if key in used}


def failure_of(error: BaseException) -> Failure:
    """What a client is told of an error of its work."""
    if isinstance(error, WireError | NoPlaceError | InvalidRequestError | PreconditionError):
        return Failure(str(error), "user")
    if not isinstance(error, RolemeshError):
        logger.error("work of a client failed", exc_info=error)
    return Failure(str(error) or type(error).__name__, "server")
