"""Futures over calls of services, and the graph that they leave behind.

A call makes a node and returns at once. A node starts when the columns that it needs exist and its
pool's lease is free. Experience that comes in blocks is worked on block by block: each has a node
of its own. The first failure ends the step: what depends on it and what runs beside it is
cancelled, down to the calls in flight.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable
from functools import partial
from typing import Self

from rolemesh.coordinator.dataflow.errors import NodeFailedError, RunError, ServiceLeftError
from rolemesh.coordinator.dataflow.futures import (
    CallFuture,
    ExperienceFuture,
    Node,
    NodeKind,
    NodeState,
    Outcome,
    exist,
)
from rolemesh.coordinator.dataflow.lineage import Lineage
from rolemesh.coordinator.dataflow.loop.clock import unix_time
from rolemesh.coordinator.dataflow.pools import Pools
from rolemesh.coordinator.state.errors import StateStoreError
from rolemesh.rpc import tracing
from rolemesh.rpc.errors import RolemeshError
from rolemesh.v1 import experience_pb2

Work = Callable[[Node, experience_pb2.ExperienceRef | None], Awaitable[Outcome]]
"""Makes the call: gets its node and the joined experience that it reads."""

OnBlock = Callable[[int, experience_pb2.ExperienceRef], None]
"""Takes a finished block: its number and its rows."""

SampleWork = Callable[[Node, OnBlock], Awaitable[Outcome]]
"""Makes a call that hands its blocks out while it runs."""


class StepGraph:
    """The graph of one step, while it runs and afterwards.

    Invariant: once a node has failed, or `abort` was called, no other node starts. When the block
    ends, no node runs.

    Owner: one asyncio loop.

    Example::

        async with StepGraph(3, pools) as dataflow:
            ...                    # make nodes; what is raised here cancels them
        dataflow.nodes[0].seconds  # all are done
    """

    def __init__(self, step: int, pools: Pools, replaceable: Collection[str] = ()) -> None:
        """Prepares; no node exists yet.

        Args:
            step: Its number.
            pools: Where services compute.
            replaceable: Services that may be replaced while the step goes on. What they have
                answered is asked for again where a later call reads it.
        """
        self.step = step
        self.nodes: list[Node] = []
        self._pools = pools
        self._lineage = Lineage(replaceable)
        self._tasks: list[asyncio.Future[Outcome]] = []
        self._failure: BaseException | None = None
        self._has_ended = False
        self._span = tracing.begin(f"step {step}", step=step)
        self._is_traced = self._span.get_span_context().is_valid
        # Durations come from the loop's clock, the offset makes them Unix times.
        self._clock = asyncio.get_running_loop().time
        self._offset = unix_time() - self._clock()

    def _now(self) -> float:
        return self._offset + self._clock()

    def call(
        self,
        *,
        kind: NodeKind,
        service: str,
        method: str,
        sequence: int,
        work: Work,
        reads: ExperienceFuture | None = None,
        produces: Iterable[str] = (),
        block: int | None = None,
        after: Iterable[CallFuture] = (),
        is_leased: bool = True,
        or_another: bool = False,
    ) -> CallFuture:
        """Makes a node; its work starts as soon as it can.

        Args:
            kind: What it does to the mesh.
            service: Who does it.
            method: What is called.
            sequence: Number among the calls of that name in the step.
            work: Makes the call; the node's service says with whom.
            reads: Experience that must exist before.
            produces: Columns that come to be.
            block: The block of `reads` that it works on; None: all rows.
            after: Calls that must have been answered before, beside what it reads; some may be of
                other steps.
            is_leased: Whether it waits for its pool; else it runs beside the service that holds it.
            or_another: Whether another service of the role may do it, when it is free before
                `service` is, or when that one leaves.
        """
        after, columns = tuple(after), frozenset(produces)
        node = self._node(kind, service, method, sequence, reads, block, after)

        answers = () if reads is None else reads.outcomes_of(block)

        start = partial(self._leased, or_another=or_another) if is_leased else self._started

        async def run() -> Outcome:
            await exist(after)
            while True:
                read = self._lineage.current(answers)
                try:
                    experience = None if reads is None else await reads.result(block)
                    node.num_rows = 0 if experience is None else experience.num_rows
                    node.ready_at = self._now()
                    outcome = await start(node, partial(work, node, experience))
                except ServiceLeftError:
                    if or_another:
                        continue
                    if columns:
                        raise
                    # What it was to take is of no more use to it.
                    return Outcome(report=experience_pb2.CallReport())
                except RolemeshError as error:
                    if not await self._lineage.explains(error, read):
                        raise
                else:
                    if columns:
                        _check_rows(node, experience, outcome.experience)
                    return outcome

        task = self._start(node, run)
        self._lineage.add(node, (task,), lambda: (self._start(node, run),))
        return CallFuture(nodes=(node,), outcomes=(task,), columns=columns)

    def sample(
        self,
        *,
        kind: NodeKind,
        service: str,
        method: str,
        sequence: int,
        work: SampleWork,
        num_blocks: int,
        produces: Iterable[str],
        after: Iterable[CallFuture] = (),
        or_another: bool = False,
    ) -> CallFuture:
        """Makes a node whose experience comes in blocks, each as soon as it is finished.

        A generation of one block is that block.

        Args:
            kind: What it does to the mesh.
            service: Who does it.
            method: What is called.
            sequence: Number among the calls of that name in the step.
            work: Makes the call; the node's service says with whom.
            num_blocks: Blocks that it gives.
            produces: Columns that come to be.
            after: Calls that must have been answered before.
            or_another: Whether another service of the role may do it, when it is free before
                `service` is.

        Raises in the node:
            RunError: The call ended, and a block never came.
        """
        after = tuple(after)
        node = self._node(kind, service, method, sequence, None, None, after)
        blocks = [self._block() for _ in range(num_blocks)]
        is_lost = False

        def on_block(index: int, experience: experience_pb2.ExperienceRef) -> None:
            if not 0 <= index < num_blocks:
                raise RunError(
                    f"step {self.step}: {node.name} sent block {index} of {num_blocks}: the "
                    "service must number blocks as rollout.proto says"
                )
            if not blocks[index].done():
                report = experience_pb2.CallReport()
                blocks[index].set_result(Outcome(report=report, experience=experience))

        async def run() -> Outcome:
            nonlocal is_lost
            await exist(after)
            node.ready_at = self._now()
            while True:
                is_lost = False
                try:
                    outcome = await self._leased(node, lambda: work(node, on_block), or_another)
                except ServiceLeftError:
                    # Blocks that it had handed out are lost, and come again.
                    if not or_another:
                        raise
                    continue
                if num_blocks == 1 and outcome.experience is not None:
                    on_block(0, outcome.experience)
                absent = [index for index, block in enumerate(blocks) if not block.done()]
                if not absent:
                    return outcome
                # Else the service was lost when it had just answered.
                if not is_lost:
                    raise RunError(
                        f"step {self.step}: {node.name} ended, but block {absent[0]} of "
                        f"{num_blocks} ({len(absent)} such blocks) never came: a group of it is "
                        f"not whole; see the log of the {node.service}"
                    )

        def again() -> tuple[asyncio.Future[Outcome], ...]:
            nonlocal is_lost
            is_lost = True
            blocks[:] = [self._block() if block.done() else block for block in blocks]
            if node.state is NodeState.DONE:
                self._start(node, run)
            return tuple(blocks)

        self._start(node, run)
        self._lineage.add(node, tuple(blocks), again)
        return CallFuture(nodes=(node,), outcomes=tuple(blocks), columns=frozenset(produces))

    def _block(self) -> asyncio.Future[Outcome]:
        """Rows of a generation that are still to come."""
        block: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._tasks.append(block)
        return block

    def defer(
        self,
        make: Callable[[], Awaitable[experience_pb2.ExperienceRef]],
        columns: Iterable[str],
    ) -> ExperienceFuture:
        """Experience whose nodes are not known beforehand, since they depend on what comes out.

        Args:
            make: Makes nodes, waits for some of them, and gives the reference in the end.
            columns: Columns that it will have.
        """

        async def run() -> Outcome:
            try:
                return Outcome(report=experience_pb2.CallReport(), experience=await make())
            except (RunError, StateStoreError) as error:
                self.abort(error)
                raise
            except Exception as error:
                failure = RunError(f"step {self.step}: {error}")
                self.abort(failure)
                raise failure from error

        task = asyncio.get_running_loop().create_task(run(), name=f"step {self.step} deferred")
        self._tasks.append(task)
        part = CallFuture(nodes=(), outcomes=(task,), columns=frozenset(columns))
        return ExperienceFuture(self, (part,))

    def _node(
        self,
        kind: NodeKind,
        service: str,
        method: str,
        sequence: int,
        reads: ExperienceFuture | None,
        block: int | None,
        after: tuple[CallFuture, ...],
    ) -> Node:
        if self._failure is not None:
            raise self._failure
        # Parts of other steps, and of an evaluation after this one, number nodes of their own.
        before = [node for part in after for node in part.nodes if self._has(node)]
        inputs = (*(() if reads is None else reads.nodes_of(block)), *before)
        node = Node(
            node_id=len(self.nodes),
            step=self.step,
            kind=kind,
            service=service,
            method=method,
            pool=self._pools.of(service).name,
            sequence=sequence,
            inputs=tuple(known.node_id for known in inputs),
            queued_at=self._now(),
            block=block,
        )
        self.nodes.append(node)
        return node

    def _has(self, node: Node) -> bool:
        return node.node_id < len(self.nodes) and self.nodes[node.node_id] is node

    def _start(self, node: Node, work: Callable[[], Awaitable[Outcome]]) -> asyncio.Task[Outcome]:
        task = asyncio.get_running_loop().create_task(
            self._run(node, work), name=f"step {self.step} {node.name}"
        )
        self._tasks.append(task)
        return task

    def lost(self, service: str) -> None:
        """Told that a replaceable service is lost, with all experience that it held."""
        self._lineage.lost(service)

    def newest(self, outcome: asyncio.Future[Outcome]) -> asyncio.Future[Outcome]:
        """The answer that takes the place of one that is lost: its call is made once more."""
        # A graph that has ended makes no more calls: who still reads is told that it is too late.
        return outcome if self._has_ended else self._lineage.newest(outcome)

    async def _leased(
        self, node: Node, work: Callable[[], Awaitable[Outcome]], or_another: bool = False
    ) -> Outcome:
        order = (self.step, node.node_id)
        pool = await self._pools.acquire(node.service, order, or_another=or_another)
        try:
            assert pool.holder is not None
            node.service, node.pool = pool.holder, pool.name
            if pool.sleeper is not None:
                node.phases |= await pool.switch_to(node.service, self.step)
            return await self._started(node, work)
        finally:
            pool.pass_on()

    async def _started(self, node: Node, work: Callable[[], Awaitable[Outcome]]) -> Outcome:
        node.started_at = self._now()
        node.state = NodeState.RUNNING
        if not self._is_traced:
            return await work()
        with tracing.span(
            node.name, parent=self._span, step=self.step, role=node.service, operation=node.method,
            block=node.block, waited_seconds=node.started_at - node.queued_at,
        ) as span:  # fmt: skip
            outcome = await work()
            tracing.note(
                span,
                num_tokens=outcome.report.num_tokens,
                num_bytes=sum(outcome.report.fetched_bytes.values()),
                policy_version=outcome.policy_version,
            )
        return outcome

    async def _run(self, node: Node, work: Callable[[], Awaitable[Outcome]]) -> Outcome:
        try:
            outcome = await work()
        except asyncio.CancelledError:
            node.state = NodeState.CANCELLED
            if isinstance(self._failure, Exception):
                # Another step may wait for it: it is told why this one does not come.
                raise self._failure from None
            raise
        except (RunError, StateStoreError) as error:
            node.state = NodeState.FAILED
            self.abort(error)
            raise
        except Exception as error:
            node.state = NodeState.FAILED
            failure = NodeFailedError(node.name, self.step, node.service, error)
            failure.__cause__ = error
            self.abort(failure)
            raise failure from error
        finally:
            if node.started_at is not None:
                node.ended_at = self._now()
        node.answered(outcome)
        return outcome

    def abort(self, error: BaseException) -> None:
        """Ends the step with this error: cancels what runs and what waits."""
        if self._failure is not None:
            return
        self._failure = error
        current = asyncio.current_task()
        for task in self._tasks:
            if isinstance(task, asyncio.Task) or not isinstance(error, Exception):
                if task is not current:
                    task.cancel()
            elif not task.done():
                # A block that will not come: another step that waits for it is told why.
                task.set_exception(error)

    def running(self, service: str | None = None) -> list[Node]:
        """Nodes whose call is in flight, of one service or of all."""
        return [
            node
            for node in self.nodes
            if node.state is NodeState.RUNNING and service in (None, node.service)
        ]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            self.abort(error)
        await self.finish()

    async def _settle(self) -> None:
        """Waits for all tasks, also for those that a deferred part still makes."""
        num_seen = -1
        while num_seen != len(self._tasks):
            num_seen = len(self._tasks)
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def finish(self) -> None:
        """Returns when every node is done, or raises the one error that ended the step."""
        try:
            await self._settle()
        except asyncio.CancelledError:
            for task in self._tasks:
                task.cancel()
            await self._settle()
            raise
        finally:
            self._has_ended = True
            self._lineage.forget()
            tracing.end(self._span, self._failure)
        for node in self.nodes:
            # Cancelled before it could begin to wait.
            if node.state is NodeState.QUEUED:
                node.state = NodeState.CANCELLED
        if self._failure is not None:
            raise self._failure


def _check_rows(
    node: Node,
    read: experience_pb2.ExperienceRef | None,
    made: experience_pb2.ExperienceRef | None,
) -> None:
    """Raises where columns that are to be joined to rows are not over these rows."""
    if read is not None and made is not None and made.num_rows != read.num_rows:
        raise RunError(
            f"step {node.step}: {node.name} was given {read.num_rows} rows and answered with "
            f"{made.num_rows}: the {node.service} must answer with one value for each row"
        )
