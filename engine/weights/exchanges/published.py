"""Weights that one service publishes and another one takes, box by box.

A publishing rank copies its training shard into one run of bytes. A taking rank plans from the
training layout to its own, asks each publisher for the boxes it needs, and puts its tensors
together. What lies where follows from manifest and layout, by the same arithmetic at both ends.
Knows no wire: `services/runtime` moves the bytes.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from rolemesh.engine.hardware.pinned_memory import pin
from rolemesh.engine.layout.boxes import generate_layout, train_layout, whole_layout
from rolemesh.engine.layout.families import DecoderShape, UnsupportedFamilyError
from rolemesh.engine.layout.manifest import (
    Box,
    DtypeName,
    Manifest,
    ManifestError,
    Parameter,
    Piece,
    RankShard,
    WeightLayout,
    intersection,
    num_elements,
)
from rolemesh.engine.layout.payload import aligned
from rolemesh.engine.layout.ranks import HybridLayout, TrainLayout
from rolemesh.engine.transport.slots.shm import Segment
from rolemesh.engine.weights.assembly import Assembly
from rolemesh.engine.weights.copies import Copy, part_of
from rolemesh.engine.weights.exchanges.publication_memory import PublicationMemory
from rolemesh.engine.weights.plan import make_plan
from rolemesh.engine.weights.sharded_tensors import TORCH_DTYPES, part

_UNCUT = 1 << 60
"""Bytes of a plan's only bucket: boxes are asked for whole."""

_NOTHING = RankShard((), {})


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor within a publication."""

    offset: int
    """Its first byte, counted from the beginning of the publication."""
    shape: tuple[int, ...]
    """Row-major."""
    dtype: torch.dtype

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor, in uint8 [n] memory that begins where the publication does."""
        num_bytes = torch.Size(self.shape).numel() * self.dtype.itemsize
        flat = memory[self.offset : self.offset + num_bytes]
        return flat.view(self.dtype).view(self.shape)


def places(layout: WeightLayout, rank: int) -> tuple[dict[str, Place], int]:
    """Where each tensor of a rank lies in its publication.

    Args:
        layout: Of training, in the element type of the publication.
        rank: The publisher.

    Returns:
        Places by tensor name, and the bytes in all.
    """
    shard, dtype = layout.ranks[rank], TORCH_DTYPES[_dtype(layout)]
    found, at = {}, 0
    # A slice may hold no rows of a parameter.
    for name in dict.fromkeys(piece.tensor for piece in shard.pieces):
        shape = tuple(shard.shapes[name])
        found[name] = Place(at, shape, dtype)
        at += aligned(torch.Size(shape).numel() * dtype.itemsize)
    return found, at


class Publication:
    """One rank's copy of its training weights at one version. Immutable once made.

    Invariant: the memory stays as it is as long as a mapping or a view of it lives. `close`, or an
    orderly end of the process, takes the name of the shared segment away; a peer that has mapped it
    keeps it. The memory goes back to where it is from when the publication dies.

    Example::

        memory = PublicationMemory()
        publication = Publication(layout, rank, weights, policy_version=7, memory=memory)
        publication.boxes([("model.norm.weight", ((0, 64),))])  # views
        publication.close()
    """

    def __init__(
        self,
        layout: WeightLayout,
        rank: int,
        weights: Mapping[str, torch.Tensor],
        *,
        policy_version: int,
        memory: PublicationMemory | None,
    ) -> None:
        """Copies the weights, rounded to the layout's element type.

        Args:
            layout: Of training, in the element type to publish.
            rank: This one.
            weights: This rank's parts by name, floating, shaped as the layout says, on any device.
            policy_version: Of the weights.
            memory: Gives segments that peers of this host can map; None: plain memory.

        Raises:
            ManifestError: The weights are not those of the layout.
            OSError: Shared memory is full.
        """
        self.layout = layout
        self.rank = rank
        self.policy_version = policy_version
        self.places, self.num_bytes = places(layout, rank)
        self._pieces: defaultdict[str, list[Piece]] = defaultdict(list)
        for piece in layout.ranks[rank].pieces:
            self._pieces[piece.parameter].append(piece)
        self.segment: Segment | None = None
        self._is_closed = False
        if memory is not None and self.num_bytes:
            held = memory.take(self.num_bytes, _device_of(weights))
            self.segment = held.segment
            self._give_back = weakref.finalize(self, memory.give_back, held)
            self._memory = held.segment.tensor()
        else:
            self._memory = torch.empty(self.num_bytes, dtype=torch.uint8)
        try:
            self._fill(weights)
        except BaseException:
            self.close()
            if self.segment is not None:
                self._give_back()
            raise

    def _fill(self, weights: Mapping[str, torch.Tensor]) -> None:
        copies = []
        for name, place in self.places.items():
            weight = weights.get(name)
            if weight is None or tuple(weight.shape) != place.shape:
                found = None if weight is None else list(weight.shape)
                raise ManifestError(
                    f"rank {self.rank} holds {name!r} with shape {found}, its layout says "
                    f"{list(place.shape)}: give the layout that the weights are cut by"
                )
            copies.append((place.view(self._memory), weight))
        if not self.num_bytes:
            return
        device = _device_of(weights)
        with torch.no_grad():
            if device.type == "cpu":
                for target, weight in copies:
                    target.copy_(weight)
            else:
                self._copy_from(device, copies)

    def _copy_from(
        self, device: torch.device, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        """Copies from a GPU into memory that is locked, and waits for it once."""
        unpin = pin(self._memory, device) if self.segment is None else None
        try:
            for target, weight in copies:
                # Rounded where it lies: what travels is of the published type.
                target.copy_(weight.to(target.dtype), non_blocking=True)
        finally:
            # Also after an error: nothing is to write to this memory later.
            torch.cuda.current_stream(device).synchronize()
            if unpin is not None:
                unpin()

    def holder(self, parameter: str, box: Box) -> Piece:
        """The piece of this rank that a box lies in.

        Raises:
            ManifestError: No such parameter, or the box is empty or not this rank's.
        """
        known = self.layout.manifest.get(parameter)
        if known is None or len(box) != len(known.shape):
            raise ManifestError(
                f"{parameter!r} with {len(box)} dimensions is not among the published parameters: "
                "ask for those of the reference"
            )
        for piece in self._pieces[parameter]:
            if num_elements(box) > 0 and intersection(piece.box, box) == box:
                return piece
        raise ManifestError(
            f"rank {self.rank} does not hold {box} of {parameter!r}: ask the rank that the "
            "training layout names"
        )

    def view(self, parameter: str, box: Box) -> torch.Tensor:
        """A box that this rank holds, without a copy; strided where it is cut out of columns.

        Raises:
            ManifestError: As `holder`.
        """
        piece = part_of(self.holder(parameter, box), box)
        return part(self.places[piece.tensor].view(self._memory), piece.origin, box)

    def close(self) -> None:
        """Takes the segment's name away. Safe to repeat."""
        if self.segment is not None and not self._is_closed:
            self._is_closed = True
            self.segment.rename()


def source_layout(
    manifest: Manifest, train: TrainLayout, dtype: DtypeName, shape: DecoderShape | None
) -> WeightLayout:
    """What each publishing rank holds, as the taking service works it out.

    Args:
        manifest: Of the publication.
        train: Layout of the publishing service.
        dtype: Element type of the publication.
        shape: Of the model, as the taker knows it; needed where the publisher has several ranks.

    Raises:
        ManifestError: Another model's parameters, or a model without a plan.
        LayoutError: The model cannot be cut so.
    """
    if train.world_size == 1:
        return whole_layout(manifest).in_dtype(dtype)
    if shape is None:
        raise ManifestError(
            f"the weights are published by {train.world_size} ranks, but this model's family has "
            "no plan: publish from one rank"
        )
    check_manifest(manifest, shape.trained_manifest(dtype))
    return train_layout(shape, train, dtype, trained_only=True)


def target_layout(
    manifest: Manifest, layout: HybridLayout, dtype: DtypeName, shape: DecoderShape | None
) -> WeightLayout:
    """What each rank of a sampling service takes: its slices, or the whole model.

    An adapter's factors each rank takes whole: they are small, and samplers cut them as they need.

    Args:
        manifest: Of the publication.
        layout: Ranks of the service.
        dtype: Element type of the publication.
        shape: Of the model with its adapter, if its family has a plan.

    Raises:
        UnsupportedFamilyError: The ranks have slices of a model whose family has no plan.
        LayoutError: The model cannot be cut so.
    """
    has_adapter = shape is not None and shape.adapter is not None
    if has_adapter or layout.generate.tp * layout.generate.pp == 1:
        return whole_layout(manifest, layout.world_size).in_dtype(dtype)
    if shape is None:
        raise UnsupportedFamilyError(
            f"the sampler has {layout.generate.tp * layout.generate.pp} slices, but this model's "
            "family has no plan: give each rank the whole model (layout.tp 1)"
        )
    return generate_layout(shape, layout, dtype)


def check_manifest(found: Mapping[str, Parameter], expected: Mapping[str, Parameter]) -> None:
    """Raises ManifestError, which names the parameter, unless both have the same ones."""
    for name in (*expected, *found):
        theirs = found[name].shape if name in found else None
        own = expected[name].shape if name in expected else None
        if theirs != own:
            raise ManifestError(
                f"parameter {name!r} is {theirs or 'absent'} in the published weights and "
                f"{own or 'absent'} in the sampler's model: publish and sample one model"
            )


@dataclass(frozen=True, slots=True)
class Taking:
    """What one rank takes from publishers, and what it makes of it.

    Invariant: the copies bring each element that the rank needs once.
    """

    target: WeightLayout
    """Layout of the taking service."""
    rank: int
    """The taking rank."""
    copies: Mapping[int, tuple[Copy, ...]]
    """The boxes that each publishing rank gives, in the order in which they are asked for."""
    duplicates: tuple[Copy, ...]
    """Boxes that two of the rank's tensors need; `source_tensor` is the first of them."""

    def tensors(
        self, boxes: Mapping[int, Sequence[torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The rank's tensors, one after another; each is let go before the next is made.

        A tensor that is one box is that box itself, without a copy.

        Args:
            boxes: By publishing rank, in the order of `copies`; shaped, in the target's type.
        """
        arrived: defaultdict[str, list[tuple[Piece, torch.Tensor]]] = defaultdict(list)
        for source, copies in self.copies.items():
            for copy, values in zip(copies, boxes[source], strict=True):
                arrived[copy.target_tensor].append((copy.wanted, values))
        assembly = Assembly(self.target, self.rank, duplicates=self.duplicates)
        yield from assembly.whole()
        for name in self.target.ranks[self.rank].shapes:
            for piece, values in arrived.pop(name, ()):
                assembly.put(piece, values, is_lasting=True)
            yield from assembly.whole()


def plan_taking(source: WeightLayout, target: WeightLayout, rank: int) -> Taking:
    """Plans what one rank of a service takes from the ranks of another one.

    All publishers are equally near, so replicas are asked in turn, by the bytes that they give.

    Args:
        source: What the publishers hold.
        target: What the takers hold; of the same parameters in the same element type.
        rank: The taker.

    Raises:
        ManifestError: Other parameters, or an element that no rank publishes.
    """
    if _dtype(source) != _dtype(target):
        raise ManifestError(
            f"the weights are published in {source.dtype} and would be taken in {target.dtype}: "
            "plan for the type in which they are published"
        )
    # A plan numbers processes. The takers' numbers begin at a power of two above the publishers',
    # so that no publisher is in a taker's block of ranks and nearness decides nothing.
    first = 1 << (len(source.ranks) - 1).bit_length() if len(source.ranks) > 1 else 1
    shifted = replace(target, ranks=(_NOTHING,) * first + target.ranks)
    plan = make_plan(source, shifted, bucket_bytes=_UNCUT)
    copies: defaultdict[int, list[Copy]] = defaultdict(list)
    for bucket in plan.buckets:
        for copy in bucket.copies:
            if copy.target == first + rank:
                copies[copy.source].append(copy)
    return Taking(
        target,
        rank,
        {number: tuple(copies[number]) for number in sorted(copies)},
        plan.duplicates[first + rank],
    )


def _device_of(weights: Mapping[str, torch.Tensor]) -> torch.device:
    """Where a rank's weights lie; the CPU where there are none."""
    return next((weight.device for weight in weights.values()), torch.device("cpu"))


def _dtype(layout: WeightLayout) -> DtypeName:
    """The one element type of a layout of a publication."""
    if layout.dtype is None:
        raise ManifestError("a layout of published weights has no element type: give it one")
    return layout.dtype
