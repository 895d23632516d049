"""Base of the role handles: it names an operation, runs it as a node and records the answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from google.protobuf.message import Message

from rolemesh.coordinator.dataflow.calls.connection import (
    OnPhase,
    RoleConnection,
    summarize_reference,
)
from rolemesh.coordinator.dataflow.errors import RunError
from rolemesh.coordinator.dataflow.futures import (
    CallFuture,
    ExperienceFuture,
    Node,
    NodeKind,
    Outcome,
)
from rolemesh.coordinator.dataflow.graph import OnBlock, StepGraph
from rolemesh.coordinator.dataflow.journal import Journal
from rolemesh.coordinator.recipe.algorithm.algorithms import AlgorithmSection
from rolemesh.coordinator.recipe.algorithm.parts import AlgorithmParts
from rolemesh.coordinator.recipe.role_names import kind_of, teacher_role
from rolemesh.engine.specs import OneTeacherSpec, SamplingSpec, TeacherSpec
from rolemesh.rpc.calls.expert_loads import checked_loads
from rolemesh.rpc.calls.result_call import ProgressCallback
from rolemesh.rpc.calls.service_client import ServiceClient
from rolemesh.v1 import experience_pb2, operation_pb2, rollout_pb2, trainer_pb2


class PromptCursor:
    """Positions in the data that training has not used yet. It is part of a checkpoint."""

    def __init__(self, position: int = 0) -> None:
        self.position = position

    def take(self, count: int) -> PromptBatch:
        """The next positions."""
        batch = PromptBatch(start=self.position, count=count, cursor=self)
        self.position += count
        return batch


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """Names rows of the data without holding them: positions in what a role has loaded."""

    start: int
    count: int
    is_held_out: bool = False
    batch_start: int | None = None
    """First position of the batch that these are a part of; None where they are all of it."""
    cursor: PromptCursor | None = field(default=None, compare=False)
    """Where further positions come from."""

    def more(self, count: int) -> PromptBatch:
        """Positions that no step has used yet.

        Raises:
            ValueError: These are held-out rows, of which there are no more.
        """
        if self.cursor is None:
            raise ValueError(f"no further prompts beside {self.start} to {self.start + self.count}")
        return replace(self.cursor.take(count), batch_start=self._batch_start)

    def part(self, start: int, count: int) -> PromptBatch:
        """Some of these positions, counted from the first of them."""
        return PromptBatch(self.start + start, count, self.is_held_out, self._batch_start)

    @property
    def _batch_start(self) -> int:
        return self.start if self.batch_start is None else self.batch_start

    def to_proto(self, *, is_pretraining: bool = False) -> rollout_pb2.PromptSlice:
        """As it travels."""
        split = rollout_pb2.SPLIT_HELD_OUT if self.is_held_out else rollout_pb2.SPLIT_TRAIN
        if is_pretraining:
            split = rollout_pb2.SPLIT_PRETRAINING
        return rollout_pb2.PromptSlice(
            split=split, start=self.start, count=self.count, batch_start=self.batch_start
        )


class Sampler(ABC):
    """Samples the trajectories of a step. Of itself it begins none early, and brings no weights."""

    steps_ahead = 0
    """Steps after the one that is about to be made that may be sampled already."""
    steps_ahead_while_training = 0
    """The same, as soon as the step has sampled."""

    @abstractmethod
    def generate(
        self, context: StepContext, prompts: PromptBatch, sampling: SamplingSpec
    ) -> ExperienceFuture:
        """Completions of the prompts."""

    def begin(self, context: StepContext, prompts: PromptBatch) -> None:  # noqa: B027
        """Begins to sample a step's prompts before its algorithm asks for them."""

    def step_ends(self, context: StepContext) -> None:  # noqa: B027
        """Told when all nodes of a step exist."""

    def use(self, services: Sequence[str]) -> None:  # noqa: B027
        """Told, between two steps, which services sample from here on."""

    async def weights_brought(self) -> None:  # noqa: B027
        """Returns once all that was asked to be brought to samplers has arrived there."""

    async def bring_again(self, new: RoleConnection, on_phase: OnPhase) -> None:  # noqa: B027
        """Gives the new process of a lost service the weights that the lost one had."""


@dataclass(frozen=True)
class StepContext:
    """What the handles of one step share."""

    step: int
    algorithm: AlgorithmSection
    """The recipe's section, with the numeric parts that calls ask for."""
    dataflow: StepGraph
    journal: Journal
    connections: Mapping[str, RoleConnection]
    """By the name of the service."""
    sampler: Sampler
    """Who samples, and when."""
    on_phase: OnPhase
    """Is told how far calls are."""
    is_evaluation: bool = False
    """Evaluation has nodes and operations of its own, so that training's stay the same, and its
    updates compute losses alone."""
    may_drop: frozenset[str] = frozenset()
    """Roles that may leave rows out of the step."""
    reward_columns: tuple[str, ...] = ()
    """Columns with the rewards of one source each, which the reward role makes besides."""
    served_by_actor: frozenset[str] = frozenset()
    """Roles without a service, for which the actor answers."""
    teacher: TeacherSpec | None = None
    """The recipe's section, which says what the teacher is told."""
    policy_updates: list[CallFuture] = field(default_factory=list)
    """Updates of the actor that the step asks for."""
    trained_on: list[ExperienceFuture] = field(default_factory=list)
    """What the updates of the step were given."""

    def services_of(self, role: str) -> list[str]:
        """Services of the role that take part; none where it has none."""
        answering = (self.services_of_player(one) for one in self.players_of(role))
        return list(dict.fromkeys(name for services in answering for name in services))

    def services_of_player(self, player: str) -> list[str]:
        """Services that answer for one that `players_of` names."""
        answers = "actor" if player in self.served_by_actor else player
        return [name for name, known in self.connections.items() if known.role == answers]

    def players_of(self, role: str) -> tuple[str, ...]:
        """The role itself; of several teachers each.

        Of a reference that the recipe does not have, the teacher or the teachers: the KL is taken
        to them then.
        """
        if role == "reference" and role not in self.served_by_actor:
            has_service = any(known.role == role for known in self.connections.values())
            role = role if has_service else "teacher"
        if role == "teacher" and self.teacher is not None and self.teacher.named is not None:
            return tuple(map(teacher_role, self.teacher.named))
        return (role,)

    def teacher_of(self, player: str) -> OneTeacherSpec | None:
        """The section of one that `players_of` names; None where it is no teacher."""
        if self.teacher is None or kind_of(player) != "teacher":
            return None
        if self.teacher.named is None:
            return self.teacher
        return self.teacher.named[player.removeprefix(teacher_role(""))]

    @property
    def parts(self) -> AlgorithmParts:
        """The numeric parts of the algorithm; one that the recipe does not give raises."""
        return self.algorithm.parts


Call = Callable[
    [
        ServiceClient,
        operation_pb2.OperationKey,
        experience_pb2.ExperienceRef,
        ProgressCallback,
    ],
    Awaitable[Message],
]
"""Makes one call and gives its result. It gets the client of its service, its key, the experience
that it reads (an empty one where it reads none), and whom to tell how far it is."""

SampleCall = Callable[
    ["ServiceNodes", operation_pb2.OperationKey, OnBlock, ProgressCallback], Awaitable[Message]
]
"""Makes one call that hands out blocks while it runs: gets the service that it is of besides."""


class ServiceNodes:
    """Calls of one service within a step, or of any of several."""

    def __init__(self, context: StepContext, service: str, *others: str) -> None:
        """Takes the service's connection.

        Args:
            context: Of the step.
            service: Name of the service, which is its role's where the role has one alone.
            others: Further services of the role, each of which may make the calls as well: blocks
                of rows are dealt out over all of them, and go to one that is free.
        """
        self.context = context
        self.service = service
        self.connection = context.connections[service]
        self._others = others

    @property
    def client(self) -> ServiceClient:
        """Makes the calls."""
        return self.connection.client

    def node(
        self,
        kind: NodeKind,
        method: str,
        call: Call,
        reads: ExperienceFuture | None = None,
        produces: Iterable[str] = (),
        *,
        after: Iterable[CallFuture] = (),
        is_leased: bool = True,
    ) -> CallFuture:
        """Makes the call a node, or a node a block where its experience comes in blocks.

        Args:
            kind: What it does to the mesh.
            method: Name of the call, for keys and people.
            call: Makes it.
            reads: Experience that it reads; it may be worked on block by block.
            produces: Columns that it gives. A call that gives none takes all rows at once.
            after: Calls that must have been answered before, beside what it reads.
            is_leased: Whether it waits for its pool.
        """
        produces, after = tuple(produces), tuple(after)
        num_blocks = reads.num_blocks if reads is not None and produces else 1
        together = (self.service, *self._others)

        def part(service: str, block: int | None) -> CallFuture:
            named, key = self._named(kind, service, method)

            def work(
                node: Node, experience: experience_pb2.ExperienceRef | None
            ) -> Awaitable[Outcome]:
                chosen = ServiceNodes(self.context, node.service)
                ref = experience_pb2.ExperienceRef() if experience is None else experience
                return chosen._made(
                    key, method, lambda on_progress: call(chosen.client, key, ref, on_progress)
                )

            return self.context.dataflow.call(
                kind=named,
                service=service,
                method=method,
                sequence=key.sequence,
                work=work,
                reads=reads,
                produces=produces,
                block=block,
                after=after,
                is_leased=is_leased,
                or_another=bool(self._others),
            )

        parts = [
            part(together[block % len(together)], None if num_blocks == 1 else block)
            for block in range(num_blocks)
        ]
        return CallFuture(
            nodes=tuple(node for part in parts for node in part.nodes),
            outcomes=tuple(outcome for part in parts for outcome in part.outcomes),
            columns=frozenset(produces),
        )

    def sample_node(
        self,
        call: SampleCall,
        *,
        num_blocks: int,
        produces: Iterable[str],
        after: Iterable[CallFuture],
        or_another: bool,
    ) -> CallFuture:
        """Makes a generation, which comes in blocks, a node; see `StepGraph.sample`."""
        method = "generate"
        kind, key = self._named(NodeKind.SAMPLE, self.service, method)

        def work(node: Node, on_block: OnBlock) -> Awaitable[Outcome]:
            chosen = ServiceNodes(self.context, node.service)
            return chosen._made(
                key, method, lambda on_progress: call(chosen, key, on_block, on_progress)
            )

        return self.context.dataflow.sample(
            kind=kind,
            service=self.service,
            method=method,
            sequence=key.sequence,
            work=work,
            num_blocks=num_blocks,
            produces=produces,
            after=after,
            or_another=or_another,
        )

    def _named(
        self, kind: NodeKind, service: str, method: str
    ) -> tuple[NodeKind, operation_pb2.OperationKey]:
        context, operation = self.context, f"{service}.{method}"
        if context.is_evaluation:
            kind, operation = NodeKind.EVAL, f"evaluate.{operation}"
        return kind, context.journal.next_key(context.step, operation)

    async def _made(
        self,
        key: operation_pb2.OperationKey,
        method: str,
        call: Callable[[ProgressCallback], Awaitable[Message]],
    ) -> Outcome:
        context = self.context

        def read(result: Message) -> Outcome:
            try:
                return outcome_of(result)
            except ValueError as error:
                raise RunError(
                    f"step {context.step}: {self.service}.{method} has answered what it must not: "
                    f"{error}"
                ) from error

        def note(result: Message) -> dict[str, Any]:
            outcome = read(result)
            if outcome.policy_version is not None:
                self.connection.policy_version = outcome.policy_version
            return _summarize(outcome)

        result = await self.connection.make(
            key, method, call, note, journal=context.journal, on_phase=context.on_phase
        )
        return read(result)


class RoleHandle(ServiceNodes):
    """What an algorithm holds of a role."""

    role: str

    def __init__(self, context: StepContext) -> None:
        super().__init__(context, *context.services_of(self.role))

    def infer(
        self,
        method: str,
        call: Call,
        reads: ExperienceFuture | None = None,
        produces: Iterable[str] = (),
        *,
        after: Iterable[CallFuture] = (),
    ) -> ExperienceFuture:
        """Makes a call that changes no weights a node, as `node` says, and gives its experience."""
        part = self.node(NodeKind.INFER, method, call, reads, produces, after=after)
        return ExperienceFuture(self.context.dataflow, (part,))


def outcome_of(result: Any) -> Outcome:
    """What a result message says; each has a report, and experience or a version besides.

    Raises:
        ValueError: Its loads of experts are not what trainer.proto says.
    """
    fields = result.DESCRIPTOR.fields_by_name
    has_experience = "experience" in fields
    if isinstance(result, trainer_pb2.SelectGroupsResult):
        # The only result that may come without: no group was selected. Another one that lacks its
        # experience has no rows, which the step refuses by the name of its role.
        has_experience = result.HasField("experience")
    return Outcome(
        report=result.report,
        experience=result.experience if has_experience else None,
        policy_version=result.policy_version if "policy_version" in fields else None,
        expert_loads=checked_loads(result.expert_loads) if "expert_loads" in fields else {},
    )


def _summarize(outcome: Outcome) -> dict[str, Any]:
    summary: dict[str, Any] = {"num_tokens": outcome.report.num_tokens}
    if outcome.policy_version is not None:
        summary["policy_version"] = outcome.policy_version
    if outcome.experience is not None:
        summary |= summarize_reference(outcome.experience)
    return summary
