"""What the servicers of every role are written against: pull, publish, keyed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar, cast

import grpc
import torch
from google.protobuf.message import Message

from rolemesh.engine.experience import Experience
from rolemesh.engine.transport.shm import host_identity
from rolemesh.rpc.channel import ChannelTraffic, MeshChannel, open_channel
from rolemesh.services.runtime.call import Call
from rolemesh.services.runtime.compute import ComputeThread
from rolemesh.services.runtime.config import ServiceConfig
from rolemesh.services.runtime.experience_store import ExperienceStore
from rolemesh.services.runtime.fetch import fetch_rows, take_rows
from rolemesh.services.runtime.hold import RunHold
from rolemesh.services.runtime.operations import Operation, OperationLedger, task_of
from rolemesh.services.runtime.role import Role
from rolemesh.services.runtime.rows import TOKENS, group_with, is_consecutive, place
from rolemesh.services.runtime.schema import column_schema
from rolemesh.v1 import experience_pb2, operation_pb2

__all__ = ["Call", "KeyedRequest", "Runtime"]

PROGRESS_INTERVAL_S = 1.0
"""A call that works says so this often."""

LOCAL_TRANSPORT = "local"
"""Name under which bytes are counted that this rank held itself and did not copy."""


Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
"""What grpc.aio hands to a servicer."""


class KeyedRequest(Protocol):
    """A request with an operation key."""

    @property
    def key(self) -> operation_pb2.OperationKey:
        """The key."""


Response = TypeVar("Response", bound=Message)
Answer = TypeVar("Answer", bound=Message)


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
        self.hold = RunHold(role, self.compute, self.store, self.ledger)
        self.traffic = ChannelTraffic()
        self.address = ""
        """host:port under which peers reach this process; set when the server is bound."""
        self.services: list[str] = []
        """Full names of the services of this process."""
        self.exit_requested = asyncio.Event()
        """Set when the process shall end."""
        self._channels: dict[str, MeshChannel] = {}

    # --- keyed calls ----------------------------------------------------------------------

    async def keyed(
        self,
        request: KeyedRequest,
        context: grpc.aio.ServicerContext[Any, Any],
        response_type: type[Response],
        work: Callable[[Call], Awaitable[Message]],
        *,
        needs_initialized: bool = True,
    ) -> AsyncIterator[Response]:
        """Serves a streaming keyed call: progress at most once a second, then the result.

        Args:
            request: carries the key.
            context: of the call.
            response_type: has the fields `progress` and, for the work's message type, a result.
            work: makes the result; runs once however often the key is repeated.
            needs_initialized: whether the role must hold a run.

        Raises:
            RolemeshError: stale epoch, reused key, not initialized, asleep, draining; or what work
                raised.
        """
        operation = self._begin(request, work, needs_initialized)
        task = task_of(operation)
        operation.num_listeners += 1
        try:
            while not (await asyncio.wait({task}, timeout=PROGRESS_INTERVAL_S))[0]:
                yield response_type(progress=operation.progress())
            yield _in_result_field(response_type, await task)
        finally:
            operation.num_listeners -= 1

    async def keyed_unary(
        self,
        request: KeyedRequest,
        context: grpc.aio.ServicerContext[Any, Any],
        work: Callable[[Call], Awaitable[Answer]],
        *,
        needs_initialized: bool = True,
        needs_awake: bool = True,
    ) -> Answer:
        """Serves a unary keyed call: like keyed, without progress."""
        operation = self._begin(request, work, needs_initialized, needs_awake)
        operation.num_listeners += 1
        try:
            # Shielded: the work goes on when this caller leaves.
            return cast(Answer, await asyncio.shield(task_of(operation)))
        finally:
            operation.num_listeners -= 1

    def _begin(
        self,
        request: KeyedRequest,
        work: Callable[[Call], Awaitable[Message]],
        needs_initialized: bool,
        needs_awake: bool = True,
    ) -> Operation:
        message = cast(Message, request)
        method = message.DESCRIPTOR.full_name.removesuffix("Request")
        identity = self.ledger.check_epoch(request.key)
        self.hold.hear(request.key.run_id)
        known = self.ledger.find(identity, method, message)
        if known is not None:
            return known
        self.hold.check_accepts_work()
        if needs_initialized:
            self.hold.check_initialized(request.key.run_id)
            if needs_awake:
                self.hold.check_awake()

        async def run(operation: Operation) -> Message:
            call = Call(operation, self.compute)
            self.hold.calls[operation] = call
            try:
                return await work(call)
            except Exception as error:
                self.hold.work_failed(operation, error)
                raise
            finally:
                del self.hold.calls[operation]

        return self.ledger.start(identity, method, message, run)

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
            rows: of the batch, in the order wanted; None means all.

        Raises:
            ColumnMissingError: no group of the reference has the column.
            UnavailableError: a producer does not answer; names it.
        """
        rows = range(ref.num_rows) if rows is None else rows
        if not rows or min(rows) < 0 or max(rows) >= ref.num_rows:
            raise ValueError(
                f"rows {list(rows[:3])}... of a batch of {ref.num_rows} rows: "
                "ask for at least one row, and only for rows of the batch"
            )
        with call.phase("fetch"):
            by_group: dict[int, list[str]] = {}
            for name in columns:
                by_group.setdefault(group_with(ref, name), []).append(name)
            parts = await _all_or_first_error(
                [
                    self._pull_group(ref.groups[index], names, rows, call)
                    for index, names in by_group.items()
                ]
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
        parts = await _all_or_first_error(
            [self._pull_rows(shard, names, positions, call) for shard, positions, _ in found]
        )
        order = [target for *_, targets in found for target in targets]
        pulled = parts[0] if len(parts) == 1 else Experience.concat(parts)
        if is_consecutive(order):
            return pulled
        return pulled.select(torch.tensor(order, dtype=torch.int64).argsort())

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
        *,
        rows: Sequence[int] | None = None,
        num_rows: int | None = None,
    ) -> experience_pb2.ExperienceRef:
        """Puts rows of a batch into the store as one shard of this rank. Thread-safe.

        Args:
            key: of the operation that made them.
            experience: the rows.
            rows: which rows of the batch they are, ascending; None means all of it.
            num_rows: rows of the batch; None means those of `experience`.

        Raises:
            CapacityError: it does not fit within the bound on bytes held.
            ValueError: a column has a dtype that may not travel, or there is no row.
        """
        if experience.num_rows < 1:
            raise ValueError("an experience without rows cannot be published: produce one at least")
        rows = range(experience.num_rows) if rows is None else rows
        schemas = [column_schema(name, column) for name, column in experience.columns.items()]
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
            num_rows=experience.num_rows if num_rows is None else num_rows,
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


def _in_result_field(response_type: type[Response], result: Message) -> Response:
    for field in response_type.DESCRIPTOR.fields:
        if field.name != "progress" and field.message_type is result.DESCRIPTOR:
            return response_type(**{field.name: result})
    raise TypeError(
        f"{response_type.__name__} has no field for a {type(result).__name__}: return another type"
    )


async def _all_or_first_error(
    pulls: Sequence[Awaitable[Experience]],
) -> list[Experience]:
    """Awaits all; the first failure cancels the rest and is raised."""
    tasks = [asyncio.ensure_future(pull) for pull in pulls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
