"""Writes a trained model as a Hugging Face folder that transformers and vLLM load.

Or what was trained over a frozen base as an adapter's folder, which PEFT and vLLM load.
"""

from __future__ import annotations

import copy
import itertools
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from rolemesh.engine.layout.boxes import whole_layout
from rolemesh.engine.layout.families import DecoderShape
from rolemesh.engine.layout.file_names import file_manifest
from rolemesh.engine.layout.manifest import Manifest, ManifestError, Parameter, Piece
from rolemesh.engine.model_folders.adapter_config import CONFIG_FILE
from rolemesh.engine.models.adapters.adapter_files import as_stored, stored_manifest
from rolemesh.engine.models.images.whole_models import (
    has_tower,
    names_in_whole,
    tower_shapes,
    tower_tensors,
    whole_config,
)
from rolemesh.engine.models.parameter_files import named_as_in_files
from rolemesh.engine.parallel.agreement import Peers
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.specs import ComputeDtype
from rolemesh.engine.weights.assembly import Assembly
from rolemesh.engine.weights.checkpoints.disk_layout import written_pieces
from rolemesh.engine.weights.checkpoints.folders import FolderExistsError, whole_folder
from rolemesh.engine.weights.copies import part_of
from rolemesh.engine.weights.sharded_tensors import TORCH_DTYPES, ShardedTensors, part

COMPANION_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Files of a model folder that training leaves as they are."""

EXPORT_FILE = "rolemesh-export.json"
EXPORT_FORMAT = "rolemesh-export-1"
"""Mark of a folder that was exported, and may be replaced by a newer export."""

FILE_BYTES = 5 * 10**9
"""A new file begins when the next parameter would make one larger: the Hub's own default."""
MESSAGE_BYTES = 256 * 2**20
"""Weights (float32) that a rank sends to rank 0 at once."""


def write_model_folder(
    directory: Path,
    *,
    config: Any,
    architecture: str,
    manifest: Manifest,
    parameters: Iterable[tuple[str, torch.Tensor]],
    source: Path,
    shape: DecoderShape | None = None,
    dtype: ComputeDtype = "bfloat16",
    peers: Peers | None = None,
) -> None:
    """Writes config, weights and tokenizer; replaces an older export of that name whole.

    With many ranks all of them call it, and rank 0 writes. A file is written as soon as it is
    full: rank 0 holds one file's weights, in the type they are saved in. The files depend on the
    weights alone.

    Args:
        directory: The folder to write.
        config: transformers config of the whole model.
        architecture: Name of the transformers class.
        manifest: The model's parameters by Hugging Face name, tied ones once.
        parameters: Names and whole tensors, floating [global shape], in the manifest's order, as
            `gathered` yields them. All ranks go through it; rank 0 alone gets something.
        source: Folder that the model came from; tokenizer and generation config are copied, and of
            a model of images and text the tower.
        shape: Of the model, which says what files call its parameters: each expert of a stack by
            itself. None: as they are called here.
        dtype: Type of the saved weights.
        peers: The ranks; None for one alone.

    Raises:
        FolderExistsError: Something is there that is not an older export.
        RuntimeError: Another rank failed (its number and cause).
    """
    held = dict(file_manifest(shape, manifest))
    weights = named_as_in_files(shape, parameters)
    if has_tower(source):
        config, architecture = whole_config(source, config)
        decoder, tower_prefix = names_in_whole(source)
        held = {_renamed(name, decoder): parameter for name, parameter in held.items()}
        held |= {
            tower_prefix + name: Parameter(size, dtype)
            for name, size in tower_shapes(source).items()
        }
        weights = ((_renamed(name, decoder), tensor) for name, tensor in weights)
        if peers is None or peers.is_first:
            tower = ((tower_prefix + name, tensor) for name, tensor in tower_tensors(source))
            weights = itertools.chain(weights, tower)

    def write_companions(folder: Path) -> None:
        _write_config(folder, config, architecture, dtype)
        _copy_companions(folder, source)

    _write_folder(
        directory,
        lambda folder: _WeightFiles(folder, held, dtype),
        weights,
        write_companions,
        peers,
    )


def _renamed(name: str, decoder: str) -> str:
    """A decoder's parameter by its name in a whole model's files; heads keep theirs."""
    bare = name.removeprefix("model.")
    return name if bare == name else decoder + bare


def write_adapter_folder(
    directory: Path,
    *,
    config: Mapping[str, Any],
    manifest: Manifest,
    parameters: Iterable[tuple[str, torch.Tensor]],
    source: Path,
    peers: Peers | None = None,
) -> None:
    """Writes an adapter in PEFT's format, float32, and the tokenizer; see `write_model_folder`.

    Args:
        directory: The folder to write; an older export of that name is replaced whole.
        config: What adapter_config.json says; see `adapter_files.adapter_config`.
        manifest: Factors, and a head that was trained beside them, by Hugging Face name.
        parameters: Names and whole tensors, floating [global shape], in the manifest's order.
        source: Folder of the base; the tokenizer is copied.
        peers: The ranks; None for one alone.

    Raises:
        FolderExistsError: Something is there that is not an older export.
        RuntimeError: Another rank failed (its number and cause).
    """

    def write_companions(folder: Path) -> None:
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        (folder / CONFIG_FILE).write_text(text)
        _copy_companions(folder, source)

    stored = stored_manifest(manifest, source)
    _write_folder(
        directory,
        # PEFT knows one file alone.
        lambda folder: _WeightFiles(
            folder, stored, "float32", stem="adapter_model", is_one_file=True
        ),
        as_stored(parameters, source),
        write_companions,
        peers,
    )


def _write_folder(
    directory: Path,
    make_writer: Callable[[Path], _WeightFiles],
    parameters: Iterable[tuple[str, torch.Tensor]],
    write_companions: Callable[[Path], None],
    peers: Peers | None,
) -> None:
    """Writes weights as they come, and then what stands beside them; rank 0 alone writes."""
    ranks = peers or Peers.alone()

    def check() -> tuple[None, None]:
        if ranks.is_first:
            _check_replaceable(directory)
        return None, None

    ranks.agree(check, (FolderExistsError, ValueError))
    with whole_folder(directory, replace=True, peers=ranks) as temporary:
        writer = make_writer(temporary)
        failure: Exception | None = None
        for name, tensor in parameters:
            if failure is None:
                try:
                    writer.add(name, tensor)
                except Exception as error:
                    # The others send all the same: told only at the end, they need not ask first.
                    failure = error

        def finish() -> tuple[None, None]:
            if failure is not None:
                raise failure
            if ranks.is_first:
                writer.close()
                write_companions(temporary)
            return None, None

        ranks.agree(finish)


def gathered(
    weights: ShardedTensors, dtype: ComputeDtype, mesh: RankMesh
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields whole parameters on the CPU, in the manifest's order, on rank 0; elsewhere nothing.

    Ranks send and rank 0 receives in one order: by parameter, then by rank, then as pieces lie. So
    rank 0 holds one parameter at a time, unless its caller keeps them.

    Args:
        weights: What each rank holds: floating, shaped as its layout says.
        dtype: Type that the weights are cast to before they travel, but for those that keep theirs.
        mesh: This rank's place.
    """
    weights.check(mesh.rank)
    layout = weights.layout
    parts: dict[str, list[tuple[int, Piece]]] = {name: [] for name in layout.manifest}
    for rank in range(len(layout.ranks)) if mesh.rank == 0 else (mesh.rank,):
        for piece in written_pieces(layout, rank, layout.ranks[rank].shapes, MESSAGE_BYTES):
            parts[piece.parameter].append((rank, piece))
    device = next(iter(weights.tensors.values())).device
    for name, parameter in layout.manifest.items():
        target = whole_layout({name: parameter}).in_dtype(dtype)
        element_type = TORCH_DTYPES[target.dtype_of(name)]
        assembly = Assembly(target, 0)
        for rank, piece in parts[name]:
            if rank == mesh.rank:
                held = part(weights.tensors[piece.tensor].detach(), piece.origin, piece.box)
                message = held.to(element_type).contiguous()
                if rank != 0:
                    dist.send(message, mesh.torch_rank(0), group=mesh.world.process_group)
                    continue
            else:
                sizes = [stop - start for start, stop in piece.box]
                message = torch.empty(sizes, dtype=element_type, device=device)
                dist.recv(message, mesh.torch_rank(rank), group=mesh.world.process_group)
            assembly.put(part_of(target.ranks[0].pieces[0], piece.box), message)
        if mesh.rank == 0:
            whole = dict(assembly.whole())
            if name not in whole:
                raise ManifestError(
                    f"the ranks hold boxes of {name!r} that do not make up all of it: the layout "
                    "must give each element to a rank"
                )
            yield name, whole[name]


class _WeightFiles:
    """Writes parameters that come in the manifest's order to files of bounded size."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        dtype: ComputeDtype,
        *,
        stem: str = "model",
        is_one_file: bool = False,
    ) -> None:
        self._stem = stem
        self._folder = folder
        layout = whole_layout(manifest).in_dtype(dtype)
        self._dtypes = {name: TORCH_DTYPES[layout.dtype_of(name)] for name in manifest}
        sizes = {name: parameter.num_bytes for name, parameter in layout.manifest.items()}
        self._total_bytes = sum(sizes.values())
        numbers: dict[str, int] = {}
        number = size = 0
        for name, num_bytes in sizes.items():
            if size and not is_one_file and size + num_bytes > FILE_BYTES:
                number, size = number + 1, 0
            numbers[name] = number
            size += num_bytes
        self._num_files = number + 1
        self._file_of = {name: self._file_name(number) for name, number in numbers.items()}
        self._file = self._file_name(0)
        self._tensors: dict[str, torch.Tensor] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Takes a parameter; writes the file before it, if that is full."""
        if self._file_of[name] != self._file:
            self._write()
            self._file = self._file_of[name]
        self._tensors[name] = tensor.to(self._dtypes[name])

    def close(self) -> None:
        """Writes what is left, and the index where there is more than one file."""
        self._write()
        if self._num_files > 1:
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": self._file_of}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (self._folder / f"{self._stem}.safetensors.index.json").write_text(text)

    def _write(self) -> None:
        # transformers refuses files without this entry.
        save_file(self._tensors, self._folder / self._file, metadata={"format": "pt"})
        self._tensors = {}

    def _file_name(self, number: int) -> str:
        if self._num_files == 1:
            return f"{self._stem}.safetensors"
        return f"{self._stem}-{number + 1:05}-of-{self._num_files:05}.safetensors"


def _write_config(folder: Path, config: Any, architecture: str, dtype: ComputeDtype) -> None:
    """Writes config.json."""
    config = copy.deepcopy(config)
    config.architectures = [architecture]
    config.save_pretrained(folder)
    # transformers writes the type that the weights were loaded with, which is our float32;
    # samplers allocate by this entry.
    path = folder / "config.json"
    entries = json.loads(path.read_text())
    path.write_text(json.dumps({**entries, "dtype": dtype}, indent=2, sort_keys=True) + "\n")


def _copy_companions(folder: Path, source: Path) -> None:
    """Copies the tokenizer, and marks the folder as an export."""
    for name in COMPANION_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    (folder / EXPORT_FILE).write_text(json.dumps({"format": EXPORT_FORMAT}) + "\n")


def _check_replaceable(directory: Path) -> None:
    """Refuses to replace anything but an empty folder, or an export without folders in it."""
    if not directory.exists() and not directory.is_symlink():
        return
    if directory.is_dir() and not directory.is_symlink():
        entries = list(directory.iterdir())
        if not entries or (_is_export(directory) and all(entry.is_file() for entry in entries)):
            return
    raise FolderExistsError(
        f"directory {str(directory)!r} exists and is not the folder of one exported model, which "
        f"alone is replaced ({EXPORT_FILE} marks it): give a fresh folder"
    )


def _is_export(directory: Path) -> bool:
    try:
        content = json.loads((directory / EXPORT_FILE).read_text())
        return bool(content["format"] == EXPORT_FORMAT)
    except (OSError, ValueError, TypeError, KeyError):
        return False
