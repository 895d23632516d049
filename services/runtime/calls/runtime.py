"""Interface of the runtime for the servicers of every role: pull, publish, keyed."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar, cast

import grpc
import torch
from google.protobuf.message import Message

from rolemesh.engine.experience import Experience, payload_layout, read_payload
from rolemesh.engine.layout.ranks import HybridLayout
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.transfer_protocols import protocol
from rolemesh.engine.transport.shm import host_identity
from rolemesh.rpc.channel import ChannelTraffic, MeshChannel, open_channel
from rolemesh.rpc.errors import InvalidRequestError, RolemeshError
from rolemesh.rpc.payload import layout_without_rows, schemas_of
from rolemesh.rpc.pull import all_or_first_error
from rolemesh.rpc.references import TOKENS, by_group, is_consecutive, order_of, place, shards_of
from rolemesh.services.runtime.calls.call import Call
from rolemesh.services.runtime.calls.compute import ComputeThread
from rolemesh.services.runtime.calls.hold import RunHold
from rolemesh.services.runtime.calls.role import Role
from rolemesh.services.runtime.experience.fetch import fetch_rows, take_rows
from rolemesh.services.runtime.experience.store import ExperienceStore
from rolemesh.services.runtime.ranks.device import rank_device
from rolemesh.services.runtime.ranks.face import Face, join_answers
from rolemesh.services.runtime.ranks.meeting import Meeting
from rolemesh.services.runtime.server.config import ServiceConfig
from rolemesh.services.runtime.server.metrics import ServiceMetrics
from rolemesh.services.runtime.server.operations import Operation, OperationLedger, Payload, task_of
from rolemesh.v1 import experience_pb2, operation_pb2

__all__ = ["Call", "KeyedRequest", "Runtime"]

logger = logging.getLogger(__name__)

PROGRESS_INTERVAL_S = 1.0
"""A call that works says so this often."""

RELEASE_METHOD = "/rolemesh.v1.ExperienceService/Release"

LOCAL_TRANSPORT = "local"
"""Name under which bytes are counted that this rank held itself and did not copy."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The part of a batch that one rank works on."""

    rows: Sequence[int]
    """Rows of the batch, ascending; may be empty."""
    num_rows: int
    """Rows of the whole batch."""
    counts: bool
    """Whether this rank's output is the one that is kept, among ranks that share the rows."""

    def times(self, number: int) -> Share:
        """The same part of a batch in which each row stands `number` times, one after another."""
        return Share(
            rows=[row * number + copy for row in self.rows for copy in range(number)],
            num_rows=self.num_rows * number,
            counts=self.counts,
        )


class Runtime:
    """State of one service process that all its servicers share. Owner: the loop.

    Example::

        def ComputeValues(self, request, context):
            async def work(call: Call) -> ExperienceResult: ...
            return self._runtime.keyed(request, context, ComputeValuesResponse, work)
    """

    def __init__(self, role: Role, config: ServiceConfig) -> None:
        self.role = role
        self.config = config
        self.started_at = time.time()
        self.host_id = host_identity() if config.shared_memory else ""
        self.compute = ComputeThread()
        self.store = ExperienceStore(
            config.experience_capacity_bytes,
            shared_memory=config.shared_memory,
            shared_memory_threshold_bytes=config.shared_memory_threshold_bytes,
        )
        self.ledger = OperationLedger()
        self.hold = RunHold(
            role,
            self.compute,
            self.store,
            self.ledger,
            self.close_role,
            self._give_back_others,
        )
        self.traffic = ChannelTraffic()
        self.metrics = ServiceMetrics(role.name, config.rank)
        self.address = ""
        """host:port under which peers reach this process; set when the server is bound."""
        self.services: list[str] = []
        """Full names of the services of this process."""
        self.exit_requested = asyncio.Event()
        """Set when the process shall end."""
        self.face: Face | None = None
        """On rank 0 of several: passes calls on to all ranks."""
        self.meeting: Meeting | None = None
        """Where the ranks of this service meet; None where there is one."""
        self.mesh = RankMesh.single()
        """Process groups of the run that holds the service."""
        self.layout = self.mesh.layout
        """Ranks of the run that holds the service."""
        self.rank_addresses: Sequence[str] = ()
        """Where each rank of the service answers; empty where there is one."""
        self._channels: dict[str, MeshChannel] = {}

    @functools.cached_property
    def measured_device(self) -> str:
        """Device whose memory calls report: this rank's GPU, or the process's own memory."""
        return str(rank_device())

    @property
    def is_face(self) -> bool:
        """Whether this rank speaks for the service."""
        return self.config.rank == 0

    def join_ranks(self, layout: HybridLayout) -> RankMesh:
        """Makes the process groups of a run; every rank does. On the compute thread.

        Raises:
            InvalidRequestError: LAYOUT_MISMATCH: the service was started for another layout.
        """
        own = self.config.layout.layout()
        if layout.train != own:
            raise InvalidRequestError(
                f"the run asks the {self.role.name} for the layout {layout.train.flag()}, "
                f"but the service was started for {own.flag()}: start it with the layout of "
                "the run (--layout), or change that of the recipe",
                reason="LAYOUT_MISMATCH",
            )
        self.layout = layout
        if self.meeting is not None:
            self.mesh = self.meeting.connect(layout)
        return self.mesh

    def close_role(self) -> None:
        """Frees what Initialize made. On the compute thread."""
        self.role.close()
        self.mesh.close()
        self.mesh = RankMesh.single()

    async def _give_back_others(self) -> None:
        if self.face is not None:
            await self.face.give_back()

    async def release_others(self, request: experience_pb2.ReleaseRequest) -> int:
        """Drops experience that the other ranks of this service hold. Returns bytes freed.

        Consumers know the service by its face alone, though they fetch from each rank.
        """
        if self.face is None:
            return 0
        answers = await self.face.tell(RELEASE_METHOD, request)
        return sum(answer.released_bytes for answer in answers)

    # --- keyed calls ----------------------------------------------------------------------

    async def keyed(
        self,
        request: KeyedRequest,
        context: grpc.aio.ServicerContext[Any, Any],
        response_type: type[Response],
        work: Callable[[Call], Awaitable[Message]],
        *,
        finish: Finish | None = None,
        join_events: Callable[[], JoinEvents] | None = None,
        on_all_ranks: bool = True,
        needs_initialized: bool = True,
    ) -> AsyncIterator[Response]:
        """Serves a streaming keyed call: progress at most once a second, then the result.

        What the work tells with `Call.tell` goes out before the result, at once and in order, also
        to whoever repeats the key later.

        Args:
            request: carries the key.
            context: of the call.
            response_type: has the fields `progress` and, for the work's message type, a result.
            work: makes the result, or this rank's part of it; runs once however often the key is
                repeated.
            finish: is handed the whole result, all ranks' parts joined, for what needs all of it.
            join_events: makes, for one run of the work, what joins the events that ranks tell;
                asked only where there are several. None: the work tells nothing.
            on_all_ranks: whether every rank of the service does its part of the work.
            needs_initialized: whether the role must hold a run.

        Raises:
            RolemeshError: stale epoch, reused key, not initialized, asleep, draining; or what work
                raised.
        """
        operation = self._begin(
            request,
            self._spread(request, work, finish, join_events) if on_all_ranks else work,
            needs_initialized,
        )
        operation.num_listeners += 1
        try:
            async with aclosing(operation.told(PROGRESS_INTERVAL_S)) as told:
                async for event in told:
                    if event is None:
                        yield response_type(progress=operation.progress())
                    else:
                        yield _in_its_field(response_type, event)
            yield _in_its_field(response_type, await task_of(operation))
        finally:
            operation.num_listeners -= 1

    async def keyed_unary(
        self,
        request: KeyedRequest,
        context: grpc.aio.ServicerContext[Any, Any],
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
            return cast(Answer, await asyncio.shield(task_of(operation)))
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
                    await self._forget(request.key.run_id, result)
                    raise
            return result

        return spread

    async def _forget(self, run_id: str, result: Message) -> None:
        """Drops the experience of a result that nobody will hear of, on all ranks."""
        ref = getattr(result, "experience", None)
        if not isinstance(ref, experience_pb2.ExperienceRef):
            return
        ids = [shard.experience_id for shard in shards_of(ref)]
        if not ids:
            return  # a release without ids is one of everything
        self.store.release_ids(run_id, ids)
        request = experience_pb2.ReleaseRequest(run_id=run_id, experience_ids=ids)
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
        if self.face is None:
            return await work(call)
        message = cast(Message, request)
        if join_events is not None:
            call.join_events(join_events())
        return join_answers(await self.face.everywhere(message, lambda: work(call), call.tell))

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
        identity = self.ledger.check_epoch(request.key)
        self.hold.hear(request.key.run_id)
        # A face passes each call on once. That it does so again means that it works anew, and all
        # ranks must do the same collective operations.
        known = self.ledger.find(identity, method, message, payload) if self.is_face else None
        if known is not None:
            return known
        self.hold.check_accepts_work()
        if needs_initialized:
            self.hold.check_initialized(request.key.run_id)
            if needs_awake:
                self.hold.check_awake()

        async def run(operation: Operation) -> Message:
            call = Call(operation, self.compute, rank=self.config.rank, device=self.measured_device)
            self.hold.calls[operation] = call
            try:
                return await work(call)
            except Exception as error:
                self.hold.work_failed(operation, error)
                raise
            finally:
                del self.hold.calls[operation]

        return self.ledger.start(identity, method, message, run, payload)

    # --- shares ---------------------------------------------------------------------------

    def share(self, protocol_name: str, lengths: Sequence[int]) -> Share:
        """This rank's rows of a batch, as a transfer protocol deals them out.

        Args:
            protocol_name: e.g. "3D_PROTO", or one that a user has registered.
            lengths: tokens of each row.
        """
        chosen = protocol(protocol_name)
        rows = chosen.distribute(self.layout, lengths)[self.config.rank]
        counts = self.config.rank in chosen.collect(self.layout)
        return Share(rows=rows, num_rows=len(lengths), counts=counts and bool(rows))

    # --- experience -----------------------------------------------------------------------

    async def pull(
        self,
        ref: experience_pb2.ExperienceRef,
        columns: Sequence[str],
        call: Call,
        *,
        rows: Sequence[int] | None = None,
    ) -> Experience:
        """Brings columns of a batch here: all shards at once, each from the rank that has it.

        Args:
            ref: the batch.
            columns: names, in the order wanted.
            call: gets the time (phase "fetch") and the bytes.
            rows: of the batch, in the order wanted; None means all. A rank that has no rows of a
                batch gets columns without rows.

        Raises:
            ColumnMissingError: no group of the reference has the column.
            UnavailableError: a producer does not answer; names it.
        """
        rows = range(ref.num_rows) if rows is None else rows
        if rows and not 0 <= min(rows) <= max(rows) < ref.num_rows:
            raise ValueError(
                f"rows {min(rows)} to {max(rows)} were asked for, but the batch has {ref.num_rows}"
            )
        wanted = by_group(ref, columns)
        if not rows:
            schemas = [schema for found in wanted.values() for schema in found]
            layout = layout_without_rows(schemas)
            empty = torch.zeros(layout.num_bytes, dtype=torch.uint8)
            return read_payload(layout, empty).require(columns)
        with call.phase("fetch"):
            parts = await all_or_first_error(
                self._pull_group(ref.groups[index], [one.name for one in found], rows, call)
                for index, found in wanted.items()
            )
            joined = parts[0]
            for part in parts[1:]:
                joined = joined | part
            return joined.require(columns)

    async def _pull_group(
        self,
        group: experience_pb2.ColumnGroup,
        names: Sequence[str],
        rows: Sequence[int],
        call: Call,
    ) -> Experience:
        found = place(group.shards, rows)
        parts = await all_or_first_error(
            self._pull_rows(shard, names, positions, call) for shard, positions, _ in found
        )
        order = order_of(found)
        pulled = parts[0] if len(parts) == 1 else Experience.concat(parts)
        if is_consecutive(order):
            return pulled
        return pulled.select(torch.tensor(order, dtype=torch.int64))

    async def _pull_rows(
        self,
        shard: experience_pb2.Shard,
        names: Sequence[str],
        positions: Sequence[int],
        call: Call,
    ) -> Experience:
        if shard.address == self.address:
            held = self.store.get(shard.experience_id)
            rows = take_rows(held.experience.require(names), positions)
            call.add_fetched(LOCAL_TRANSPORT, rows.num_bytes)
            return rows
        fetched = await fetch_rows(self.peer(shard.address), shard, names, positions, self.host_id)
        call.add_fetched(fetched.transport, fetched.num_bytes)
        return fetched.experience

    def publish(
        self,
        key: operation_pb2.OperationKey,
        experience: Experience,
        share: Share | None = None,
    ) -> experience_pb2.ExperienceRef:
        """Puts rows of a batch into the store as one shard of this rank. Thread-safe.

        Args:
            key: of the operation that made them.
            experience: the rows.
            share: which rows of the batch they are; None means all of it. When another rank's
                output counts for them, nothing is published.

        Raises:
            CapacityError: it does not fit within the bound on bytes held.
            ValueError: a column has a dtype that may not travel, or there is no row.
        """
        if share is not None and not share.counts:
            return experience_pb2.ExperienceRef(
                run_id=key.run_id, step=key.step, num_rows=share.num_rows
            )
        if experience.num_rows < 1:
            raise ValueError("an experience without rows cannot be published: produce one at least")
        rows = range(experience.num_rows) if share is None else share.rows
        schemas = schemas_of(payload_layout(experience))
        held = self.store.put(key.run_id, key.step, experience)
        shard = experience_pb2.Shard(
            experience_id=held.experience_id,
            row_start=rows[0],
            num_rows=experience.num_rows,
            address=self.address,
            role=self.role.name,
            rank=self.config.rank,
            num_bytes=held.num_bytes,
            rows=() if is_consecutive(rows) else rows,
        )
        if TOKENS in experience:
            shard.row_tokens.extend(experience[TOKENS].lengths().tolist())
        return experience_pb2.ExperienceRef(
            run_id=key.run_id,
            step=key.step,
            num_rows=experience.num_rows if share is None else share.num_rows,
            groups=[experience_pb2.ColumnGroup(columns=schemas, shards=[shard])],
        )

    def peer(self, address: str) -> MeshChannel:
        """The channel to a peer, opened on first use and kept."""
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = open_channel(address, traffic=self.traffic)
        return channel

    async def close_channels(self) -> None:
        """Closes the channels to peers."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()


def _in_its_field(response_type: type[Response], result: Message) -> Response:
    for field in response_type.DESCRIPTOR.fields:
        if field.name != "progress" and field.message_type is result.DESCRIPTOR:
            return response_type(**{field.name: result})
    raise TypeError(
        f"{response_type.__name__} has no field for a {type(result).__name__}: return another type"
    )
