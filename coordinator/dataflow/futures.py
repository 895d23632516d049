"""Futures of role calls: the record of a call's node, and futures of its results."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, Self

from rolemesh.coordinator.dataflow.errors import RunError
from rolemesh.coordinator.recipe.role_names import role_of
from rolemesh.rpc.calls.expert_loads import Loads
from rolemesh.rpc.experience.references import (
    by_column,
    concat_references,
    join_parts,
    join_references,
)
from rolemesh.rpc.notes import bounded
from rolemesh.v1 import experience_pb2


class ColumnMissingError(ValueError):
    """Experience lacks a column that a call reads."""

    def __init__(self, column: str, columns: Iterable[str]) -> None:
        """Takes the column, and those that the experience has."""
        super().__init__(
            f"no node produces the column {column!r}; the experience has "
            f"{', '.join(sorted(columns))}: join what produces it with |= first"
        )
        self.column = column


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
    """One call of a service, as it was made and as it went. Times are Unix seconds."""

    node_id: int
    step: int
    kind: NodeKind
    service: str
    method: str
    pool: str
    sequence: int
    inputs: tuple[int, ...]
    """Ids of the nodes whose columns this one reads."""
    queued_at: float
    block: int | None = None
    """Number of the block of rows that it works on; None: all rows."""
    num_rows: int = 0
    """Rows of the experience that it read or made."""
    ready_at: float | None = None
    """When all that it waits for existed; then it waits for its pool."""
    started_at: float | None = None
    ended_at: float | None = None
    state: NodeState = NodeState.QUEUED
    num_tokens: int = 0
    num_bytes: int = 0
    """Bytes of experience that the service pulled for it."""
    pulled_bytes: dict[str, int] = field(default_factory=dict)
    """The same by the way that they took, e.g. "shm" or "grpc"."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds by phase inside the service."""
    peak_bytes: dict[str, dict[int, int]] = field(default_factory=dict)
    """Most memory held while a phase computed, by phase and rank."""
    metrics: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What the service wants people to know of a call that has succeeded."""
    policy_version: int | None = None
    """Version after an update; None for other kinds."""
    expert_loads: Loads = field(default_factory=dict)
    """Of an update of a mixture of experts. It is no part of the record: the run keeps it apart."""

    @property
    def name(self) -> str:
        """e.g. "actor.update"."""
        return f"{self.service}.{self.method}"

    @property
    def role(self) -> str:
        """The role that the service is one of, e.g. "rollout" of "rollout-1"."""
        return role_of(self.service)

    @property
    def seconds(self) -> float:
        """Time between start and end, 0 while it has not ended."""
        if self.started_at is None or self.ended_at is None:
            return 0.0
        return self.ended_at - self.started_at

    def answered(self, outcome: Outcome) -> None:
        """Takes what the service reported of the call, which is done."""
        report = outcome.report
        self.state = NodeState.DONE
        self.num_tokens = report.num_tokens
        self.pulled_bytes = dict(sorted(report.fetched_bytes.items()))
        self.num_bytes = sum(report.fetched_bytes.values())
        self.phases |= {
            phase.phase: phase.duration.seconds + phase.duration.nanos * 1e-9
            for phase in report.phases
        }
        if outcome.experience is not None:
            self.num_rows = outcome.experience.num_rows
        self.peak_bytes = {}
        for peak in report.memory:
            self.peak_bytes.setdefault(peak.phase, {})[peak.rank] = peak.peak_bytes
        # Sorted: a protobuf map has no order, and records of two runs are compared.
        self.metrics = dict(sorted(report.metrics.items()))
        self.notes = bounded(report.notes)
        self.policy_version = outcome.policy_version
        self.expert_loads = outcome.expert_loads

    def to_dict(self) -> dict[str, Any]:
        """The record as plain JSON values. What it calls role is the name of the service."""
        fields = {"role" if name == "service" else name: v for name, v in self.__dict__.items()}
        del fields["expert_loads"]
        return {**fields, "kind": self.kind.value, "state": self.state.value}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        """The node of a record of `to_dict`, also of one that has been through JSON.

        Raises:
            ValueError: A field is missing, is not known, or holds what cannot be.
        """
        try:
            peaks = {
                phase: {int(rank): peak for rank, peak in by_rank.items()}
                for phase, by_rank in record["peak_bytes"].items()
            }
            fields = dict(record)
            changed = {
                "service": fields.pop("role"),
                "kind": NodeKind(record["kind"]),
                "state": NodeState(record["state"]),
                "inputs": tuple(record["inputs"]),
                "peak_bytes": peaks,
            }
            return cls(**{**fields, **changed})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"this is no record of a node ({error!r}): {record}") from error


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a service answered."""

    report: experience_pb2.CallReport
    experience: experience_pb2.ExperienceRef | None = None
    policy_version: int | None = None
    expert_loads: Loads = field(default_factory=dict)
    """How often each expert of a mixture was chosen; empty where it has told of none."""


@dataclass(frozen=True, eq=False)
class CallFuture:
    """What one call contributes to an experience: some columns, in one block or several."""

    nodes: tuple[Node, ...]
    outcomes: tuple[asyncio.Future[Outcome], ...]
    """One a block, in the order of rows."""
    columns: frozenset[str]

    @property
    def num_blocks(self) -> int:
        """Blocks in which it comes."""
        return len(self.outcomes)

    def nodes_of(self, block: int | None) -> tuple[Node, ...]:
        """The nodes behind a block, or behind all."""
        if block is None or len(self.nodes) != len(self.outcomes):
            return self.nodes
        return (self.nodes[block],)

    def outcomes_of(self, block: int | None) -> tuple[asyncio.Future[Outcome], ...]:
        """What makes a block, or all."""
        return self.outcomes if block is None else (self.outcomes[block],)

    async def result(self, block: int | None, remakes: Remakes) -> experience_pb2.ExperienceRef:
        """The reference to a block, or to all rows, once it exists.

        Args:
            block: Its number; None: all.
            remakes: Graph of the step.
        """
        made = []
        for outcome in self.outcomes_of(block):
            experience = (await outcome_of(remakes.newest(outcome))).experience
            if experience is None:
                names = ", ".join(node.name for node in self.nodes)
                raise ValueError(f"{names} answered without experience")
            made.append(experience)
        return concat_references(made)


@dataclass(frozen=True, eq=False)
class SharedCall(CallFuture):
    """The same columns by several calls, each over rows of its own, which together are all rows."""

    calls: tuple[CallFuture, ...] = ()

    @classmethod
    def of(cls, calls: Sequence[CallFuture]) -> CallFuture:
        """One future for the calls; there is one at least, and all come in as many blocks."""
        if len(calls) == 1:
            return calls[0]
        return cls(
            nodes=tuple(node for call in calls for node in call.nodes),
            outcomes=tuple(outcome for call in calls for outcome in call.outcomes),
            columns=calls[0].columns,
            calls=tuple(calls),
        )

    @property
    def num_blocks(self) -> int:
        """Blocks in which each of the calls comes."""
        return self.calls[0].num_blocks

    def nodes_of(self, block: int | None) -> tuple[Node, ...]:
        """The nodes behind a block, or behind all."""
        return tuple(node for call in self.calls for node in call.nodes_of(block))

    def outcomes_of(self, block: int | None) -> tuple[asyncio.Future[Outcome], ...]:
        """What makes a block, or all."""
        return tuple(one for call in self.calls for one in call.outcomes_of(block))

    async def result(self, block: int | None, remakes: Remakes) -> experience_pb2.ExperienceRef:
        """The reference to a block, or to all rows; see `CallFuture.result`.

        Raises:
            RuntimeError: The calls have not answered for all rows together.
        """
        blocks = range(self.num_blocks) if block is None else (block,)
        return concat_references(
            [
                join_parts([by_column(await call.result(one, remakes)) for call in self.calls])
                for one in blocks
            ]
        )


class Remakes(Protocol):
    """Graph of a step, which makes an answer again where its service is lost."""

    def newest(self, outcome: asyncio.Future[Outcome]) -> asyncio.Future[Outcome]:
        """The answer that takes the place of one that is lost; else the same."""


class ExperienceFuture:
    """Experience that exists or will exist. `a | b` joins two over the same rows.

    A column of b replaces one of the same name of a. A call that gets a joined future waits only
    for the parts whose columns it reads: after

        rollouts |= critic.compute_values(rollouts)
        rollouts |= reference.compute_logprobs(rollouts)

    the second call does not wait for the values.
    """

    def __init__(
        self, dataflow: Remakes, parts: tuple[CallFuture, ...], *, is_whole: bool = False
    ) -> None:
        self._dataflow = dataflow
        self.parts = parts
        """What the calls behind it contribute, in the order in which they were joined."""
        self._is_whole = is_whole

    def __or__(self, other: ExperienceFuture) -> ExperienceFuture:
        """The columns of both."""
        if other._dataflow is not self._dataflow:
            raise ValueError(
                f"cannot join {sorted(self.columns)} with {sorted(other.columns)}: they were made "
                "in two different steps; join futures of one step"
            )
        new = tuple(part for part in other.parts if part not in self.parts)
        return ExperienceFuture(self._dataflow, self.parts + new)

    @property
    def columns(self) -> frozenset[str]:
        """Columns that exist or will exist."""
        return frozenset().union(*(part.columns for part in self.parts))

    @property
    def num_blocks(self) -> int:
        """Blocks that can be worked on one by one; 1 where a part is whole."""
        if self._is_whole:
            return 1
        counts = {part.num_blocks for part in self.parts}
        return counts.pop() if len(counts) == 1 else 1

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes behind it, in the order in which they were joined."""
        return self.nodes_of(None)

    def nodes_of(self, block: int | None) -> tuple[Node, ...]:
        """The nodes behind a block, or behind all."""
        return tuple(node for part in self.parts for node in part.nodes_of(block))

    def outcomes_of(self, block: int | None) -> tuple[asyncio.Future[Outcome], ...]:
        """What makes a block, or all."""
        return tuple(outcome for part in self.parts for outcome in part.outcomes_of(block))

    def select(self, needs: Iterable[str], uses: Iterable[str] = ()) -> ExperienceFuture:
        """The parts with these columns, and no others.

        Args:
            needs: Columns that must be there.
            uses: Columns that are taken when they are there.

        Raises:
            ColumnMissingError: A needed column is produced by no node.
        """
        chosen: set[CallFuture] = set()
        for column in needs:
            part = self._producer(column)
            if part is None:
                raise ColumnMissingError(column, self.columns)
            chosen.add(part)
        chosen.update(part for part in map(self._producer, uses) if part is not None)
        kept = tuple(part for part in self.parts if part in chosen)
        return ExperienceFuture(self._dataflow, kept, is_whole=self._is_whole)

    def whole(self) -> ExperienceFuture:
        """The same, to be worked on at once, whatever blocks it comes in."""
        return ExperienceFuture(self._dataflow, self.parts, is_whole=True)

    def _producer(self, column: str) -> CallFuture | None:
        return next((part for part in reversed(self.parts) if column in part.columns), None)

    async def result(self, block: int | None = None) -> experience_pb2.ExperienceRef:
        """The reference, once every part exists: of one block, or of all rows."""
        references = [await part.result(block, self._dataflow) for part in self.parts]
        return join_references(references)


async def outcome_of(made: asyncio.Future[Outcome]) -> Outcome:
    """The outcome, once it is there. A reader that is cancelled does not cancel its maker.

    As `asyncio.shield`, with fewer turns of the loop: a thousand calls may wait for one outcome.
    """
    if not made.done():
        is_there: asyncio.Future[None] = made.get_loop().create_future()

        def wake(_: asyncio.Future[Outcome]) -> None:
            if not is_there.done():
                is_there.set_result(None)

        made.add_done_callback(wake)
        await is_there
    return made.result()


async def exist(parts: Iterable[CallFuture]) -> None:
    """Returns once the parts exist, or raises what kept them, also in another step."""
    outcomes = [outcome for part in parts for outcome in part.outcomes]
    if not outcomes:
        return
    await asyncio.wait(outcomes, return_when=asyncio.FIRST_EXCEPTION)
    errors = [o.exception() for o in outcomes if o.done() and not o.cancelled()]
    for error in errors:
        if error is not None:
            raise error
    if len(errors) < len(outcomes):
        raise RunError("what this waits for belongs to a step that is not made any more")


def all_of(parts: Iterable[CallFuture]) -> asyncio.Future[Outcome]:
    """One future that is there once all parts exist; else what kept them is its error."""

    async def wait() -> Outcome:
        await exist(parts)
        return Outcome(report=experience_pb2.CallReport())

    task = asyncio.get_running_loop().create_task(wait())
    # The parts tell of their errors by themselves: this one may have no reader.
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task
