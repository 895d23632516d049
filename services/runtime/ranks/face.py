"""The face of a service of several ranks: rank 0 passes a call on to all, and joins the answers.

Every rank gets the same message and finds its own rows by itself, so the face holds no data of the
others. The face passes on one call at a time, so that collective operations have the same order on
all ranks.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from google.protobuf import message_factory
from google.protobuf.message import Message

from rolemesh.rpc.channel import MeshChannel, current_call, new_request_id, serving_call
from rolemesh.rpc.errors import (
    CallCancelledError,
    InternalError,
    RolemeshError,
    UnavailableError,
)
from rolemesh.rpc.experience.references import join_parts, merge_parts
from rolemesh.rpc.policy import rolemesh_methods
from rolemesh.rpc.together import together
from rolemesh.services.runtime.server.errors import FAILED_RANK
from rolemesh.v1 import experience_pb2, worker_pb2

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer", bound=Message)

EVENTS_AHEAD = ("block",)
"""Fields of a response with events that come before the result."""

SETTLE_S = 10.0
"""Time for the other ranks to end a call that one rank has failed. A rank that waits for the failed
one inside a collective operation never ends it."""

LEAVE_S = 10.0
"""Longest wait for a rank without work to confirm that it ends."""

GIVEN_UP = "SERVICE_DRAINING"
"""Reason of work that was given up."""


class Face:
    """Calls of rank 0 to the other ranks of its service. Owner: the loop.

    Invariant: the ranks have at most one call at a time. If ranks end a call differently, their
    states no longer fit together: `on_divergence` is called, and nothing may be computed then.

    Example: with 4 ranks, `await face.everywhere(request, work)` returns 4 answers of the type that
    `work` returns, rank 0's own first.
    """

    def __init__(
        self,
        role: str,
        peers: Sequence[MeshChannel],
        on_divergence: Callable[[str], None],
    ) -> None:
        """Prepares.

        Args:
            role: Role of the service.
            peers: Channels to ranks 1, 2, ...
            on_divergence: Called with the reason why the ranks can no longer work together.
        """
        self._role = role
        self._peers = tuple(peers)
        self._on_divergence = on_divergence
        self._turn = asyncio.Lock()
        self._num_asking = 0
        self._divergence = ""

    def channel(self, rank: int) -> MeshChannel:
        """The channel to one of the other ranks."""
        return self._peers[rank - 1]

    @property
    def is_wanted(self) -> bool:
        """Whether something waits for the ranks while they have a call; from any thread."""
        return self._num_asking > 0

    @contextmanager
    def _asking(self) -> Iterator[None]:
        self._num_asking += 1
        try:
            yield
        finally:
            self._num_asking -= 1

    async def everywhere(
        self,
        request: Message,
        work: Callable[[], Awaitable[Answer]],
        on_event: Callable[[Message], None] | None = None,
    ) -> list[Answer]:
        """Makes every rank do the work of a request.

        The work goes on when the caller's deadline has passed. Otherwise each rank would end at
        another moment, and their states would no longer fit together.

        Args:
            request: Request, which is passed on unchanged.
            work: Work of this rank.
            on_event: Called with events that other ranks send before their answers; an error of it
                fails the call.

        Returns:
            The answers by rank.

        Raises:
            RolemeshError: Error of the first rank that failed; that of a peer names the rank,
                unless this rank fails alike.
            UnavailableError: RANKS_DIVERGED: the ranks have diverged in an earlier call.
        """
        with self._asking():
            await self._turn.acquire()
        try:
            self._check_fit()
            with _without_deadline():
                works = (work(), *self._asks(request, on_event))
                tasks = [asyncio.ensure_future(one) for one in works]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
                failures = _failures(tasks)
                if not failures:
                    return [task.result() for task in tasks]
                cause = next(iter(failures.values()))
                if not any(_is_gone(error) for error in failures.values()):
                    await self._settle(tasks)
                own = _failures(tasks).get(0)
                if own is not None and str(cause).endswith(f": {own}"):
                    # What this rank says as well is said of the service, whichever was first.
                    cause = own
                # A lost rank explains the errors of the others.
                gone = [error for error in _failures(tasks).values() if _is_gone(error)]
                if gone:
                    cause = gone[0]
                    self._diverge(f"a rank is gone: {cause}")
                raise cause
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            self._turn.release()

    async def meanwhile(self, request: Message) -> list[Any]:
        """Makes every other rank do a request without collective operations, whose turn it is not.

        A call in progress keeps its turn until all ranks have ended it. What is to end it must
        reach the other ranks before that.

        Returns:
            The answers by rank.

        Raises:
            RolemeshError: Error of the first rank that failed; it names the rank.
            UnavailableError: RANKS_DIVERGED.
        """
        self._check_fit()
        try:
            with self._asking(), _without_deadline():
                return await together(self._asks(request))
        except RolemeshError as error:
            if _is_gone(error):
                self._diverge(f"a rank is gone: {error.message}")
            raise

    async def beside(self, request: Message) -> list[Any]:
        """Makes every other rank do a long request without collective operations, beside calls.

        Returns their answers by rank, or raises, once all of them have ended it.

        Raises:
            RolemeshError: Error of the first rank that failed; it names the rank.
            UnavailableError: RANKS_DIVERGED.
        """
        self._check_fit()
        with self._asking(), _without_deadline():
            ends = await asyncio.gather(*self._asks(request), return_exceptions=True)
        failures = [end for end in ends if isinstance(end, BaseException)]
        for error in failures:
            if _is_gone(error):
                self._diverge(f"a rank is gone: {error}")
        if failures:
            raise failures[0]
        return ends

    async def tell(self, request: Message, timeout_s: float | None = None) -> list[Any]:
        """Makes an unkeyed, unary request to every other rank; returns the answers by rank.

        Args:
            request: Request, the same for each rank.
            timeout_s: Deadline in seconds; None takes that of the method.

        Raises:
            RolemeshError: Error of the first rank that failed; it names the rank.
        """
        return await asyncio.gather(*self._asks(request, timeout_s=timeout_s))

    async def give_back(self, run_id: str, epoch: int) -> None:
        """Makes every other rank give up its work and forget the run, as the face itself does.

        Args:
            run_id: Of the run; empty where none holds the service.
            epoch: The newest that has spoken for it.

        Raises:
            RolemeshError: A rank cannot, which is a divergence.
        """
        if not run_id:
            return
        try:
            with self._asking(), _without_deadline():
                await self.tell(worker_pb2.DrainRequest(run_id=run_id, fencing_epoch=epoch))
        except RolemeshError as error:
            self._diverge(f"a rank still holds the run: {error.message}")
            raise

    async def leave(self) -> bool:
        """Ends the processes of the other ranks. Returns False if one does not confirm it."""
        request = worker_pb2.DrainRequest(exit=True)
        asks = self._asks(request, timeout_s=LEAVE_S)
        ends = await asyncio.gather(*asks, return_exceptions=True)
        has_left = True
        for end in ends:
            if isinstance(end, RolemeshError) and _is_gone(end):
                # An engine may have told each rank to end; how it did, its agent knows.
                logger.info("a rank has ended already: %s", end.message)
            elif isinstance(end, RolemeshError):
                logger.warning("a rank does not end by itself: %s", end.message)
                has_left = False
            elif isinstance(end, BaseException):
                raise end
        return has_left

    def _check_fit(self) -> None:
        if self._divergence:
            raise UnavailableError(
                f"the ranks of the {self._role} no longer fit together ({self._divergence}), and "
                "the service ends: start the step again from the newest checkpoint",
                reason="RANKS_DIVERGED",
            )

    def _diverge(self, why: str) -> None:
        if not self._divergence:
            self._divergence = why
            self._on_divergence(why)

    async def _settle(self, tasks: Sequence[asyncio.Future[Any]]) -> None:
        """Waits for the ranks to end a call that one of them has failed."""
        _, running = await asyncio.wait(tasks, timeout=SETTLE_S)
        if running:
            stuck = [rank for rank, task in enumerate(tasks) if task in running]
            self._diverge(f"ranks {stuck} still wait for the rank that failed")
        elif len(failures := _failures(tasks)) < len(tasks) and not _is_given_up(failures):
            done = [rank for rank in range(len(tasks)) if rank not in failures]
            self._diverge(f"ranks {done} have done what another rank failed to do")

    def _asks(
        self,
        request: Message,
        on_event: Callable[[Message], None] | None = None,
        timeout_s: float | None = None,
    ) -> list[Coroutine[Any, Any, Any]]:
        """A request to each of the other ranks, none of which has begun."""
        return [
            self._ask(rank, channel, request, on_event, timeout_s)
            for rank, channel in enumerate(self._peers, start=1)
        ]

    async def _ask(
        self,
        rank: int,
        channel: MeshChannel,
        request: Message,
        on_event: Callable[[Message], None] | None,
        timeout_s: float | None,
    ) -> Any:
        path, response_type, is_stream = _method_of(request.DESCRIPTOR.full_name)
        method = (channel.unary_stream if is_stream else channel.unary_unary)(
            path,
            request_serializer=type(request).SerializeToString,
            response_deserializer=response_type.FromString,
        )
        result: Any = None
        try:
            if not is_stream:
                return await method(request, timeout=timeout_s)
            async for message in method(request, timeout=timeout_s):
                kind = message.WhichOneof("event")
                if kind in EVENTS_AHEAD:
                    if on_event is not None:
                        on_event(getattr(message, kind))
                elif kind != "progress":
                    result = getattr(message, kind)
        except RolemeshError as error:
            raise self._of_rank(rank, error) from error
        if result is None:
            raise InternalError(f"{self._role} rank {rank} ended the call without a result")
        return result

    def _of_rank(self, rank: int, error: RolemeshError) -> RolemeshError:
        who = f"{self._role} rank {rank}"
        # The message of an INTERNAL error names the rank already.
        message = error.message if error.message.startswith(who) else f"{who}: {error.message}"
        return type(error)(
            message,
            reason=error.reason,
            retryable=error.retryable,
            metadata={**error.metadata, FAILED_RANK: str(rank)},
            remote_traceback=error.remote_traceback,
        )


@contextmanager
def _without_deadline() -> Iterator[None]:
    """Calls and tasks that begin inside have the deadlines of their methods, not the caller's."""
    caller = current_call()
    request_id = new_request_id() if caller is None else caller.request_id
    with serving_call(request_id, math.inf):
        yield


def _failures(tasks: Sequence[asyncio.Future[Any]]) -> dict[int, BaseException]:
    """Errors of the tasks that have failed so far, by rank."""
    return {
        rank: error
        for rank, task in enumerate(tasks)
        if task.done() and (error := task.exception()) is not None
    }


def _is_given_up(failures: Mapping[int, BaseException]) -> bool:
    """Whether ranks failed because the work of all was given up, and one had ended already.

    What they hold is then dropped (Drain), or put back to a cut (Attach), on all ranks alike.
    """
    reasons = {getattr(error, "reason", "") for error in failures.values()}
    return GIVEN_UP in reasons and reasons <= {GIVEN_UP, "STALE_EPOCH"}


def _is_gone(error: BaseException) -> bool:
    """Whether a rank of this service no longer answers.

    An error with a role comes from a rank that answers, e.g. about another, unreachable service.
    A server that stops while a call arrives has gRPC cancel the call.
    """
    return (
        isinstance(error, UnavailableError | CallCancelledError)
        and FAILED_RANK in error.metadata
        and "role" not in error.metadata
    )


@functools.cache
def _method_of(request_name: str) -> tuple[str, type[Message], bool]:
    """Path, response type and kind of the method that takes a request."""
    for path, method in rolemesh_methods().items():
        if method.input_type.full_name == request_name:
            response_type = message_factory.GetMessageClass(method.output_type)
            return path, response_type, method.server_streaming
    raise ValueError(f"no method takes a {request_name}")


def join_answers(answers: Sequence[Answer]) -> Answer:
    """Joins the answers of all ranks into one.

    References to experience and reports are joined. Everything else comes from the first rank with
    an answer: ranks that work in step agree on it.
    """
    spoken = next((answer for answer in answers if answer.ByteSize()), answers[0])
    joined = type(spoken)()
    joined.CopyFrom(spoken)
    for descriptor in joined.DESCRIPTOR.fields:
        kind = descriptor.message_type
        if kind is None or descriptor.is_repeated:
            continue
        parts = [getattr(answer, descriptor.name) for answer in answers]
        if kind is experience_pb2.ExperienceRef.DESCRIPTOR:
            # A teacher among several may answer for some rows, or for none.
            join = merge_parts if getattr(joined, "is_part", False) else join_parts
            getattr(joined, descriptor.name).CopyFrom(join(parts))
        elif kind is experience_pb2.CallReport.DESCRIPTOR:
            getattr(joined, descriptor.name).CopyFrom(join_reports(parts))
    return joined


def join_reports(reports: Sequence[experience_pb2.CallReport]) -> experience_pb2.CallReport:
    """Joins reports: metrics and notes of rank 0, time of the slowest rank, all the rest.

    A rank whose output does not count reports no tokens.
    """
    joined = experience_pb2.CallReport(
        metrics=reports[0].metrics,
        num_tokens=sum(report.num_tokens for report in reports),
        notes=reports[0].notes,
    )
    slowest: dict[str, experience_pb2.PhaseTime] = {}
    for report in reports:
        for phase in report.phases:
            known = slowest.get(phase.phase, phase)
            slowest[phase.phase] = max(known, phase, key=lambda one: one.duration.ToNanoseconds())
        for transport, num_bytes in report.fetched_bytes.items():
            joined.fetched_bytes[transport] += num_bytes
        joined.memory.extend(report.memory)
    joined.phases.extend(slowest.values())
    return joined
