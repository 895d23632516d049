"""A checkpoint's files as a layout: what each rank writes into them, and what a rank reads.

Pure: no torch. Files stand where ranks stand in a WeightLayout; keys in a file are its tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rolemesh.engine.layout.manifest import (
    ITEM_BYTES,
    Box,
    Manifest,
    ManifestError,
    Parameter,
    Piece,
    RankShard,
    WeightLayout,
    num_elements,
)
from rolemesh.engine.weights.copies import Copy, copy_between, part_of, split_box, take


def written_pieces(
    layout: WeightLayout, rank: int, tensors: Iterable[str], max_bytes: int
) -> list[Piece]:
    """What a rank writes: what it holds and no lower rank does. No element is written twice.

    Args:
        layout: Of all ranks.
        rank: This one.
        tensors: Those of its tensors that are to be written.
        max_bytes: Of a piece; a larger one comes in parts.

    Returns:
        Parts of the rank's pieces, in their order.
    """
    wanted = set(tensors)
    # Boxes as keys: ordered, and each once.
    taken_by_lower: dict[str, dict[Box, None]] = defaultdict(dict)
    own_parameters = {piece.parameter for piece in layout.ranks[rank].pieces}
    # Replicas share one RankShard object in the layouts that this package makes.
    for shard in {id(shard): shard for shard in layout.ranks[:rank]}.values():
        for piece in shard.pieces:
            if piece.parameter in own_parameters:
                taken_by_lower[piece.parameter][piece.box] = None
    written = []
    for piece in layout.ranks[rank].pieces:
        if piece.tensor not in wanted:
            continue
        taken = taken_by_lower[piece.parameter]
        missing = [] if piece.box in taken else [piece.box]
        for box in taken:
            if not missing:
                break
            _, missing = take(missing, box)
        # The rank may hold the same part in a second tensor.
        taken[piece.box] = None
        most = max(1, max_bytes // ITEM_BYTES[layout.dtype_of(piece.parameter)])
        for box in missing:
            for part in split_box(box, most):
                written.append(part_of(piece, part))
    return written


def written_files(
    layout: WeightLayout, rank: int, tensors: Iterable[str], file_bytes: int
) -> list[list[Copy]]:
    """A rank's `written_pieces`, by file.

    Args:
        layout: Of all ranks.
        rank: This one.
        tensors: Those of its tensors that are to be written.
        file_bytes: No file gets more bytes of tensors than this.

    Returns:
        For each file, copies from the rank's tensors into it. Their target_tensor is a key that no
        other file of any rank has.
    """
    files: list[list[Copy]] = []
    size = 0
    for piece in written_pieces(layout, rank, tensors, file_bytes):
        num_bytes = num_elements(piece.box) * ITEM_BYTES[layout.dtype_of(piece.parameter)]
        if not files or size + num_bytes > file_bytes:
            files.append([])
            size = 0
        key = _key(piece.parameter, piece.box, layout.manifest[piece.parameter])
        stored = Piece(piece.parameter, piece.box, key, (0,) * len(piece.box))
        files[-1].append(copy_between(piece.box, rank, piece, len(files) - 1, stored))
        size += num_bytes
    return files


def read_copies(
    disk: WeightLayout, shard: RankShard, tensors: Iterable[str] | None = None
) -> list[Copy]:
    """What a rank reads of the files to fill its tensors: each element once, and nothing else.

    Args:
        disk: Files as ranks.
        shard: What the rank holds.
        tensors: Those of its tensors that are to be filled; None for all.

    Returns:
        Copies whose source is the number of a file, and whose target is 0.

    Raises:
        ManifestError: The files lack an element.
    """
    wanted = None if tensors is None else set(tensors)
    pieces = [piece for piece in shard.pieces if wanted is None or piece.tensor in wanted]
    stored: dict[str, list[tuple[int, Piece]]] = {piece.parameter: [] for piece in pieces}
    for file, content in enumerate(disk.ranks):
        for held in content.pieces:
            if held.parameter in stored:
                stored[held.parameter].append((file, held))
    copies = []
    for piece in pieces:
        missing = [piece.box]
        for file, held in stored[piece.parameter]:
            taken, missing = take(missing, held.box)
            copies += [copy_between(box, file, held, 0, piece) for box in taken]
        if missing:
            raise ManifestError(
                f"no file holds {missing[0]} of {piece.parameter!r}: the save that wrote them was "
                "not whole; take an older checkpoint"
            )
    return copies


def check_whole(disk: WeightLayout) -> None:
    """Raises ManifestError unless the files hold every element of every parameter once."""
    counts: dict[str, int] = dict.fromkeys(disk.manifest, 0)
    for content in disk.ranks:
        for piece in content.pieces:
            counts[piece.parameter] += num_elements(piece.box)
    for name, parameter in disk.manifest.items():
        if counts[name] != num_elements(parameter.box):
            raise ManifestError(
                f"{counts[name]} elements of {name!r} were written, but it has "
                f"{num_elements(parameter.box)}: give layouts of the same model on all ranks, and "
                "every rank's tensors"
            )


def tensor_parameters(layout: WeightLayout, rank: int) -> dict[str, str]:
    """Which parameter each tensor of a rank belongs to.

    Of a tensor without elements, other ranks' pieces tell.
    """
    known = {
        piece.tensor: piece.parameter
        for shard in {id(shard): shard for shard in layout.ranks}.values()
        for piece in shard.pieces
    }
    return {tensor: known.get(tensor, tensor) for tensor in layout.ranks[rank].shapes}


def scalar_shard(parameters: Mapping[str, str]) -> RankShard:
    """One number for each tensor: of the parameter that it belongs to."""
    return RankShard(
        tuple(Piece(parameter, (), tensor, ()) for tensor, parameter in parameters.items()),
        dict.fromkeys(parameters, ()),
    )


def scalar_layout(layout: WeightLayout) -> WeightLayout:
    """The layout of one float32 number a tensor, held by those who have elements of it.

    Made for counts that an optimizer keeps for each parameter.
    """
    shards = {
        id(shard): scalar_shard({piece.tensor: piece.parameter for piece in shard.pieces})
        for shard in {id(shard): shard for shard in layout.ranks}.values()
    }
    return WeightLayout(
        dict.fromkeys(layout.manifest, Parameter((), "float32")),
        tuple(shards[id(shard)] for shard in layout.ranks),
        "float32",
    )


# --- as JSON ------------------------------------------------------------------------------


def encode_pieces(copies: Sequence[Copy]) -> list[dict[str, Any]]:
    """What a file holds, for the manifest."""
    return [
        {"key": copy.target_tensor, "parameter": copy.parameter, "box": copy.box} for copy in copies
    ]


def encode_parameters(parameters: Mapping[str, Parameter]) -> dict[str, Any]:
    """Global shapes and element types, for the manifest."""
    return {
        name: {"shape": parameter.shape, "dtype": parameter.dtype}
        for name, parameter in parameters.items()
    }


def decode_group(encoded: Mapping[str, Any]) -> WeightLayout:
    """A group of the manifest as a layout: files as ranks, in the manifest's order."""
    manifest: Manifest = {
        name: Parameter(tuple(parameter["shape"]), parameter["dtype"])
        for name, parameter in encoded["parameters"].items()
    }
    files = []
    for content in encoded["files"].values():
        pieces = []
        for entry in content:
            box = tuple((start, stop) for start, stop in entry["box"])
            pieces.append(Piece(entry["parameter"], box, entry["key"], (0,) * len(box)))
        shapes = {
            piece.tensor: tuple(stop - start for start, stop in piece.box) for piece in pieces
        }
        files.append(RankShard(tuple(pieces), shapes))
    return WeightLayout(manifest, tuple(files))


def _key(name: str, box: Box, parameter: Parameter) -> str:
    """The parameter's name, and which part of it where it is not all."""
    if box == parameter.box:
        return name
    return f"{name}[{','.join(f'{start}:{stop}' for start, stop in box)}]"
