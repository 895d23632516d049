"""Checkpoints as data: safetensors and JSON, whole or absent, every byte hashed. Reads them.

A checkpoint is a layout on disk. Each rank writes what it holds and no lower rank does
(`<group>-rank00001-00001.safetensors` ...) and the state of its random generators; rank 0 also
`state.json` and `manifest.json`, which says what part of which parameter lies in which file, with
size and SHA-256 of every file and its own digest. Ranks of any other layout read their parts as
slices. One rank alone is the simplest case. Nothing in a checkpoint is ever executed: no pickle, no
torch.load. `writing.py` writes them.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from rolemesh.engine.layout.boxes import whole_layout
from rolemesh.engine.layout.manifest import (
    Manifest,
    ManifestError,
    Piece,
    RankShard,
    WeightLayout,
    ranges,
)
from rolemesh.engine.weights.assembly import Assembly
from rolemesh.engine.weights.checkpoints.disk_layout import (
    decode_group,
    read_copies,
)
from rolemesh.engine.weights.checkpoints.folders import FolderExistsError
from rolemesh.engine.weights.copies import Copy
from rolemesh.engine.weights.sharded_tensors import place

MANIFEST_FILE = "manifest.json"
STATE_FILE = "state.json"
FORMAT = "rolemesh-checkpoint-2"
_HASH_BLOCK_BYTES = 2**22
_REMEDY = "put a whole copy in its place, or take an older checkpoint"

RandomState = tuple[Mapping[str, torch.Tensor], Mapping[str, Any]]
"""A rank's generators: tensors, and what json can hold."""


class CheckpointCorruptError(RuntimeError):
    """A checkpoint's bytes are not those that were written; names the file."""


class CheckpointMismatchError(ValueError):
    """A whole checkpoint belongs to another model or role."""


SHARED_ERRORS = (FolderExistsError, CheckpointMismatchError, ManifestError, CheckpointCorruptError)
"""Errors that all ranks raise when one of them has found something; see `Peers.agree`."""


# --- reading ------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckpointReader:
    """A checkpoint whose manifest and state have been checked. Made by `open_checkpoint`.

    Tensor files are checked by `verify`: each rank those that it reads.
    """

    directory: Path
    """Where it is."""
    state: Mapping[str, Any]
    """The JSON state."""
    num_ranks: int
    """Ranks that wrote it."""
    sha256: str
    """The manifest's digest: equal for equal checkpoints."""
    _manifest: Mapping[str, Any]
    _layouts: Mapping[str, WeightLayout]

    def layout(self, group: str) -> WeightLayout:
        """What lies where: files as ranks.

        Raises:
            CheckpointMismatchError: There is no such group.
        """
        if group not in self._layouts:
            raise CheckpointMismatchError(
                f"checkpoint {str(self.directory)!r} has no {group!r}, only "
                f"{sorted(self._layouts)}: give one that the same role wrote"
            )
        return self._layouts[group]

    @property
    def groups(self) -> Collection[str]:
        """Names of its groups of tensors."""
        return self._layouts.keys()

    def parameters(self, group: str) -> Manifest:
        """A group's parameters: global shapes and element types."""
        return self.layout(group).manifest

    def files(self, group: str) -> list[str]:
        """A group's file names; their numbers are the sources of `copies`."""
        self.layout(group)
        return list(self._manifest["groups"][group]["files"])

    def copies(
        self, group: str, shard: RankShard, tensors: Iterable[str] | None = None
    ) -> list[Copy]:
        """What to read for a rank's tensors; see `read_copies`.

        Raises:
            CheckpointCorruptError: The files lack an element.
        """
        try:
            return read_copies(self.layout(group), shard, tensors)
        except ManifestError as error:
            raise CheckpointCorruptError(f"{self.directory / MANIFEST_FILE}: {error}") from error

    def verify(self, files: Iterable[str]) -> None:
        """Hashes files; raises CheckpointCorruptError for the first that was changed."""
        for name in files:
            path = self.directory / name
            try:
                found = sha256_of(path)
            except OSError as error:
                raise CheckpointCorruptError(
                    f"{path} cannot be read ({error.strerror}): {_REMEDY}"
                ) from error
            if found != self._manifest["files"][name]["sha256"]:
                raise CheckpointCorruptError(f"{path} does not match its SHA-256: {_REMEDY}")

    def files_of(self, group: str, copies: Iterable[Copy]) -> list[str]:
        """Names of the files that copies read."""
        files = self.files(group)
        return [files[number] for number in sorted({copy.source for copy in copies})]

    def read(self, group: str, copies: Iterable[Copy], tensors: Mapping[str, torch.Tensor]) -> None:
        """Reads slices of the files into tensors, in place, one slice at a time.

        Args:
            group: Of the files.
            copies: From `copies`.
            tensors: Floating, shaped as the shard says, on any device, by name.
        """
        for piece, values in self._boxes(group, copies):
            place(tensors[piece.tensor], piece, values)

    def whole(self, group: str, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields whole parameters on the CPU, one after another; first verifies the group's files.

        They have the shapes and element types of `parameters`.
        """
        self.verify(self.files(group))
        for name in names:
            layout = whole_layout({name: self.parameters(group)[name]})
            assembly = Assembly(layout, 0)
            for piece, values in self._boxes(group, self.copies(group, layout.ranks[0])):
                assembly.put(piece, values)
            yield from assembly.whole()

    def _boxes(self, group: str, copies: Iterable[Copy]) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Reads one slice after another: what it is for a rank's tensor, and its values."""
        files = self.files(group)
        by_file: dict[int, list[Copy]] = defaultdict(list)
        for copy in copies:
            by_file[copy.source].append(copy)
        for number, wanted in by_file.items():
            with safe_open(self.directory / files[number], framework="pt") as content:
                for copy in wanted:
                    stored = content.get_slice(copy.source_tensor)
                    yield copy.wanted, stored[ranges(copy.source_origin, copy.box)]

    def random(self, rank: int) -> RandomState | None:
        """The generators of a rank, verified; None where it has none here."""
        if rank not in self._manifest["random"]:
            return None
        tensors_file, state_file = random_files(rank)
        self.verify((tensors_file, state_file))
        with safe_open(self.directory / tensors_file, framework="pt") as content:
            tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
        return tensors, json.loads((self.directory / state_file).read_bytes())


def open_checkpoint(directory: Path) -> CheckpointReader:
    """Checks the manifest, the presence and size of every file, and the state.

    Raises:
        ValueError: There is no checkpoint.
        CheckpointCorruptError: A file is missing, cut or changed; names it.
        CheckpointMismatchError: It has another format.
    """
    directory = Path(directory)
    manifest_path = directory / MANIFEST_FILE
    if not manifest_path.is_file():
        raise ValueError(
            f"checkpoint {str(directory)!r} has no {MANIFEST_FILE}: give a folder that a save wrote"
        )
    try:
        manifest = json.loads(manifest_path.read_bytes())
        digest = manifest.pop("sha256")
        is_intact = digest == digest_of(manifest)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointCorruptError(f"{manifest_path} is not a manifest: {error}") from error
    if not is_intact:
        raise CheckpointCorruptError(f"{manifest_path} does not match its own SHA-256")
    if manifest["format"] != FORMAT:
        raise CheckpointMismatchError(
            f"{manifest_path} has format {manifest['format']!r}: this version reads {FORMAT!r}"
        )
    for name, expected in manifest["files"].items():
        _check_place(directory, name)
        _check_size(directory / name, expected["bytes"])
    groups = manifest["groups"].items()
    listed = {name: set(group["files"]) <= manifest["files"].keys() for name, group in groups}
    if not all(listed.values()):
        raise CheckpointCorruptError(f"{manifest_path} has groups with files that it does not list")
    layouts = {name: decode_group(group) for name, group in manifest["groups"].items()}
    reader = CheckpointReader(directory, {}, manifest["ranks"], digest, manifest, layouts)
    reader.verify([STATE_FILE])
    state = json.loads((directory / STATE_FILE).read_bytes())
    return CheckpointReader(directory, state, manifest["ranks"], digest, manifest, layouts)


def _check_place(directory: Path, name: str) -> None:
    """Refuses a file that is not one of the folder itself, by its name or by a link."""
    path = directory / name
    if Path(name).name != name or path.resolve().parent != directory.resolve():
        raise CheckpointCorruptError(
            f"{directory / MANIFEST_FILE} names {name!r}, which leads out of the folder: {_REMEDY}"
        )


def _check_size(path: Path, expected: int) -> None:
    if not path.is_file():
        raise CheckpointCorruptError(f"{path} is missing: {_REMEDY}")
    size = path.stat().st_size
    if size != expected:
        raise CheckpointCorruptError(
            f"{path} has {size} bytes, but {expected} were written: {_REMEDY}"
        )


def random_files(rank: int) -> tuple[str, str]:
    """Names of the files with a rank's generators: tensors, and the rest."""
    return f"random-rank{rank:05}-00001.safetensors", f"random-rank{rank:05}.json"


def sha256_of(path: Path) -> str:
    """Hash of a file, hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_HASH_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def digest_of(content: Mapping[str, Any]) -> str:
    """Hash of JSON values, hexadecimal: equal for equal ones."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
