"""Interface of the runtime for the servicers of every role: pull, publish, keyed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from rolemesh.engine.experience import Experience, payload_layout, read_payload
from rolemesh.engine.hardware.devices import give_back_memory
from rolemesh.engine.layout.ranks import HybridLayout
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.transfer_protocols import protocol
from rolemesh.rpc.errors import InvalidRequestError
from rolemesh.rpc.experience.payload import layout_without_rows, schemas_of
from rolemesh.rpc.experience.references import TOKENS, by_group, is_consecutive, order_of, place
from rolemesh.rpc.together import together
from rolemesh.services.runtime.calls.call import Call
from rolemesh.services.runtime.calls.keyed import Context, KeyedCalls
from rolemesh.services.runtime.calls.role import Role
from rolemesh.services.runtime.calls.service_process import ServiceProcess
from rolemesh.services.runtime.experience.fetch import fetch_rows, take_rows
from rolemesh.services.runtime.ranks.device import rank_device
from rolemesh.v1 import experience_pb2, operation_pb2

__all__ = ["Call", "Context", "RoleServicer", "Runtime"]

logger = logging.getLogger(__name__)

RoleT = TypeVar("RoleT")

LOCAL_TRANSPORT = "local"
"""Name under which bytes are counted that this rank held itself and did not copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The part of a batch that one rank works on."""

    rows: Sequence[int]
    """Rows of the batch, ascending; may be empty."""
    num_rows: int
    """Rows of the whole batch."""
    counts: bool
    """Whether this rank's output is the one that is kept, among ranks that share the rows."""

    def among(self, rows: Sequence[int], num_rows: int) -> Share:
        """The same part, where the batch is some rows, ascending, of one of num_rows."""
        return Share(rows=[rows[row] for row in self.rows], num_rows=num_rows, counts=self.counts)

    def times(self, number: int) -> Share:
        """The same part of a batch in which each row stands `number` times, one after another."""
        return Share(
            rows=[row * number + copy for row in self.rows for copy in range(number)],
            num_rows=self.num_rows * number,
            counts=self.counts,
        )


class Runtime(KeyedCalls):
    """State of one run at a service, which all servicers of its role share. Owner: the loop.

    Most services have one. Where several runs share a service (`Tenants`), each has its own role,
    hold, ledger and experience; the process they share.

    Example::

        def ComputeValues(self, request, context):
            async def work(call: Call) -> ExperienceResult: ...
            return self._runtime.keyed(request, ComputeValuesResponse, work)
    """

    def __init__(self, role: Role, process: ServiceProcess) -> None:
        super().__init__(role, process, self.forget_role)
        self.mesh = RankMesh.single()
        """Process groups of the run that holds the service."""
        self.layout = self.mesh.layout
        """Ranks of the run that holds the service."""
        self.repeated_puts = asyncio.Lock()
        """Held while a put is received that was answered before: its bytes are not counted."""

    @property
    def address(self) -> str:
        """host:port under which peers reach this process."""
        return self.process.address

    def join_ranks(self, layout: HybridLayout) -> RankMesh:
        """Makes the process groups of a run; every rank does. On the compute thread.

        Raises:
            InvalidRequestError: LAYOUT_MISMATCH: the service was started for another layout.
        """
        own = self.process.config.layout.layout()
        if layout.train != own:
            raise InvalidRequestError(
                f"the run asks the {self.role.name} for the layout {layout.train.flag()}, "
                f"but the service was started for {own.flag()}: start it with the layout of "
                "the run (--layout), or change that of the recipe",
                reason="LAYOUT_MISMATCH",
            )
        self.layout = layout
        self.mesh = self.process.join_ranks(layout)
        return self.mesh

    def sleep_role(self) -> int:
        """Moves weights to host memory, and gives the GPU's back to other processes.

        On the compute thread. Returns the device bytes that the role freed (0 on a CPU).
        """
        freed = self.role.sleep()
        device = rank_device()
        if device.type != "cpu":
            give_back_memory(device)
        return freed

    def close_role(self) -> None:
        """Frees what Initialize made. On the compute thread."""
        self.role.close()
        if self.mesh.world.size > 1:
            self.process.leave_ranks()
        self.mesh = RankMesh.single()

    def forget_role(self) -> None:
        """The same, and gives the memory back, since the process goes on. On the compute thread."""
        try:
            self.close_role()
        finally:
            give_back_memory(rank_device())

    # --- shares ---------------------------------------------------------------------------

    def share(self, protocol_name: str, lengths: Sequence[int]) -> Share:
        """This rank's rows of a batch, as a transfer protocol deals them out.

        Args:
            protocol_name: e.g. "3D_PROTO", or one that a user has registered.
            lengths: Tokens of each row.
        """
        chosen = protocol(protocol_name)
        rows = chosen.distribute(self.layout, lengths)[self.process.config.rank]
        counts = self.process.config.rank in chosen.collect(self.layout)
        return Share(rows=rows, num_rows=len(lengths), counts=counts and bool(rows))

    def share_of_face(self, num_rows: int) -> Share:
        """This rank's rows of a batch of which rank 0 has all."""
        rows = range(num_rows) if self.is_face else ()
        return Share(rows=rows, num_rows=num_rows, counts=self.is_face)

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
            ref: The batch.
            columns: Names, in the order wanted.
            call: Gets the time (phase "fetch") and the bytes.
            rows: Of the batch, in the order wanted; None means all. A rank that has no rows of a
                batch gets columns without rows.

        Raises:
            ColumnMissingError: No group of the reference has the column.
            UnavailableError: A producer does not answer; names it.
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
            parts = await together(
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
        parts = await together(
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
        process = self.process
        peer = process.peer(shard.address)
        fetched = await fetch_rows(peer, shard, names, positions, process.host_id)
        call.add_fetched(fetched.transport, fetched.num_bytes)
        process.count_pulled(shard.address, fetched.transport, fetched.num_bytes)
        return fetched.experience

    def publish(
        self,
        key: operation_pb2.OperationKey,
        experience: Experience,
        share: Share | None = None,
        *,
        is_given: bool = False,
    ) -> experience_pb2.ExperienceRef:
        """Puts rows of a batch into the store as one shard of this rank. Thread-safe.

        Args:
            key: Of the operation that made them.
            experience: The rows.
            share: Which rows of the batch they are; None means all of it. When another rank's
                output counts for them, nothing is published.
            is_given: Whether a client has put them, and no rank has made them.

        Raises:
            CapacityError: It does not fit within the bound on bytes held.
            ValueError: A column has a dtype that may not travel, or there is no row.
        """
        if share is not None and not share.counts:
            return experience_pb2.ExperienceRef(
                run_id=key.run_id, step=key.step, num_rows=share.num_rows
            )
        if experience.num_rows < 1:
            raise ValueError("an experience without rows cannot be published: produce one at least")
        rows = range(experience.num_rows) if share is None else share.rows
        schemas = schemas_of(payload_layout(experience))
        held = self.store.put(key.run_id, key.step, experience, is_given=is_given)
        shard = experience_pb2.Shard(
            experience_id=held.experience_id,
            row_start=rows[0],
            num_rows=experience.num_rows,
            address=self.address,
            role=self.role.name,
            rank=self.process.config.rank,
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


class RoleServicer(Generic[RoleT]):
    """Base of servicers over what a role holds; each adds the methods of its service."""

    def __init__(self, role: RoleT, runtime: Runtime) -> None:
        self._role = role
        self._runtime = runtime
