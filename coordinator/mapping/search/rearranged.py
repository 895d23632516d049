"""Step that was recorded, rearranged: what it would take with other pools, blocks or sizes.

The model behind self-tuning. Calls keep the seconds that were measured; what settings change is
when they may start (pools, blocks), and by which factor they take longer (requests in flight, and
what the simulators say of micro-batches and rows that are decoded together).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rolemesh.coordinator.mapping.job.tasks import RecordedNode
from rolemesh.coordinator.recipe.role_names import role_of
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.recipe.sections.schedule import SyncSamplerSpec
from rolemesh.engine.specs import OutsideRewardSpec

_IN_BLOCKS = (
    *("compute_values", "compute_logprobs", "compute_reference_logprobs"),
    *("compute_teacher_logprobs", "compute_reward", "compute_cost"),
)
"""Methods that work block by block where their rows come so."""

Factor = Callable[[str, str], float]
"""By which a call takes longer than in the recorded step; gets role and method."""


def same_size(role: str, method: str) -> float:
    """The factor of calls whose sizes are left as they were."""
    return 1.0


class TimedNode(RecordedNode, Protocol):
    """What is read of a node that was made."""

    service: str
    block: int | None
    num_rows: int
    ready_at: float | None
    started_at: float | None

    @property
    def seconds(self) -> float:
        """Between start and end."""


@dataclass(slots=True)
class _Call:
    """One call of the algorithm: a node, or all nodes of its blocks."""

    service: str
    method: str
    inputs: set[int] = field(default_factory=set)
    """Calls that it waits for."""
    seconds: float = 0.0
    rows: list[int] = field(default_factory=list)
    """Of each block."""
    ready: list[float | None] = field(default_factory=list)
    started: float | None = None


@dataclass(slots=True)
class _Part:
    """What holds its pool once."""

    pool: str
    seconds: float
    after: list[tuple[int, float]] = field(default_factory=list)
    """Parts, and which share of each has to have passed."""


@dataclass(slots=True)
class _Arranged:
    """Calls as parts that pools take in turn."""

    parts: list[_Part] = field(default_factory=list)
    ends: dict[int, list[int]] = field(default_factory=dict)
    """Parts of each call."""
    pieces: dict[int, list[tuple[int, int, float]]] = field(default_factory=dict)
    """Of each call that gives its rows in blocks: part, rows, share of the part's time."""

    def known(self, call: _Call) -> list[int]:
        """What the call waits for of this step."""
        return sorted(call.inputs & self.ends.keys())


class RecordedStep:
    """The calls of a step that was made by a recipe.

    Example: generation of 4 s and a judge of 2 s in one pool take 6 s. With a pool for each and
    blocks of half the rows, of which the first is there after 2 s, they take 5 s.
    """

    def __init__(self, recipe: Recipe, nodes: Sequence[TimedNode]) -> None:
        """Reads the nodes.

        Args:
            recipe: That the step was made by.
            nodes: Of the step, in the order in which they were made.
        """
        self._recipe = recipe
        self._calls: list[_Call] = []
        places: dict[int, int] = {}
        newest: dict[tuple[str, str], int] = {}
        for node in nodes:
            name = node.service, node.method
            if not node.block or name not in newest:
                newest[name] = len(self._calls)
                self._calls.append(_Call(node.service, node.method, started=node.started_at))
            places[node.node_id] = place = newest[name]
            call = self._calls[place]
            call.inputs |= {places[one] for one in node.inputs if one in places} - {place}
            call.seconds += node.seconds
            call.rows.append(node.num_rows)
            call.ready.append(node.ready_at)
        self._arrivals = {
            place: self._arrival(place)
            for place, call in enumerate(self._calls)
            if call.method == "generate"
        }

    def seconds(self, recipe: Recipe, factor: Factor = same_size) -> float:
        """What the calls of the step would take by another recipe of the same algorithm.

        Args:
            recipe: With other pools, blocks or requests in flight, and no other differences.
            factor: By which calls of models take longer.
        """
        pools = {role: name for name, pool in recipe.pools.items() for role in pool.roles}
        is_ahead = not isinstance(recipe.schedule.sampler, SyncSamplerSpec)
        made = _Arranged()
        ahead: dict[str, float] = {}
        for place, call in enumerate(self._calls):
            role = role_of(call.service)
            spent = call.seconds * factor(role, call.method)
            if is_ahead and role == "rollout":
                # Its rows are there when the step begins.
                ahead[call.service] = ahead.get(call.service, 0.0) + spent
                continue
            pool = call.service if len(recipe.services_of(role)) > 1 else pools[role]
            incoming = self._incoming(place, made) if call.method in _IN_BLOCKS else None
            if incoming is None:
                after = [(part, 1.0) for one in made.known(call) for part in made.ends[one]]
                blocks = [(sum(call.rows), after)]
            else:
                blocks = incoming
            rows = [number for number, _ in blocks]
            first = len(made.parts)
            for (_, after), part_s in zip(
                blocks, self._asked(call, role, recipe, spent, rows), strict=True
            ):
                made.parts.append(_Part(pool, part_s, after))
            made.ends[place] = list(range(first, len(made.parts)))
            if call.method == "generate":
                made.pieces[place] = [
                    (first, number, self._arrivals[place](stop))
                    for number, stop in _blocks(rows[0], recipe.schedule.sampler.block_rows)
                ]
            elif incoming is not None:
                made.pieces[place] = [
                    (first + index, number, 1.0) for index, number in enumerate(rows)
                ]
        return max([_finish(made.parts), *ahead.values()])

    def _incoming(
        self, place: int, made: _Arranged
    ) -> list[tuple[int, list[tuple[int, float]]]] | None:
        """Rows of each block that a call works on, and what it waits for; None: of all rows."""
        inputs = made.known(self._calls[place])
        cut = [one for one in inputs if one in made.pieces]
        if not cut:
            return None
        # Several generations follow one another; what was judged of them has the same blocks.
        sampled = [one for one in cut if self._calls[one].method == "generate"] or cut[:1]
        judged = [made.pieces[one] for one in cut if one not in sampled]
        whole = [(part, 1.0) for one in inputs if one not in cut for part in made.ends[one]]
        found: list[tuple[int, list[tuple[int, float]]]] = []
        for part, rows, share in (piece for one in sampled for piece in made.pieces[one]):
            before = [(one[len(found)][0], 1.0) for one in judged if len(found) < len(one)]
            found.append((rows, [(part, share), *whole, *before]))
        return found

    def _asked(
        self, call: _Call, role: str, recipe: Recipe, spent: float, rows: Sequence[int]
    ) -> list[float]:
        """Seconds of a call's blocks: requests go out in rounds, models compute by rows."""
        before, after = (_source(one, role) for one in (self._recipe, recipe))
        if before is None or after is None or call.method not in _IN_BLOCKS:
            total = sum(rows)
            return [spent * number / total if total else spent / len(rows) for number in rows]
        rounds = sum(_rounds(number, before) for number in call.rows) or 1
        return [spent * _rounds(number, after) / rounds for number in rows]

    def _arrival(self, place: int) -> Callable[[int], float]:
        """Which share of a generation's time has passed when its first so many rows are there."""
        call = self._calls[place]
        rows = call.rows[0] or 1
        known = [(0, 0.0)]
        reader = next(
            (
                one
                for one in self._calls
                if place in one.inputs and len(one.rows) > 1 and sum(one.rows) == rows
            ),
            None,
        )
        if reader is not None and call.started is not None and call.seconds:
            for number, ready in zip(reader.rows, reader.ready, strict=True):
                share = 1.0 if ready is None else (ready - call.started) / call.seconds
                known.append((known[-1][0] + number, min(1.0, max(known[-1][1], share))))
            return lambda stop: _between(known, stop)
        section = self._recipe.sampler
        together = (None if section is None else section.max_num_seqs) or rows
        waves = math.ceil(rows / together)
        return lambda stop: math.ceil(stop / together) / waves


def _blocks(rows: int, block_rows: int) -> list[tuple[int, int]]:
    """Rows of each block, and how many rows there are up to its end."""
    if not 0 < block_rows < rows:
        return [(rows, rows)]
    stops = [*range(block_rows, rows, block_rows), rows]
    return [(stop - start, stop) for start, stop in zip([0, *stops], stops, strict=False)]


def _between(known: Sequence[tuple[int, float]], rows: int) -> float:
    """The share on the line through what is known."""
    index = bisect.bisect_left(known, rows, key=lambda one: one[0])
    if index == len(known):
        return 1.0
    (before, low), (after, high) = known[max(0, index - 1)], known[index]
    return high if after == before else low + (high - low) * (rows - before) / (after - before)


def _source(recipe: Recipe, role: str) -> OutsideRewardSpec | None:
    """Who judges outside, where that is one source."""
    source = getattr(getattr(recipe, role, None), "source", None)
    return source if isinstance(source, OutsideRewardSpec) else None


def _rounds(rows: int, source: OutsideRewardSpec) -> int:
    """How often the requests of so many rows follow one another."""
    return math.ceil(math.ceil(rows / source.batch_size) / source.concurrency)


def _finish(parts: Sequence[_Part]) -> float:
    """When the last part ends, if a pool takes of those that are ready the first that was asked."""
    starts: dict[int, float] = {}
    ends: dict[int, float] = {}
    free: dict[str, float] = {}
    waiting = list(range(len(parts)))
    while waiting:
        best, begin = waiting[0], math.inf
        for one in waiting:
            part = parts[one]
            if all(other in starts for other, _ in part.after):
                ready = max(
                    (starts[other] + share * parts[other].seconds for other, share in part.after),
                    default=0.0,
                )
                start = max(ready, free.get(part.pool, 0.0))
                if start < begin:
                    best, begin = one, start
        waiting.remove(best)
        starts[best], ends[best] = begin, begin + parts[best].seconds
        free[parts[best].pool] = ends[best]
    return max(ends.values(), default=0.0)
