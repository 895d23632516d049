"""The parameters of a model folder, read box by box, whatever its files call them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open

from rolemesh.engine.layout.families import DecoderShape, parameter_shape
from rolemesh.engine.layout.file_names import FilePart, file_parts, held_parts, place_in_stack
from rolemesh.engine.layout.manifest import Box
from rolemesh.engine.model_folders.model_files import (
    INDEX_FILE,
    WEIGHTS_FILE,
    ModelFolderError,
    names_in_files,
)


class FolderTensors:
    """The tensors of a model folder, read box by box. Open files are closed with it.

    Example::

        with FolderTensors(Path("model")) as tensors:
            tensors.read("model.norm.weight", ((0, 64),))
    """

    def __init__(self, folder: Path) -> None:
        """Opens nothing yet; reads the index where there is one."""
        self.folder = folder
        self._files = ExitStack()
        self._open: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}

    def __enter__(self) -> FolderTensors:
        if (self.folder / WEIGHTS_FILE).is_file():
            self._file_of = dict.fromkeys(self._opened(WEIGHTS_FILE).keys(), WEIGHTS_FILE)
        else:
            self._file_of = json.loads((self.folder / INDEX_FILE).read_text())["weight_map"]
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def stored_name(self, name: str) -> str | None:
        """The key under which a parameter is stored, or None; see `names_in_files`."""
        for key in names_in_files(name):
            if key in self._file_of:
                return key
        return None

    def names(self) -> Iterable[str]:
        """Names of all stored tensors."""
        return self._file_of.keys()

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of a stored tensor."""
        return tuple(self._slice(key).get_shape())

    def read(self, key: str, box: Box) -> torch.Tensor:
        """A box of a stored tensor, float32, in memory of its own.

        The file is mapped, not read: of a tensor no more than the box (and what else lies on its
        pages) becomes memory, and those pages belong to the file.
        """
        part = self.stored(key, box)
        return part.to(torch.float32, copy=True, memory_format=torch.contiguous_format)

    def stored(self, key: str, box: Box) -> torch.Tensor:
        """A box of a stored tensor, in the type of the file, which may be mapped."""
        part: torch.Tensor = self._slice(key)[tuple(slice(start, stop) for start, stop in box)]
        return part

    def _slice(self, key: str) -> Any:
        return self._opened(self._file_of[key]).get_slice(key)

    def _opened(self, file: str) -> Any:
        if file not in self._open:
            self._open[file] = self._files.enter_context(
                safe_open(self.folder / file, framework="pt")
            )
        return self._open[file]


class ParameterFiles:
    """The parameters of a model in its folder: of experts, stacks of what files hold of each.

    Open files are closed with it.

    Example::

        with ParameterFiles(Path("model"), shape) as files:
            files.read("model.layers.0.mlp.experts.down_proj", ((0, 8), (0, 64), (0, 32)))
    """

    def __init__(self, folder: Path, shape: DecoderShape | None) -> None:
        """Opens nothing yet.

        Args:
            folder: Of the model.
            shape: Says what files call its parameters. None: as they are called here.
        """
        self.folder = folder
        self._tensors = FolderTensors(folder)
        self._shape = shape

    def __enter__(self) -> Self:
        self._tensors.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._tensors.__exit__(*error)

    def stored_name(self, name: str) -> str | None:
        """The key by which to read a parameter, or None where files lack it, or some of a stack."""
        if (own := self._tensors.stored_name(name)) is not None or self._shape is None:
            return own
        keys = [self._tensors.stored_name(part.name) for part in self._parts(name)]
        return None if None in keys else name

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of the whole parameter, as the files have it.

        Raises:
            ModelFolderError: The matrices of a stack's experts have other shapes than expected.
        """
        if self._has_own(key):
            return self._tensors.shape(key)
        for part in self._parts(key):
            stored = self._key(part.name)
            if (found := self._tensors.shape(stored)) != part.shape:
                raise wrong_shape(self.folder, stored, found, part.shape)
        assert self._shape is not None  # else every parameter has a key of its own
        return parameter_shape(self._shape, key)

    def read(self, key: str, box: Box) -> torch.Tensor:
        """A box of a parameter, float32, in memory of its own."""
        if self._has_own(key):
            return self._tensors.read(key, box)
        return self.stored(key, box).float()

    def stored(self, key: str, box: Box) -> torch.Tensor:
        """A box of a parameter, in the type of the files; it may be mapped."""
        if self._has_own(key):
            return self._tensors.stored(key, box)
        assert self._shape is not None  # else every parameter has a key of its own
        made: torch.Tensor | None = None
        for name, inside, place in held_parts(self._shape, key, box):
            part = self._tensors.stored(self._key(name), inside)
            if made is None:
                made = part.new_empty([stop - start for start, stop in box])
            made[place] = part
        assert made is not None  # a box is not empty
        return made

    def _parts(self, name: str) -> tuple[FilePart, ...]:
        return () if self._shape is None else file_parts(self._shape, name)

    def _has_own(self, key: str) -> bool:
        return self._tensors.stored_name(key) is not None

    def _key(self, name: str) -> str:
        key = self._tensors.stored_name(name)
        assert key is not None  # `stored_name` has found all
        return key


def named_as_in_files(
    shape: DecoderShape | None, parameters: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole parameters as files hold them: views of stacks, under the names of their parts.

    Args:
        shape: None: files have the names of here.
        parameters: (Hugging Face name, [global shape]).
    """
    for name, tensor in parameters:
        if shape is None:
            yield name, tensor
        else:
            for part in file_parts(shape, name):
                yield part.name, tensor[place_in_stack(part.box, part.shape)]


def wrong_shape(
    folder: Path, key: str, found: tuple[int, ...], expected: tuple[int, ...]
) -> ModelFolderError:
    """Says that a stored tensor does not fit the config."""
    return ModelFolderError(
        f"model.path {str(folder)!r} holds {key!r} with shape {list(found)}, but its config.json "
        f"says {list(expected)}: copy the folder again"
    )
