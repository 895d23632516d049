"""Keyed calls: from a request with an operation key to its one answer, on one rank or on all."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Protocol, TypeAlias, TypeVar, cast

import grpc
from google.protobuf.message import Message

from rolemesh.rpc.errors import RolemeshError, UnavailableError
from rolemesh.rpc.experience.references import shards_of
from rolemesh.services.runtime.calls.call import Call
from rolemesh.services.runtime.calls.compute import RunCompute
from rolemesh.services.runtime.calls.hold import RunHold
from rolemesh.services.runtime.calls.role import Role
from rolemesh.services.runtime.calls.service_process import ServiceProcess
from rolemesh.services.runtime.experience.store import ExperienceStore
from rolemesh.services.runtime.ranks.device import rank_device
from rolemesh.services.runtime.ranks.face import join_answers
from rolemesh.services.runtime.server.operations import Operation, OperationLedger, Payload
from rolemesh.v1 import experience_pb2, operation_pb2, worker_pb2

logger = logging.getLogger(__name__)

PROGRESS_INTERVAL_S = 1.0
"""A call that works says so this often."""

TAKING_OVER = ("rolemesh.v1.Initialize", "rolemesh.v1.Attach")
"""Methods by which a coordinator begins to speak: what it gives besides the key is checked."""

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
"""What grpc.aio hands to a servicer."""


class KeyedRequest(Protocol):
    """A request with an operation key."""

    @property
    def key(self) -> operation_pb2.OperationKey:
        """The key."""


Finish: TypeAlias = Callable[[Any, Call], Awaitable[None]]
"""Completes a result in place."""

JoinEvents: TypeAlias = Callable[[Any], Message | None]
"""Is handed what ranks tell ahead of their answers, from any thread; returns what is whole."""

Response = TypeVar("Response", bound=Message)
Answer = TypeVar("Answer", bound=Message)


class KeyedCalls:
    """Serves calls that carry a key, each once however often it arrives. Owner: the loop.

    `Runtime` is one, and adds what the work of a call needs.
    """

    def __init__(
        self, role: Role, process: ServiceProcess, forget_role: Callable[[], None]
    ) -> None:
        """Prepares; `forget_role` frees what Initialize made, on the compute thread."""
        config = process.config
        self.role = role
        self.process = process
        self.compute = RunCompute(process.compute, has_own_generators=config.runs > 1)
        self.store = ExperienceStore(
            config.experience_capacity_bytes // config.runs,
            shared_memory=config.shared_memory,
            shared_memory_threshold_bytes=config.shared_memory_threshold_bytes,
            given_share=config.put_share,
        )
        self.ledger = OperationLedger()
        self.hold = RunHold(
            role, self.compute, self.store, self.ledger, forget_role, self._give_back_others
        )
        process.holds.append(self.hold)

    @functools.cached_property
    def measured_device(self) -> str:
        """Device whose memory calls report: this rank's GPU, or the process's own memory."""
        return str(rank_device())

    @property
    def is_face(self) -> bool:
        """Whether this rank speaks for the service."""
        return self.process.is_face

    def _check_ranks_have_met(self) -> None:
        """Raises UnavailableError (RANKS_STARTING) where the face cannot reach its ranks yet."""
        process = self.process
        if process.is_face and process.face is None and process.config.world_size > 1:
            raise UnavailableError(
                f"the {process.config.world_size} ranks of the {self.role.name} have not met yet: "
                "wait until the service is healthy, or see the log of the rank that does not come",
                reason="RANKS_STARTING",
            )

    async def tell_others(self, request: Message) -> list[Any]:
        """Makes an unkeyed, unary request to the other ranks of this service, if it has any.

        Returns their answers by rank; nothing on any rank but the face.
        """
        return [] if self.process.face is None else await self.process.face.tell(request)

    async def _give_back_others(self, run_id: str) -> None:
        if self.process.face is not None:
            await self.process.face.give_back(run_id, self.ledger.newest_epoch(run_id))

    async def attach_others(self, request: worker_pb2.AttachRequest) -> None:
        """Has the other ranks of this service attach, while calls in progress still need them."""
        if self.process.face is not None:
            await self.process.face.meanwhile(request)

    async def release_others(self, request: experience_pb2.ReleaseRequest) -> int:
        """Drops experience that the other ranks of this service hold. Returns bytes freed.

        Consumers know the service by its face alone, though they fetch from each rank.
        """
        return sum(answer.released_bytes for answer in await self.tell_others(request))

    async def keyed(
        self,
        request: KeyedRequest,
        response_type: type[Response],
        work: Callable[[Call], Awaitable[Message]],
        *,
        finish: Finish | None = None,
        join_events: Callable[[], JoinEvents] | None = None,
        on_all_ranks: bool = True,
        needs_initialized: bool = True,
        needs_awake: bool = True,
    ) -> AsyncIterator[Response]:
        """Serves a streaming keyed call: progress at most once a second, then the result.

        What the work tells with `Call.tell` goes out before the result, at once and in order, also
        to a caller that repeats the key later.

        Args:
            request: Carries the key.
            response_type: Has the fields `progress` and, for the work's message type, a result.
            work: Makes the result, or this rank's part of it; runs once however often the key is
                repeated.
            finish: Is handed the whole result, all ranks' parts joined, for what needs all of it.
            join_events: Makes, for one run of the work, what joins the events that ranks tell;
                asked only where there are several. None: The work tells nothing.
            on_all_ranks: Whether every rank of the service does its part of the work.
            needs_initialized: Whether the role must hold a run.
            needs_awake: Whether the role must be awake then.

        Raises:
            RolemeshError: Stale epoch, reused key, not initialized, asleep, draining; or what work
                raised.
        """
        operation = self._begin(
            request,
            self._spread(request, work, finish, join_events) if on_all_ranks else work,
            needs_initialized,
            needs_awake,
        )
        operation.num_listeners += 1
        try:
            async with aclosing(operation.told(PROGRESS_INTERVAL_S)) as told:
                async for event in told:
                    if event is None:
                        yield response_type(progress=operation.progress())
                    else:
                        yield _in_its_field(response_type, event)
            yield _in_its_field(response_type, await operation.task)
        finally:
            operation.num_listeners -= 1

    async def keyed_unary(
        self,
        request: KeyedRequest,
        work: Callable[[Call], Awaitable[Answer]],
        *,
        on_all_ranks: bool = True,
        needs_initialized: bool = True,
        needs_awake: bool = True,
        payload: Payload = b"",
    ) -> Answer:
        """Serves a unary keyed call: like keyed, without progress.

        `payload` are bytes that came beside the request: a repeat must bring the same ones.
        """
        operation = self._begin(
            request,
            self._spread(request, work, None) if on_all_ranks else work,
            needs_initialized,
            needs_awake,
            payload,
        )
        operation.num_listeners += 1
        try:
            # Shielded: the work goes on when this caller leaves.
            return cast(Answer, await asyncio.shield(operation.task))
        finally:
            operation.num_listeners -= 1

    def _spread(
        self,
        request: KeyedRequest,
        work: Callable[[Call], Awaitable[Message]],
        finish: Finish | None,
        join_events: Callable[[], JoinEvents] | None = None,
    ) -> Callable[[Call], Awaitable[Message]]:
        """The work of the whole service, made of the work of a rank."""

        async def spread(call: Call) -> Message:
            result = await self.on_all_ranks(request, work, call, join_events)
            if finish is not None and self.is_face:
                try:
                    await finish(result, call)
                except Exception:
                    await self._forget(request.key, result)
                    raise
            return result

        return spread

    async def _forget(self, key: operation_pb2.OperationKey, result: Message) -> None:
        """Drops the experience of a result that no caller will get, on all ranks."""
        ref = getattr(result, "experience", None)
        if not isinstance(ref, experience_pb2.ExperienceRef):
            return
        ids = [shard.experience_id for shard in shards_of(ref)]
        if not ids:
            return  # a release without ids is one of everything
        self.store.release_ids(key.run_id, ids)
        request = experience_pb2.ReleaseRequest(
            run_id=key.run_id, experience_ids=ids, fencing_epoch=key.fencing_epoch
        )
        try:
            await self.release_others(request)
        except RolemeshError as error:
            # What failed before is what the caller has to know; the step's release finds the rest.
            logger.warning("experience of a failed call is still held: %s", error.message)

    async def on_all_ranks(
        self,
        request: KeyedRequest,
        work: Callable[[Call], Awaitable[Answer]],
        call: Call,
        join_events: Callable[[], JoinEvents] | None = None,
    ) -> Answer:
        """Has every rank do its part of a request; returns the joined answer."""
        if self.process.face is None:
            return await work(call)
        message = cast(Message, request)
        if join_events is not None:
            call.join_events(join_events())
        return join_answers(
            await self.process.face.everywhere(message, lambda: work(call), call.tell)
        )

    def _begin(
        self,
        request: KeyedRequest,
        work: Callable[[Call], Awaitable[Message]],
        needs_initialized: bool,
        needs_awake: bool = True,
        payload: Payload = b"",
    ) -> Operation:
        message = cast(Message, request)
        method = message.DESCRIPTOR.full_name.removesuffix("Request")
        identity = self.ledger.check_epoch(request.key, may_leap=method in TAKING_OVER)
        self.hold.hear(request.key.run_id)
        # A face passes each call on once. That it does so again means that it works anew, and all
        # ranks must do the same collective operations.
        known = self.ledger.find(identity, method, message, payload) if self.is_face else None
        if known is not None:
            return known
        self.hold.check_accepts_work()
        self._check_ranks_have_met()
        if needs_initialized:
            self.hold.check_initialized(request.key.run_id)
            self.hold.heed(request.key.run_id, request.key.fencing_epoch)
            if needs_awake:
                self.hold.check_awake()
        elif not self.is_face or self.hold.may_take(request.key.run_id):
            self.ledger.heed(request.key.run_id, request.key.fencing_epoch)

        async def run(operation: Operation) -> Message:
            call = Call(
                operation, self.compute, rank=self.process.config.rank, device=self.measured_device
            )
            self.hold.calls[operation] = call
            try:
                return await work(call)
            except Exception as error:
                self.hold.work_failed(operation, error)
                raise
            finally:
                del self.hold.calls[operation]

        return self.ledger.start(identity, method, message, run, payload)


def _in_its_field(response_type: type[Response], result: Message) -> Response:
    for field in response_type.DESCRIPTOR.fields:
        if field.name != "progress" and field.message_type is result.DESCRIPTOR:
            return response_type(**{field.name: result})
    raise TypeError(
        f"{response_type.__name__} has no field for a {type(result).__name__}: return another type"
    )
