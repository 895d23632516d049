"""Futures over role calls, and the graph that they leave behind.

A call makes a node and returns at once. A node starts when the columns that it needs exist and its
pool's lease is free. The first failure ends the step: what depends on it and what runs beside it
is cancelled, down to the calls in flight.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Any, Self

from rolemesh.coordinator.errors import NodeFailedError, RunError
from rolemesh.coordinator.pools import Pools
from rolemesh.coordinator.state.store import StateStoreError
from rolemesh.v1 import experience_pb2


class NodeKind(StrEnum):
    """What a node does to the mesh."""

    SAMPLE = "SAMPLE"
    INFER = "INFER"
    UPDATE = "UPDATE"
    EVAL = "EVAL"


class NodeState(StrEnum):
    """Where a node is in its life."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass
class Node:
    """One call of a role, as it was made and as it went. Times are Unix seconds."""

    node_id: int
    step: int
    kind: NodeKind
    role: str
    method: str
    pool: str
    sequence: int
    inputs: tuple[int, ...]
    """Ids of the nodes whose columns this one reads."""
    queued_at: float
    started_at: float | None = None
    ended_at: float | None = None
    state: NodeState = NodeState.QUEUED
    num_tokens: int = 0
    num_bytes: int = 0
    """Bytes of experience that the service pulled for it."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds by phase inside the service."""
    peak_bytes: dict[str, dict[int, int]] = field(default_factory=dict)
    """Most memory held while a phase computed, by phase and rank."""
    metrics: dict[str, float] = field(default_factory=dict)
    policy_version: int | None = None
    """Version after an update; None for other kinds."""

    @property
    def name(self) -> str:
        """e.g. "actor.update"."""
        return f"{self.role}.{self.method}"

    @property
    def seconds(self) -> float:
        """Time between start and end, 0 while it has not ended."""
        if self.started_at is None or self.ended_at is None:
            return 0.0
        return self.ended_at - self.started_at

    def to_dict(self) -> dict[str, Any]:
        """The record as plain JSON values."""
        return {**self.__dict__, "kind": self.kind.value, "state": self.state.value}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a service answered."""

    report: experience_pb2.CallReport
    experience: experience_pb2.ExperienceRef | None = None
    policy_version: int | None = None


Work = Callable[[Node, experience_pb2.ExperienceRef | None], Awaitable[Outcome]]
"""Makes the call: gets its node and the joined experience that it reads."""


@dataclass(frozen=True, eq=False)
class Part:
    """One node's contribution to an experience."""

    node: Node
    task: asyncio.Task[Outcome]
    columns: frozenset[str]


class UpdateFuture:
    """An update in flight. Nothing has to be done with it: the step waits for all nodes."""

    def __init__(self, part: Part) -> None:
        self._part = part

    @property
    def node(self) -> Node:
        """The node's record."""
        return self._part.node

    async def result(self) -> Outcome:
        """What the service answered."""
        return await asyncio.shield(self._part.task)


class ExperienceFuture:
    """Experience that exists or will exist. `a | b` joins two over the same rows.

    A column of b replaces one of the same name of a. A call that gets a joined future waits only
    for the parts whose columns it reads: after

        rollouts |= critic.compute_values(rollouts)
        rollouts |= reference.compute_logprobs(rollouts)

    the second call does not wait for the values.
    """

    def __init__(self, dataflow: Dataflow, parts: tuple[Part, ...]) -> None:
        self._dataflow = dataflow
        self._parts = parts

    def __or__(self, other: ExperienceFuture) -> ExperienceFuture:
        """The columns of both."""
        if other._dataflow is not self._dataflow:
            raise ValueError(
                f"cannot join experience of step {self._dataflow.step} with experience of step "
                f"{other._dataflow.step}: join futures that were made in one step"
            )
        new = tuple(part for part in other._parts if part not in self._parts)
        return ExperienceFuture(self._dataflow, self._parts + new)

    @property
    def columns(self) -> frozenset[str]:
        """Columns that exist or will exist."""
        return frozenset().union(*(part.columns for part in self._parts))

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes behind it, in the order in which they were joined."""
        return tuple(part.node for part in self._parts)

    def select(self, needs: Iterable[str], uses: Iterable[str] = ()) -> ExperienceFuture:
        """The parts with these columns, and no others.

        Args:
            needs: Columns that must be there.
            uses: Columns that are taken when they are there.

        Raises:
            ValueError: A needed column is produced by no node.
        """
        chosen: set[Part] = set()
        for column in needs:
            part = self._producer(column)
            if part is None:
                raise ValueError(
                    f"no node produces the column {column!r}; the experience has "
                    f"{', '.join(sorted(self.columns))}: join what produces it with |= first"
                )
            chosen.add(part)
        chosen.update(part for part in map(self._producer, uses) if part is not None)
        return ExperienceFuture(
            self._dataflow, tuple(part for part in self._parts if part in chosen)
        )

    def _producer(self, column: str) -> Part | None:
        return next((part for part in reversed(self._parts) if column in part.columns), None)

    async def result(self) -> experience_pb2.ExperienceRef:
        """The reference, once every part exists."""
        references = []
        for part in self._parts:
            outcome = await asyncio.shield(part.task)
            if outcome.experience is None:
                raise ValueError(f"{part.node.name} answered without experience")
            references.append(outcome.experience)
        return join_references(references)


def join_references(
    references: Sequence[experience_pb2.ExperienceRef],
) -> experience_pb2.ExperienceRef:
    """One reference with the columns of all; a later column replaces an earlier one of its name.

    Raises:
        ValueError: They are not over the same rows.
    """
    first = references[0]
    joined = experience_pb2.ExperienceRef(
        run_id=first.run_id, step=first.step, num_rows=first.num_rows
    )
    taken: set[str] = set()
    groups = []
    for reference in reversed(references):
        if (reference.run_id, reference.num_rows) != (first.run_id, first.num_rows):
            raise ValueError(
                f"cannot join {first.num_rows} rows of run {first.run_id!r} with "
                f"{reference.num_rows} rows of run {reference.run_id!r}: joined experience must "
                "be over the same rows"
            )
        for group in reversed(reference.groups):
            columns = [column for column in group.columns if column.name not in taken]
            taken.update(column.name for column in columns)
            if columns:
                groups.append(experience_pb2.ColumnGroup(columns=columns, shards=group.shards))
    joined.groups.extend(reversed(groups))
    return joined


class Dataflow:
    """The graph of one step, while it runs and afterwards.

    Invariant: once a node has failed, or `abort` was called, no other node starts. When the block
    ends, no node runs.

    Owner: one asyncio loop.

    Example::

        async with Dataflow(3, pools) as dataflow:
            ...                    # make nodes; what is raised here cancels them
        dataflow.nodes[0].seconds  # all are done
    """

    def __init__(self, step: int, pools: Pools) -> None:
        self.step = step
        self.nodes: list[Node] = []
        self._pools = pools
        self._tasks: list[asyncio.Task[Outcome]] = []
        self._failure: BaseException | None = None
        # Durations come from the monotonic clock, the offset makes them Unix times.
        self._offset = time.time() - time.monotonic()

    def _now(self) -> float:
        return self._offset + time.monotonic()

    def call(
        self,
        *,
        kind: NodeKind,
        role: str,
        method: str,
        sequence: int,
        work: Work,
        reads: ExperienceFuture | None = None,
        produces: Iterable[str] = (),
    ) -> Part:
        """Makes a node; its work starts as soon as it can."""
        if self._failure is not None:
            raise self._failure
        pool = self._pools.of(role)
        node = Node(
            node_id=len(self.nodes),
            step=self.step,
            kind=kind,
            role=role,
            method=method,
            pool=pool.name,
            sequence=sequence,
            inputs=() if reads is None else tuple(node.node_id for node in reads.nodes),
            queued_at=self._now(),
        )
        task = asyncio.get_running_loop().create_task(
            self._run(node, reads, work), name=f"step {self.step} {node.name}"
        )
        self.nodes.append(node)
        self._tasks.append(task)
        return Part(node=node, task=task, columns=frozenset(produces))

    def experience(self, part: Part) -> ExperienceFuture:
        """The future of a node that produces columns."""
        return ExperienceFuture(self, (part,))

    async def _run(self, node: Node, reads: ExperienceFuture | None, work: Work) -> Outcome:
        try:
            experience = None if reads is None else await reads.result()
            async with self._pools.of(node.role).lease((self.step, node.node_id)):
                node.started_at = self._now()
                node.state = NodeState.RUNNING
                outcome = await work(node, experience)
        except asyncio.CancelledError:
            node.state = NodeState.CANCELLED
            raise
        except (RunError, StateStoreError) as error:
            node.state = NodeState.FAILED
            self._fail(error)
            raise
        except Exception as error:
            node.state = NodeState.FAILED
            failure = NodeFailedError(node.name, self.step, node.role, error)
            failure.__cause__ = error
            self._fail(failure)
            raise failure from error
        finally:
            if node.started_at is not None:
                node.ended_at = self._now()
        node.state = NodeState.DONE
        node.num_tokens = outcome.report.num_tokens
        node.num_bytes = sum(outcome.report.fetched_bytes.values())
        node.phases = {
            phase.phase: phase.duration.seconds + phase.duration.nanos * 1e-9
            for phase in outcome.report.phases
        }
        node.peak_bytes = {}
        for peak in outcome.report.memory:
            node.peak_bytes.setdefault(peak.phase, {})[peak.rank] = peak.peak_bytes
        # Sorted: a protobuf map has no order, and records of two runs are compared.
        node.metrics = dict(sorted(outcome.report.metrics.items()))
        node.policy_version = outcome.policy_version
        return outcome

    def _fail(self, error: BaseException) -> None:
        if self._failure is not None:
            return
        self._failure = error
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()

    def abort(self, error: BaseException) -> None:
        """Ends the step with this error: cancels what runs and what waits."""
        self._fail(error)

    def running(self, role: str | None = None) -> list[Node]:
        """Nodes whose call is in flight, of one role or of all."""
        return [
            node
            for node in self.nodes
            if node.state is NodeState.RUNNING and role in (None, node.role)
        ]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self.abort(error)
        await self.finish()

    async def finish(self) -> None:
        """Returns when every node is done, or raises the one error that ended the step."""
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        except asyncio.CancelledError:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            raise
        for node in self.nodes:
            # Cancelled before it could begin to wait.
            if node.state is NodeState.QUEUED:
                node.state = NodeState.CANCELLED
        if self._failure is not None:
            raise self._failure


def chrome_trace(nodes: Iterable[Node]) -> dict[str, Any]:
    """The nodes in Chrome's trace event format: one row a role, grouped by pool."""
    nodes = [node for node in nodes if node.started_at is not None and node.ended_at is not None]
    pools = {name: number for number, name in enumerate(sorted({node.pool for node in nodes}))}
    roles = {name: number for number, name in enumerate(sorted({node.role for node in nodes}))}
    events: list[dict[str, Any]] = []
    for name, number in pools.items():
        events.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}})
    for pool, role in sorted({(node.pool, node.role) for node in nodes}):
        thread = {"ph": "M", "name": "thread_name", "pid": pools[pool], "tid": roles[role]}
        events.append({**thread, "args": {"name": role}})
    for node in nodes:
        assert node.started_at is not None
        events.append(
            {
                "ph": "X",
                "name": node.name,
                "cat": node.kind.value,
                "pid": pools[node.pool],
                "tid": roles[node.role],
                "ts": round(node.started_at * 1e6),
                "dur": round(node.seconds * 1e6),
                "args": {
                    "step": node.step,
                    "waited_s": node.started_at - node.queued_at,
                    "tokens": node.num_tokens,
                    "bytes": node.num_bytes,
                    "policy_version": node.policy_version,
                    **node.phases,
                },
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
