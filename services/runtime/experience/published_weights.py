"""Published weights from rank to rank: the server and the client of WeightsService.FetchWeights.

Negotiated per pair as experience is: on one host the answer names the publisher's shared memory
segment, which the consumer maps; otherwise raw chunks of 1 MiB follow, without protobuf's copies.
"""

from __future__ import annotations

import asyncio
import functools
import math
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rolemesh.engine.layout.manifest import (
    Box,
    DtypeName,
    Manifest,
    ManifestError,
    Parameter,
)
from rolemesh.engine.layout.ranks import TrainLayout
from rolemesh.engine.rollout.agreement.probe import LONG_PROBE_TOKENS, ProbeScores
from rolemesh.engine.specs import LayoutSpec
from rolemesh.engine.transport.slots.shm import open_segment
from rolemesh.engine.transport.slots.shm_directory import SHM_DIRECTORY
from rolemesh.engine.weights.copies import Copy
from rolemesh.engine.weights.exchanges.publication_memory import PublicationMemory
from rolemesh.engine.weights.exchanges.published import Publication
from rolemesh.engine.weights.sharded_tensors import TORCH_DTYPES, part
from rolemesh.rpc.channel import MeshChannel
from rolemesh.rpc.errors import InvalidRequestError, PreconditionError
from rolemesh.rpc.experience.payload import ChunkCutter, part_asked_for
from rolemesh.rpc.experience.payload_stream import PayloadMalformedError, encode_chunk
from rolemesh.rpc.experience.pull import FETCH_WEIGHTS, Answer, pull
from rolemesh.rpc.experience.tensors import data_type_of
from rolemesh.rpc.limits import exceeded
from rolemesh.services.runtime.experience.fetch import bytes_of
from rolemesh.v1 import tensor_pb2, weights_pb2

_DTYPES: dict[int, DtypeName] = {data_type_of(name): name for name in TORCH_DTYPES}


class PublishedWeights:
    """What one rank publishes: at most one version. Thread-safe.

    Example: after put("run", publication of version 4), get("run", 4) gives it and get("run", 3)
    raises WEIGHTS_GONE; a rank that fetches version 3 at that moment still gets all of it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._run_id = ""
        self._publication: Publication | None = None
        self.memory = PublicationMemory()
        """What publications lie in that peers of this host may map."""

    def put(self, run_id: str, publication: Publication) -> None:
        """Publishes; the version before it is dropped."""
        with self._lock:
            before, self._publication = self._publication, publication
            self._run_id = run_id
        if before is not None:
            before.close()

    def get(self, run_id: str, policy_version: int) -> Publication:
        """The publication of that version.

        Raises:
            PreconditionError: WEIGHTS_GONE.
        """
        with self._lock:
            publication = self._publication if run_id == self._run_id else None
        if publication is None or publication.policy_version != policy_version:
            held = "nothing" if publication is None else f"version {publication.policy_version}"
            raise PreconditionError(
                f"policy_version {policy_version} of run {run_id!r} was asked for, but {held} of "
                "it is published: update to what the actor publishes now",
                reason="WEIGHTS_GONE",
            )
        return publication

    def close(self) -> None:
        """Publishes nothing any more."""
        with self._lock:
            before, self._publication, self._run_id = self._publication, None, ""
        if before is not None:
            before.close()

    def end(self) -> None:
        """Publishes nothing any more, and keeps no memory for it."""
        self.close()
        self.memory.close()


# --- references ---------------------------------------------------------------------------


def dtype_of(data_type: tensor_pb2.DataType.ValueType, field: str) -> DtypeName:
    """The element type of weights.

    Raises:
        InvalidRequestError: Weights cannot have it; names the field.
    """
    if data_type not in _DTYPES:
        raise InvalidRequestError(
            f"{field} is {data_type}: weights are of {', '.join(sorted(_DTYPES.values()))}",
            reason="SPEC_INVALID",
        )
    return _DTYPES[data_type]


def reference_to(
    publication: Publication,
    run_id: str,
    layout: TrainLayout,
    addresses: Sequence[str],
    probe: ProbeScores | None = None,
) -> weights_pb2.WeightsRef:
    """Names a publication of all ranks; `probe`: what its weights give a row, if that is known."""
    manifest = publication.layout.manifest
    (dtype,) = {parameter.dtype for parameter in manifest.values()}
    return weights_pb2.WeightsRef(
        run_id=run_id,
        policy_version=publication.policy_version,
        dtype=data_type_of(dtype),
        parameters=parameter_specs(manifest),
        layout=layout.as_texts(),
        addresses=addresses,
        probe=None
        if probe is None
        else weights_pb2.WeightsProbe(
            tokens=probe.tokens, logprobs=probe.logprobs, rounds_to=probe.rounds_to
        ),
    )


def probe_of(ref: weights_pb2.WeightsRef) -> ProbeScores | None:
    """What the weights of a reference give a row, where it says so.

    Raises:
        InvalidRequestError: REFERENCE_INVALID: tokens and log-probs do not fit each other.
    """
    if not ref.HasField("probe"):
        return None
    tokens, logprobs = tuple(ref.probe.tokens), tuple(ref.probe.logprobs)
    if not 2 <= len(tokens) <= LONG_PROBE_TOKENS or len(logprobs) != len(tokens) - 1:
        raise InvalidRequestError(
            f"weights.probe has {len(tokens)} tokens and {len(logprobs)} log-probs: give 2 to "
            f"{LONG_PROBE_TOKENS} tokens, and a log-prob for each but the first; or leave it out",
            reason="REFERENCE_INVALID",
        )
    return ProbeScores(tokens, logprobs, ref.probe.rounds_to)


def parameter_specs(manifest: Manifest) -> list[weights_pb2.ParameterSpec]:
    """Parameters as messages name them; `manifest_of` is the way back."""
    return [
        weights_pb2.ParameterSpec(name=name, shape=one.shape, dtype=data_type_of(one.dtype))
        for name, one in manifest.items()
    ]


def manifest_of(ref: weights_pb2.WeightsRef) -> Manifest:
    """The parameters that a reference names."""
    dtype = dtype_of(ref.dtype, "weights.dtype")
    return {one.name: Parameter(tuple(one.shape), dtype) for one in ref.parameters}


def layout_of(ref: weights_pb2.WeightsRef) -> TrainLayout:
    """How the publishers hold them.

    Raises:
        ValidationError: A field is unknown or out of range; names it.
        InvalidRequestError: There are not as many addresses as ranks.
    """
    layout = LayoutSpec.model_validate(dict(ref.layout)).layout()
    if len(ref.addresses) != layout.world_size:
        raise InvalidRequestError(
            f"weights.addresses has {len(ref.addresses)} entries, but the layout has "
            f"{layout.world_size} ranks: give one for each",
            reason="REFERENCE_INVALID",
        )
    return layout


# --- server -------------------------------------------------------------------------------


async def answer_fetch(
    publication: Publication, request: weights_pb2.FetchWeightsRequest, host_id: str
) -> AsyncIterator[bytes]:
    """The messages of a fetch: a header, then chunks unless shared memory carries them.

    Args:
        publication: Kept, and with it its memory, until the last chunk is sent.
        request: What is wanted.
        host_id: Identity of this host; empty when nothing is shared.

    Raises:
        InvalidRequestError: BOX_INVALID: this rank does not hold a box.
    """
    wanted = [(box.parameter, _box(box)) for box in request.boxes]
    try:
        views = [publication.view(parameter, box) for parameter, box in wanted]
        holders = [publication.holder(parameter, box) for parameter, box in wanted]
    except ManifestError as error:
        raise InvalidRequestError(str(error), reason="BOX_INVALID") from error
    total_bytes = sum(view.nbytes for view in views)
    # A sampler may want a tensor that it ties to another one twice.
    most_bytes = 2 * publication.num_bytes
    if total_bytes > most_bytes:
        raise exceeded(
            "boxes",
            f"{total_bytes} bytes",
            most_bytes,
            "ask for each part of the publication once",
        )
    start, stop = part_asked_for(request.byte_start, request.byte_stop, total_bytes)
    header = weights_pb2.FetchWeightsHeader(total_bytes=total_bytes, byte_stop=stop)
    is_mapped = publication.segment is not None and request.host_id == host_id != ""
    if is_mapped and publication.segment is not None:
        header.shared_memory_path = str(SHM_DIRECTORY / publication.segment.name)
        for piece in holders:
            place = publication.places[piece.tensor]
            header.tensors.add(
                offset=place.offset,
                start=[start for start, _ in piece.box],
                shape=place.shape,
            )
    yield weights_pb2.FetchWeightsResponse(header=header).SerializeToString()
    if is_mapped:
        return
    cutter, end = ChunkCutter(), 0
    for view in views:
        begin, end = end, end + view.nbytes
        if end <= start or begin >= stop:
            continue
        # A box cut out of columns is copied, which must not hold up the loop.
        rest = view if view.is_contiguous() else await asyncio.to_thread(view.contiguous)
        for pieces in cutter.add(bytes_of(rest)[max(0, start - begin) : stop - begin]):
            yield encode_chunk(pieces)
    for pieces in cutter.rest():
        yield encode_chunk(pieces)


def _box(box: weights_pb2.WeightsBox) -> Box:
    return tuple(zip(box.start, box.stop, strict=False))


# --- client -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FetchedBoxes:
    """What one publisher gave."""

    boxes: Sequence[torch.Tensor]
    """In the order asked for, shaped; views of one buffer, or of the publisher's segment."""
    transport: str
    """ "shm", "grpc", or "grpc_4" when they came over four connections."""
    num_bytes: int
    """Bytes of the boxes."""


async def fetch_boxes(
    channel: MeshChannel,
    ref: weights_pb2.WeightsRef,
    source: int,
    copies: Sequence[Copy],
    host_id: str,
) -> FetchedBoxes:
    """Brings boxes of published weights from the rank that has them.

    Args:
        channel: To that rank.
        ref: The publication.
        source: Number of the rank.
        copies: The boxes.
        host_id: Identity of this host; an empty one refuses shared memory.

    Raises:
        RolemeshError: What the publisher answered, or UnavailableError when it does not answer or
            leaves half-way; names it.
        PayloadMalformedError: The bytes do not fit their description.
    """
    request = weights_pb2.FetchWeightsRequest(
        run_id=ref.run_id, policy_version=ref.policy_version, host_id=host_id
    )
    for copy in copies:
        request.boxes.add(
            parameter=copy.parameter,
            start=[start for start, _ in copy.box],
            stop=[stop for _, stop in copy.box],
        )
    dtype = TORCH_DTYPES[dtype_of(ref.dtype, "weights.dtype")]
    address = ref.addresses[source]
    return await pull(
        channel,
        FETCH_WEIGHTS,
        request,
        functools.partial(take_boxes, request=request, dtype=dtype),
        peer=f"the publisher of weights, rank {source} at {address}",
        metadata={"peer": address, "peer_rank": str(source)},
    )


async def take_boxes(
    answer: Answer[weights_pb2.FetchWeightsHeader],
    request: weights_pb2.FetchWeightsRequest,
    dtype: torch.dtype,
) -> FetchedBoxes:
    """Makes tensors of a publisher's answer.

    Args:
        answer: Whose header has come.
        request: What was asked for.
        dtype: Element type of the publication.

    Raises:
        PayloadMalformedError: The bytes do not fit their description or the request.
        OSError: The shared memory that is named cannot be opened.
    """
    header = answer.header
    shapes = [tuple(stop - start for start, stop in _box(box)) for box in request.boxes]
    sizes = [math.prod(shape) * dtype.itemsize for shape in shapes]
    if header.total_bytes != sum(sizes):
        raise PayloadMalformedError(
            f"{sum(sizes)} bytes of weights were asked for, {header.total_bytes} are announced"
        )
    if answer.segment is not None:
        return FetchedBoxes(_mapped(header, request, dtype), "shm", header.total_bytes)
    payload = torch.empty(header.total_bytes, dtype=torch.uint8)
    transport = await answer.read_into(payload.numpy().data)
    boxes = [
        flat.view(dtype).view(shape)
        for flat, shape in zip(torch.split(payload, sizes), shapes, strict=True)
    ]
    return FetchedBoxes(boxes, transport, header.total_bytes)


def _mapped(
    header: weights_pb2.FetchWeightsHeader,
    request: weights_pb2.FetchWeightsRequest,
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    """The boxes as views of the publisher's segment."""
    path = Path(header.shared_memory_path)
    if path.parent != SHM_DIRECTORY or len(header.tensors) != len(request.boxes):
        raise PayloadMalformedError(
            f"shared memory {header.shared_memory_path!r} with {len(header.tensors)} tensors was "
            f"named for {len(request.boxes)} boxes: it must lie in {SHM_DIRECTORY}"
        )
    memory = open_segment(path.name, path.stat().st_size)
    boxes = []
    for box, tensor in zip(request.boxes, header.tensors, strict=True):
        stop = tensor.offset + math.prod(tensor.shape) * dtype.itemsize
        ends = [start + size for start, size in zip(tensor.start, tensor.shape, strict=False)]
        if (
            not 0 <= tensor.offset <= stop <= memory.numel()
            or tensor.offset % dtype.itemsize
            or not len(box.start) == len(tensor.start) == len(tensor.shape)
            or any(map(int.__lt__, box.start, tensor.start))
            or any(map(int.__lt__, ends, box.stop))
        ):
            raise PayloadMalformedError(
                f"{box.parameter!r} is said to lie at byte {tensor.offset} with shape "
                f"{list(tensor.shape)}, which does not hold the box or leaves the segment of "
                f"{memory.numel()} bytes"
            )
        whole = memory[tensor.offset : stop].view(dtype).view(tuple(tensor.shape))
        origin = [start - at for start, at in zip(box.start, tensor.start, strict=True)]
        boxes.append(part(whole, origin, _box(box)))
    return boxes
