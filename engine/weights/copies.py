"""Boxes of weights on their way from one tensor into another, and arithmetic on such boxes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rolemesh.engine.layout.manifest import Box, Piece, intersection, num_elements


@dataclass(frozen=True, slots=True)
class Copy:
    """One box of a parameter, from a tensor of one rank into a tensor of another (or the same)."""

    parameter: str
    """Hugging Face name."""
    box: Box
    """What of it, in global coordinates."""
    source: int
    """Rank that has the box."""
    source_tensor: str
    """Tensor of that rank that holds the box."""
    source_origin: tuple[int, ...]
    """Where the box begins in that tensor."""
    target: int
    """Rank that wants the box."""
    target_tensor: str
    """Tensor of that rank that the box belongs to."""
    target_origin: tuple[int, ...]
    """Where the box begins in that tensor."""

    @property
    def held(self) -> Piece:
        """The box as the source holds it."""
        return Piece(self.parameter, self.box, self.source_tensor, self.source_origin)

    @property
    def wanted(self) -> Piece:
        """The box as the target wants it."""
        return Piece(self.parameter, self.box, self.target_tensor, self.target_origin)


def take(missing: list[Box], held: Box) -> tuple[list[Box], list[Box]]:
    """What `held` gives of the missing boxes, and what is then left of them.

    Example: of rows 0 to 8, a holder of rows 6 to 12 gives rows 6 to 8; rows 0 to 6 are left.
    """
    taken, left = [], []
    for box in missing:
        common = intersection(box, held)
        if common is None:
            left.append(box)
        else:
            taken.append(common)
            left += _difference(box, common)
    return taken, left


def _difference(box: Box, inner: Box) -> Iterator[Box]:
    """Disjoint boxes that make up `box` without `inner`, which lies inside it."""
    for dim, ((start, stop), (inner_start, inner_stop)) in enumerate(zip(box, inner, strict=True)):
        for extent in ((start, inner_start), (inner_stop, stop)):
            if extent[0] < extent[1]:
                yield (*inner[:dim], extent, *box[dim + 1 :])


def part_of(piece: Piece, box: Box) -> Piece:
    """The part of a piece that is a box inside it."""
    origin = _origin(box, piece.box, piece.origin)
    return Piece(piece.parameter, box, piece.tensor, origin)


def copy_between(box: Box, source: int, held: Piece, target: int, wanted: Piece) -> Copy:
    """The copy of a box that lies in both pieces, from rank `source` to rank `target`."""
    return Copy(
        wanted.parameter,
        box,
        source,
        held.tensor,
        _origin(box, held.box, held.origin),
        target,
        wanted.tensor,
        _origin(box, wanted.box, wanted.origin),
    )


def _origin(box: Box, outer: Box, origin: tuple[int, ...]) -> tuple[int, ...]:
    """Where `box` begins in a tensor that holds `outer` at `origin`."""
    return tuple(
        at + start - outer_start
        for at, (start, _), (outer_start, _) in zip(origin, box, outer, strict=True)
    )


def split_box(box: Box, most: int) -> Iterator[Box]:
    """The box in parts of at most `most` elements: whole rows where one fits."""
    if num_elements(box) <= most:
        yield box
        return
    # The first dimension of which single entries fit, cut into runs of as many as fit; a dimension
    # before it is taken entry by entry.
    dim = next(dim for dim, (start, stop) in enumerate(box) if stop - start > 1)
    start, stop = box[dim]
    run = max(1, most // (num_elements(box) // (stop - start)))
    for at in range(start, stop, run):
        yield from split_box((*box[:dim], (at, min(at + run, stop)), *box[dim + 1 :]), most)


def parts_of(copy: Copy, most: int) -> Iterator[Copy]:
    """The copy in parts of at most `most` elements."""
    for box in split_box(copy.box, most):
        yield copy_between(box, copy.source, copy.held, copy.target, copy.wanted)
