"""Under which names the files of a model hold its parameters: of a stack, each expert's matrices.

Pure: no torch. Inside, a stack of experts is one parameter, as it is one tensor of transformers'
model, of a checkpoint and of vLLM's. Files, the Hub and PEFT know the matrices of each expert by
themselves; these names are met here alone.

Shape letters: E experts, R rows of what an expert's files stack, C columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rolemesh.engine.layout.adapters import is_factor
from rolemesh.engine.layout.families import DecoderShape, parameter_shape, part_of_layer
from rolemesh.engine.layout.manifest import Box, Manifest, Parameter


@dataclass(frozen=True, slots=True)
class FilePart:
    """A tensor of a file, and which box of a parameter it is."""

    name: str
    box: Box
    """Of a stack [E, R, C] one expert's rows: ((e, e + 1), (start, stop), (0, C))."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the file's tensor, which is no stack."""
        sizes = tuple(stop - start for start, stop in self.box)
        return sizes[1:] if len(sizes) == 3 else sizes


def file_parts(shape: DecoderShape, name: str) -> tuple[FilePart, ...]:
    """What files hold of a parameter, in the order in which they hold it.

    Example: of 2 experts of width 8 in a model of width 4, the gate_up_proj [2, 16, 4] is
    "model.layers.0.mlp.experts.0.gate_proj.weight" with the box ((0, 1), (0, 8), (0, 4)), then
    "...0.up_proj.weight" with ((0, 1), (8, 16), (0, 4)), then the other expert's.

    Raises:
        UnsupportedFamilyError: The family has no such parameter.
    """
    part = None if is_factor(name) else part_of_layer(shape, name)
    sizes = parameter_shape(shape, name)
    whole: Box = tuple((0, size) for size in sizes)
    if part is None or not part.files:
        return (FilePart(name, whole),)
    layer = name.removesuffix(part.suffix)
    if len(sizes) < 3:
        return (FilePart(f"{layer}{part.files[0]}", whole),)
    rows = sizes[1] // len(part.files)
    return tuple(
        FilePart(
            f"{layer}{file.format(expert)}",
            ((expert, expert + 1), (place * rows, (place + 1) * rows), (0, sizes[2])),
        )
        for expert in range(sizes[0])
        for place, file in enumerate(part.files)
    )


def file_manifest(shape: DecoderShape | None, manifest: Manifest) -> Manifest:
    """A manifest by the names of files. Without a shape names are those of the parameters."""
    if shape is None:
        return manifest
    return {
        one.name: Parameter(one.shape, parameter.dtype, parameter.keeps_dtype)
        for name, parameter in manifest.items()
        for one in file_parts(shape, name)
    }


def place_in_stack(box: Box, sizes: Sequence[int]) -> tuple[int | slice, ...]:
    """Where a file's tensor lies in its parameter: an index that leaves the file's dimensions.

    Args:
        box: Of the parameter.
        sizes: Of the file's tensor.
    """
    stacked = len(box) - len(sizes)
    return (
        *(start for start, _ in box[:stacked]),
        *(slice(start, stop) for start, stop in box[stacked:]),
    )


def held_parts(
    shape: DecoderShape, name: str, box: Box
) -> Iterator[tuple[str, Box, tuple[int | slice, ...]]]:
    """The boxes of files' tensors that make up a box of a parameter.

    Yields:
        (name of the file's tensor, its box, where that lies in the box that was asked for).
    """
    for part in file_parts(shape, name):
        common = tuple(
            (max(low, start), min(high, stop))
            for (low, high), (start, stop) in zip(box, part.box, strict=True)
        )
        if any(start >= stop for start, stop in common):
            continue
        sizes = part.shape
        inside = [
            (start - origin, stop - origin)
            for (start, stop), (origin, _) in zip(common, part.box, strict=True)
        ]
        asked = [
            (start - origin, stop - origin)
            for (start, stop), (origin, _) in zip(common, box, strict=True)
        ]
        stacked = len(box) - len(sizes)
        yield part.name, tuple(inside[stacked:]), place_in_stack(tuple(asked), sizes)
