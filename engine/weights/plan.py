"""Plans of transfers between two layouts: which rank sends which part of a weight to which rank.

Pure: no torch, no clock, no randomness: every rank makes the same plan from the same layouts.
A rank copies what it holds itself and receives each missing element once, from the nearest rank
that has it: the least that any plan can receive. `transfer` carries it out.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rolemesh.engine.layout.manifest import (
    ITEM_BYTES,
    Box,
    DtypeName,
    Manifest,
    ManifestError,
    Piece,
    WeightLayout,
    intersection,
    num_elements,
)
from rolemesh.engine.weights.copies import Copy, copy_between, parts_of, take

BUCKET_BYTES = 64 * 2**20
"""What a rank sends or receives in one round, unless told otherwise."""

_PARTS_A_ROUND = 4
"""Copies larger than this part of a round are cut, so that rounds can be filled: with 70B of 8
stages to 1, rounds are 90 % full on the busiest rank instead of 79 %."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """One round: every rank sends and receives its part of it at the same time.

    Copies between the same two ranks travel as one message, in this order, without padding.
    """

    copies: tuple[Copy, ...]
    """The copies of all ranks in this round; source and target of each differ."""


@dataclass(frozen=True)
class Plan:
    """How `source` becomes `target`, for all ranks.

    Rank r is the same process in both; a layout of fewer ranks holds nothing on the others.
    Invariant: `local`, `duplicates` and `buckets` together write each element of each target piece
    exactly once, and no rank receives an element twice.
    """

    source: WeightLayout
    """Layout before."""
    target: WeightLayout
    """Layout after."""
    local: tuple[tuple[Copy, ...], ...]
    """For each rank: what it copies from its own source tensors."""
    buckets: tuple[Bucket, ...]
    """Rounds, in the order that every rank keeps. Rounds pair sends and receives symmetrically, so
    ranks that take them in this order cannot wait for each other in a circle."""
    duplicates: tuple[tuple[Copy, ...], ...]
    """For each rank: boxes that two of its target tensors need and that it receives only once, into
    the first. `source_tensor` is that first *target* tensor: these copies are made once it is
    whole, before it is given away. A duplicate is never the source of another one."""

    @property
    def world_size(self) -> int:
        """Ranks of the larger layout."""
        return len(self.local)

    def wire_dtype(self, parameter: str) -> DtypeName:
        """Element type on the way: the target's, or the source's where that is narrower."""
        return _wire_dtype(self.source, self.target, parameter)

    def wire_bytes(self, copy: Copy) -> int:
        """Bytes of a copy on the way."""
        return num_elements(copy.box) * ITEM_BYTES[self.wire_dtype(copy.parameter)]


def make_plan(
    source: WeightLayout, target: WeightLayout, *, bucket_bytes: int = BUCKET_BYTES
) -> Plan:
    """Plans the change of one layout into another.

    Each element that a rank lacks comes from the nearest holder: the one in the smallest aligned
    block of 2, 4, 8, ... ranks (so within a node first), of those the one that has sent least.

    Args:
        source: Layout before; its ranks hold every element that the target's need.
        target: Layout after, of the same parameters; element types may differ.
        bucket_bytes: What a rank sends, and what it receives, in one round at most: larger copies
            are cut. It bounds the memory for packed messages.

    Raises:
        ManifestError: Other parameters or shapes on the two sides, a piece outside its parameter,
            or an element that no rank holds.
        ValueError: bucket_bytes cannot hold one element.
    """
    largest_item = max(ITEM_BYTES.values())
    if bucket_bytes < largest_item:
        raise ValueError(f"bucket_bytes is {bucket_bytes}: give at least {largest_item}")
    _check_manifests(source.manifest, target.manifest)
    planner = _Planner(source, target)
    return Plan(
        source,
        target,
        tuple(tuple(copies) for copies in planner.local),
        tuple(
            Bucket(tuple(copies))
            for copies in _buckets(planner.remote, planner.item_bytes, bucket_bytes)
        ),
        tuple(tuple(copies) for copies in planner.duplicates),
    )


class _Planner:
    """Decides where each element comes from.

    Works through target ranks in order and keeps count of what each rank sends, so that replicas
    take turns.
    """

    def __init__(self, source: WeightLayout, target: WeightLayout) -> None:
        world_size = max(len(source.ranks), len(target.ranks))
        self.local: list[list[Copy]] = [[] for _ in range(world_size)]
        self.duplicates: list[list[Copy]] = [[] for _ in range(world_size)]
        self.remote: list[Copy] = []
        self.item_bytes = {
            name: ITEM_BYTES[_wire_dtype(source, target, name)] for name in source.manifest
        }
        self._sent = [0] * world_size
        # By parameter and box: who holds it, and where. A model has few different boxes of a
        # parameter but many ranks.
        self._holders: dict[str, dict[Box, dict[int, Piece]]] = defaultdict(dict)
        self._own: list[dict[str, list[Piece]]] = [defaultdict(list) for _ in range(world_size)]
        # By target piece: boxes of it that the source has, and who holds them.
        self._overlaps: dict[tuple[str, Box], list[tuple[Box, dict[int, Piece]]]] = {}
        for rank, shard in enumerate(source.ranks):
            for piece in shard.pieces:
                holders = self._holders[piece.parameter]
                if piece.box not in holders:
                    _check_piece(source.manifest, piece, "source", rank)
                holders.setdefault(piece.box, {}).setdefault(rank, piece)
                self._own[rank][piece.parameter].append(piece)
        checked = set()
        for rank, shard in enumerate(target.ranks):
            received: dict[str, list[Copy]] = defaultdict(list)
            for piece in shard.pieces:
                if (piece.parameter, piece.box) not in checked:
                    _check_piece(target.manifest, piece, "target", rank)
                    checked.add((piece.parameter, piece.box))
                self._fill(rank, piece, received[piece.parameter])

    def _fill(self, rank: int, piece: Piece, received: list[Copy]) -> None:
        """Plans one target piece; `received`: what the rank gets of that parameter from others."""
        missing = [piece.box]
        own = self._own[rank].get(piece.parameter, [])
        # The tensor of the same name first: with a tied embedding in two source tensors, each
        # target tensor then reads its namesake.
        for held in sorted(own, key=lambda held: held.tensor != piece.tensor):
            taken, missing = take(missing, held.box)
            self.local[rank] += [copy_between(box, rank, held, rank, piece) for box in taken]
        for copy in received if missing else ():
            taken, missing = take(missing, copy.box)
            self.duplicates[rank] += [
                copy_between(box, rank, copy.wanted, rank, piece) for box in taken
            ]
        if missing:
            received += self._receive(rank, piece, missing)

    def _receive(self, rank: int, piece: Piece, missing: list[Box]) -> list[Copy]:
        copies = []
        for holder, held in self._senders(rank, piece):
            if not missing:
                break
            taken, missing = take(missing, held.box)
            copies += [copy_between(box, holder, held, rank, piece) for box in taken]
            self._sent[holder] += sum(map(num_elements, taken)) * self.item_bytes[piece.parameter]
        if missing:
            raise ManifestError(
                f"no rank of the source holds {missing[0]} of {piece.parameter!r}, which rank "
                f"{rank} of the target needs for {piece.tensor!r}: give a source layout that "
                "covers every parameter"
            )
        self.remote += copies
        return copies

    def _senders(self, rank: int, piece: Piece) -> Iterator[tuple[int, Piece]]:
        """Who may send parts of a piece to a rank, in the order in which they are asked."""

        def nearness(candidate: tuple[int, Piece]) -> tuple[int, int, int, int]:
            holder, _ = candidate
            distance = (holder ^ rank).bit_length()
            return distance, self._sent[holder], abs(holder - rank), holder

        key = (piece.parameter, piece.box)
        if key not in self._overlaps:
            self._overlaps[key] = [
                (common, holders)
                for box, holders in self._holders[piece.parameter].items()
                if (common := intersection(box, piece.box))
            ]
        overlaps = self._overlaps[key]
        if sum(num_elements(box) for box, _ in overlaps) <= num_elements(piece.box):
            # No element is in two boxes, which is usual: each box from its nearest holder, in the
            # order of the boxes, which breaks what is missing into the fewest parts.
            for _, holders in overlaps:
                yield min(holders.items(), key=nearness)
        else:
            candidates = (held for _, holders in overlaps for held in holders.items())
            yield from sorted(candidates, key=nearness)


def _buckets(
    copies: Sequence[Copy], item_bytes: Mapping[str, int], bound: int
) -> Iterator[list[Copy]]:
    """Rounds in which no rank sends or receives more than `bound` bytes.

    Each message queue (one for each pair of ranks) is in model order, so that target tensors become
    whole early; the senders (the stages, say) advance side by side, so that every round uses all
    links.
    """
    positions = {name: position for position, name in enumerate(item_bytes)}
    world_size = 1 + max((max(copy.source, copy.target) for copy in copies), default=0)
    queues: dict[tuple[int, int], deque[tuple[int, Copy]]] = defaultdict(deque)
    for copy in sorted(
        copies, key=lambda copy: (positions[copy.parameter], copy.target_tensor, copy.box)
    ):
        item = item_bytes[copy.parameter]
        for part in parts_of(copy, max(1, bound // _PARTS_A_ROUND // item)):
            queues[copy.source, copy.target].append((num_elements(part.box) * item, part))

    def lane(source: int, target: int) -> tuple[int, int, int]:
        """A queue's place among its sender's: the one furthest behind in model order is first."""
        # Of equal lanes the rank after the sender comes first, so that not all senders turn to
        # rank 0 at once.
        _, copy = queues[source, target][0]
        return positions[copy.parameter], (target - source) % world_size, target

    lanes: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for source, target in queues:
        heapq.heappush(lanes[source], lane(source, target))
    while lanes:
        round_copies = []
        received: dict[int, int] = defaultdict(int)
        # A lane whose next copy does not fit, on either end, waits for the next round.
        waiting: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        # The sender with the least in this round adds next.
        senders = [(0, source) for source in sorted(lanes)]
        while senders:
            sent, source = senders[0]
            if not lanes[source]:
                heapq.heappop(senders)
                continue
            target = lanes[source][0][2]
            queue = queues[source, target]
            num_bytes, copy = queue[0]
            if max(sent, received[target]) + num_bytes > bound:
                waiting[source].append(heapq.heappop(lanes[source]))
                continue
            queue.popleft()
            round_copies.append(copy)
            received[target] += num_bytes
            if queue:
                heapq.heapreplace(lanes[source], lane(source, target))
            else:
                heapq.heappop(lanes[source])
            heapq.heapreplace(senders, (sent + num_bytes, source))
        yield round_copies
        for blocked in waiting.values():
            heapq.heapify(blocked)
        lanes = waiting


def _wire_dtype(source: WeightLayout, target: WeightLayout, parameter: str) -> DtypeName:
    held, wanted = source.dtype_of(parameter), target.dtype_of(parameter)
    return wanted if ITEM_BYTES[wanted] <= ITEM_BYTES[held] else held


def _check_manifests(source: Manifest, target: Manifest) -> None:
    """Raises ManifestError unless both have the same parameters of the same shapes."""
    for name in (*source, *target):
        held, wanted = (side[name].shape if name in side else "absent" for side in (source, target))
        if held != wanted:
            raise ManifestError(
                f"parameter {name!r} is {held} in the source and {wanted} in the target: give two "
                "layouts of the same model"
            )


def _check_piece(manifest: Manifest, piece: Piece, side: str, rank: int) -> None:
    """Raises ManifestError unless the piece is a box of a parameter."""
    if piece.parameter not in manifest:
        raise ManifestError(
            f"rank {rank} of the {side} holds {piece.parameter!r} in {piece.tensor!r}, which the "
            "manifest does not name: give a layout of the same model"
        )
    shape = manifest[piece.parameter].shape
    if len(piece.box) != len(shape) or not all(
        0 <= start < stop <= size for (start, stop), size in zip(piece.box, shape, strict=True)
    ):
        raise ManifestError(
            f"rank {rank} of the {side} holds {piece.box} of {piece.parameter!r}, whose shape is "
            f"{shape}: give a box inside it that is not empty"
        )
