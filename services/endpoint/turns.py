"""Turns of a sampler between the calls of its run, on one rank or on all ranks of a service."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as TooLate
from contextlib import contextmanager
from typing import Protocol

from rolemesh.engine.rollout.base import RolloutBackend
from rolemesh.engine.rollout.endpoint.calls import EndpointCalls
from rolemesh.rpc.errors import RolemeshError
from rolemesh.services.runtime.calls.compute import ComputeThread
from rolemesh.services.runtime.ranks.face import Face
from rolemesh.v1 import endpoint_pb2

logger = logging.getLogger(__name__)

TELL_S = 30.0
"""How long the other ranks may take to hear that a turn is over."""


class Turns(Protocol):
    """The thread that computes, as an endpoint needs it."""

    async def run(self, fn: Callable[[], None]) -> None:
        """Runs a function between others, in the order in which they came."""

    def has_waiting(self) -> bool:
        """Whether another function waits for the one that runs; from any thread."""


class TurnsOfAll:
    """Turns that all ranks of a service take together, as rank 0 begins and ends them.

    A turn is one call of the face, so that collective operations have the same order on all ranks.
    Owner: the loop of the service, but for `run`, which may come from another loop.
    """

    def __init__(
        self,
        run_id: str,
        ranks: RankTurns,
        face: Face,
        compute: ComputeThread,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Begins.

        Args:
            run_id: Of the run.
            ranks: Those of rank 0.
            face: To the other ranks.
            compute: The thread of rank 0 that computes.
            loop: Of the service, which owns the face.
        """
        self._run_id = run_id
        self._ranks = ranks
        self._face = face
        self._compute = compute
        self._loop = loop

    async def run(self, fn: Callable[[], None]) -> None:
        """Runs a function on rank 0, while the other ranks sample what they are given.

        Raises:
            RolemeshError: The service gives the run up, or a rank cannot sample.
        """
        turn = asyncio.run_coroutine_threadsafe(self._everywhere(fn), self._loop)
        await asyncio.wrap_future(turn)

    async def _everywhere(self, fn: Callable[[], None]) -> None:
        async def own() -> endpoint_pb2.TakeTurnResponse:
            await self._compute.run(fn)
            return endpoint_pb2.TakeTurnResponse()

        await self._face.everywhere(endpoint_pb2.TakeTurnRequest(run_id=self._run_id), own)

    def has_waiting(self) -> bool:
        """See `Turns`."""
        return self._compute.has_waiting() or self._face.is_wanted


class RankTurns:
    """The turns of one rank among several. Owner: the compute thread, but for `end`.

    Invariant: turn n of one rank is turn n of all. Rank 0 ends it, and tells the others.

    Example: in turn 3 rank 0 plays agents within `turn()`, and the others are in `follow()`.
    When the block of rank 0 is left, ranks of other generation replicas hear `end(3)`.
    """

    def __init__(self, calls: EndpointCalls) -> None:
        """Begins before turn 1."""
        self.number = 0
        """Of the last turn that has begun."""
        self.calls = calls
        """That this rank samples."""
        self.tell_end: Callable[[int], None] | None = None
        """On rank 0, tells other generation replicas that a turn is over; None: there are none."""
        self._ended = 0

    def begin(self) -> int:
        """Counts a turn that begins, before anything of it may fail; returns its number."""
        self.number += 1
        return self.number

    @contextmanager
    def turn(self) -> Iterator[None]:
        """A turn of rank 0, which lasts as long as the block."""
        number = self.begin()
        try:
            yield
        finally:
            if self.tell_end is not None:
                self.tell_end(number)

    def follow(self, backend: RolloutBackend, number: int, *, anew: bool = False) -> None:
        """Samples what rank 0 gives this rank, until that ends the turn.

        Args:
            backend: That samples.
            number: Of the turn, as `begin` has given it.
            anew: See `RolloutBackend.serve`.
        """

        def goes_on() -> bool:
            self.calls.wait()
            return self._ended < number

        backend.serve(goes_on, anew=anew)

    def end(self, number: int) -> None:
        """Has `follow` return before its next step. From any thread."""
        self._ended = max(self._ended, number)
        self.calls.has_come.set()


def end_teller(run_id: str, face: Face, loop: asyncio.AbstractEventLoop) -> Callable[[int], None]:
    """What tells the other ranks, from rank 0's compute thread, that a turn is over."""

    def tell(number: int) -> None:
        request = endpoint_pb2.EndTurnRequest(run_id=run_id, turn=number)
        told = asyncio.run_coroutine_threadsafe(face.tell(request), loop)
        try:
            told.result(TELL_S)
        except (RolemeshError, TooLate) as error:
            # A rank that is gone shows as such in the call that the turn is part of.
            logger.warning("a rank has not heard that turn %d is over: %s", number, error)

    return tell
