"""Tasks of a step: what the recorded graph says is called, of whom, and after what.

A task is one node of the dataflow's graph. Roles that share devices make their calls one after
another, in the order in which the algorithm makes them; all else that can run side by side does.
Since that order does not depend on durations, no task that gets shorter makes a step longer, which
the search's bounds stand on. The dataflow itself is freer: of calls that wait for a pool it takes
one of the role that is awake.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol


class TaskKind(StrEnum):
    """What a task does, as far as its seconds are concerned."""

    GENERATE = "generate"
    SCORE = "score"
    """A forward pass of a model over the rows, or a rule that judges them."""
    UPDATE = "update"
    PUBLISH = "publish"
    """The actor lays out its weights for samplers that stand apart."""
    TAKE = "take"
    """Such a sampler fetches them."""
    SMALL = "small"
    """Numbers of rows alone: advantages, reading data."""


class RecordedNode(Protocol):
    """What is read of a node of the dataflow's graph."""

    node_id: int
    method: str
    sequence: int
    inputs: tuple[int, ...]

    @property
    def role(self) -> str:
        """Who is called."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One call of a step."""

    index: int
    """Its place in the order of calls."""
    role: str
    kind: TaskKind
    method: str
    after: tuple[int, ...] = ()
    """Tasks that must have ended before."""
    share: float = 1.0
    """Its rows, as a share of those that the step trains on."""

    @property
    def name(self) -> str:
        """E.g. "actor.update"."""
        return f"{self.role}.{self.method}"


_KINDS: Mapping[str, TaskKind] = {
    "generate": TaskKind.GENERATE,
    "update": TaskKind.UPDATE,
    "publish_weights": TaskKind.PUBLISH,
    "update_weights": TaskKind.TAKE,
    "compute_values": TaskKind.SCORE,
    "compute_logprobs": TaskKind.SCORE,
    "compute_reference_logprobs": TaskKind.SCORE,
    "compute_teacher_logprobs": TaskKind.SCORE,
    "compute_reward": TaskKind.SCORE,
    "compute_cost": TaskKind.SCORE,
    "compute_loss": TaskKind.SCORE,
}


@dataclass(frozen=True, slots=True)
class Step:
    """All tasks of a step, in the order of calls.

    Example: in PPO with all roles in one pool a step takes the sum of its tasks; with the critic
    apart, the larger one of both updates counts.
    """

    tasks: tuple[Task, ...]
    ahead: frozenset[str] = frozenset()
    """Roles whose tasks belong to later steps and run beside this one: a sampler that is ahead."""
    beside_s: float = 0.0
    """Seconds of a step beside its tasks, the same for all placements."""

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that are called, in the order of their first call."""
        return tuple(dict.fromkeys(task.role for task in self.tasks))

    def of(self, role: str) -> tuple[Task, ...]:
        """The tasks of a role."""
        return tuple(task for task in self.tasks if task.role == role)


def step_of(
    nodes: Sequence[RecordedNode], *, samples: int = 1, ahead: Collection[str] = ()
) -> Step:
    """The tasks of a recorded or planned graph.

    Args:
        nodes: The graph's nodes, in the order in which they were made, one a call.
        samples: Completions of a prompt. A second generation of a step is a baseline of one
            completion a prompt.
        ahead: Roles that sample for later steps.
    """
    tasks: list[Task] = []
    places: dict[int, int] = {}
    for node in nodes:
        kind = _KINDS.get(node.method, TaskKind.SMALL)
        after = tuple(sorted({places[one] for one in node.inputs if one in places}))
        share = 1.0
        if kind is TaskKind.GENERATE and node.sequence:
            share = 1 / samples
        elif after:
            # What reads the baseline alone has its rows.
            share = max(tasks[one].share for one in after)
        places[node.node_id] = len(tasks)
        tasks.append(
            Task(
                index=len(tasks),
                role=node.role,
                kind=kind,
                method=node.method,
                after=after,
                share=share,
            )
        )
    return Step(tuple(tasks), frozenset(ahead))


def sampled_step(step: Step, *, reference: tuple[str, str] | None) -> Step:
    """The step of an algorithm that samples until it has enough groups, with one round.

    Its planned graph ends where the first answer decides what is asked next: generation, judging
    and the reference's log-probs stand before what it has.

    Args:
        step: What was planned.
        reference: Role and method that give the reference's log-probs; None: none are asked for.
    """
    first = [("actor", "generate"), ("reward", "compute_reward")]
    first += [reference] if reference is not None else []
    tasks = [
        Task(
            index=index, role=role, kind=_KINDS[method], method=method, after=(0,) if index else ()
        )
        for index, (role, method) in enumerate(first)
    ]
    ends = tuple(range(len(tasks)))
    for task in step.tasks:
        moved = tuple(one + len(ends) for one in task.after)
        tasks.append(replace(task, index=len(tasks), after=tuple(sorted({*ends, *moved}))))
    return replace(step, tasks=tuple(tasks))


class Timeline:
    """When the tasks of a step start and end, for one placement.

    Example: for the pools {actor} and {critic, reward}, critic and reward queue up; the actor's
    tasks wait for what they read alone.
    """

    def __init__(self, step: Step, pools: Mapping[str, int]) -> None:
        """Fixes what waits for what.

        Args:
            step: The tasks.
            pools: Number of its pool, by role. A role that is not named shares with none.
        """
        self.step = step
        self._ahead = [task.index for task in step.tasks if task.role in step.ahead]
        last: dict[object, int] = {}
        self._before: list[tuple[int, ...]] = []
        for task in step.tasks:
            pool = pools.get(task.role, task.role)
            before = set(task.after)
            if pool in last:
                before.add(last[pool])
            last[pool] = task.index
            if task.role not in step.ahead:
                # Its rows are there when the step begins.
                before -= set(self._ahead)
            self._before.append(tuple(sorted(before)))

    def ends(self, seconds: Sequence[float]) -> list[float]:
        """When each task ends, the step's begin being 0."""
        ends: list[float] = []
        for duration, before in zip(seconds, self._before, strict=True):
            start = 0.0
            for one in before:
                if ends[one] > start:
                    start = ends[one]
            ends.append(start + duration)
        return ends

    def ends_from(
        self, now: float, known: Mapping[int, float], seconds: Sequence[float]
    ) -> list[float]:
        """When each task of a step that is being made ends.

        Args:
            now: The present time; what has not begun begins no earlier.
            known: Ends of the tasks that have begun, by their index: as they were, or will be.
            seconds: Of each task; those of tasks in `known` are not read.
        """
        ends: list[float] = []
        for index, (duration, before) in enumerate(zip(seconds, self._before, strict=True)):
            if index in known:
                ends.append(known[index])
            else:
                ends.append(max([now, *(ends[one] for one in before)]) + duration)
        return ends

    def crowded(self, seconds: Sequence[float], ranks: Sequence[int], crowd: float) -> list[float]:
        """Seconds of tasks whose ranks all compute on one machine's CPUs, and slow each other.

        Args:
            seconds: Of each task, if it had the machine for itself.
            ranks: That compute in each.
            crowd: Part by which each further rank slows a rank.

        Example: two tasks of one rank and a second, side by side with 0.5, take 1.5 seconds each.
        """
        left, found = list(seconds), [0.0] * len(seconds)
        waiting = set(range(len(left)))
        while waiting:
            at_work = [one for one in waiting if waiting.isdisjoint(self._before[one])]
            slowness = 1 + crowd * max(0, sum(ranks[one] for one in at_work) - 1)
            span = min(left[one] for one in at_work)
            for one in at_work:
                left[one] -= span
                found[one] += span * slowness
            waiting -= {one for one in at_work if left[one] <= 0}
        return found

    def critical(self, seconds: Sequence[float]) -> list[int]:
        """The tasks that decide when the step ends, the first one first."""
        ends = self.ends(seconds)
        own = [index for index in range(len(ends)) if index not in self._ahead]
        rest = max((ends[index] for index in own), default=0.0)
        if self._ahead and sum(seconds[index] for index in self._ahead) > rest:
            return list(self._ahead)
        path = [max(own, key=lambda index: ends[index])]
        while before := self._before[path[-1]]:
            path.append(max(before, key=lambda index: ends[index]))
        return path[::-1]

    def period(self, seconds: Sequence[float]) -> float:
        """Seconds of a step in a long run.

        Where a sampler is ahead, the slower one of sampling and the rest: its queue of finished
        trajectories is either empty or full.
        """
        ends = self.ends(seconds)
        beside = self.step.beside_s
        if not self._ahead:
            return max(ends, default=0.0) + beside
        own = sum(seconds[index] for index in self._ahead)
        rest = [end for index, end in enumerate(ends) if index not in self._ahead]
        return max(own, max(rest, default=0.0) + beside)
