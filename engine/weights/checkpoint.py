"""Checkpoints as data: safetensors and JSON, whole or absent, every byte hashed.

A folder holds groups of named tensors (`<group>-00001.safetensors` ...), `state.json`, and
`manifest.json` with size and SHA-256 of every file and its own digest. Nothing in it is ever
executed: no pickle, no torch.load.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rolemesh.engine.weights.folders import whole_folder

MANIFEST_FILE = "manifest.json"
STATE_FILE = "state.json"
FORMAT = "rolemesh-checkpoint-1"
SHARD_BYTES = 2 * 2**30
"""A new file begins when the next tensor would make one larger than this."""
_HASH_BLOCK_BYTES = 2**22


class CheckpointCorruptError(RuntimeError):
    """A checkpoint's bytes are not those that were written; names the file."""


class CheckpointMismatchError(ValueError):
    """A whole checkpoint belongs to another model or role."""


def write_checkpoint(
    directory: Path,
    groups: Mapping[str, Mapping[str, torch.Tensor]],
    state: Mapping[str, Any],
) -> None:
    """Writes a checkpoint that is on disk, whole, when this returns.

    Args:
        directory: must not exist.
        groups: tensors by group and name, any dtype and shape, from any device.
        state: what json can hold.

    Raises:
        FolderExistsError: the directory exists.
        ValueError: the state holds something that JSON has no form for (NaN included).
    """
    encoded_state = json.dumps(state, allow_nan=False, indent=1).encode()
    with whole_folder(directory) as temporary:
        names: dict[str, list[str]] = {}
        for group, tensors in groups.items():
            names[group] = []
            for index, shard in enumerate(_shards(tensors), start=1):
                name = f"{group}-{index:05}.safetensors"
                save_file(shard, temporary / name)
                names[group].append(name)
        (temporary / STATE_FILE).write_bytes(encoded_state)
        files = [STATE_FILE, *(name for group in names.values() for name in group)]
        content = {
            "format": FORMAT,
            "groups": names,
            "files": {name: _describe(temporary / name) for name in files},
        }
        manifest = {**content, "sha256": _digest_of(content)}
        (temporary / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1))


@dataclass(frozen=True)
class CheckpointReader:
    """A checkpoint whose every byte has been checked. Made by `open_checkpoint`."""

    directory: Path
    """Where it is."""
    groups: Mapping[str, tuple[str, ...]]
    """File names by group."""
    state: Mapping[str, Any]
    """The JSON state."""

    def shapes(self, group: str) -> dict[str, tuple[int, ...]]:
        """Shapes of a group's tensors by name, without loading them."""
        shapes: dict[str, tuple[int, ...]] = {}
        for file in self._files(group):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - no iterator of its own
                    shapes[name] = tuple(tensors.get_slice(name).get_shape())
        return shapes

    def tensors(self, group: str) -> Iterator[tuple[str, torch.Tensor]]:
        """A group's tensors on the CPU, one at a time."""
        for file in self._files(group):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - no iterator of its own
                    yield name, tensors.get_tensor(name)

    def _files(self, group: str) -> list[Path]:
        if group not in self.groups:
            raise CheckpointMismatchError(
                f"checkpoint {str(self.directory)!r} has no {group!r}, only {sorted(self.groups)}: "
                "give one that the same role wrote"
            )
        return [self.directory / name for name in self.groups[group]]


def open_checkpoint(directory: Path) -> CheckpointReader:
    """Checks size and hash of every file, then reads the state.

    Raises:
        ValueError: there is no checkpoint.
        CheckpointCorruptError: a file is missing, cut or changed; names it.
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
        is_intact = digest == _digest_of(manifest)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointCorruptError(f"{manifest_path} is not a manifest: {error}") from error
    if not is_intact:
        raise CheckpointCorruptError(f"{manifest_path} does not match its own SHA-256")
    if manifest["format"] != FORMAT:
        raise CheckpointMismatchError(
            f"{manifest_path} has format {manifest['format']!r}: this version reads {FORMAT!r}"
        )
    for name, expected in manifest["files"].items():
        _check_file(directory / name, expected)
    return CheckpointReader(
        directory,
        {group: tuple(names) for group, names in manifest["groups"].items()},
        json.loads((directory / STATE_FILE).read_bytes()),
    )


def _check_file(path: Path, expected: Mapping[str, Any]) -> None:
    if not path.is_file():
        raise CheckpointCorruptError(f"{path} is missing: go back to an older checkpoint")
    size = path.stat().st_size
    if size != expected["bytes"]:
        raise CheckpointCorruptError(
            f"{path} has {size} bytes, but {expected['bytes']} were written: "
            "go back to an older checkpoint"
        )
    if _sha256(path) != expected["sha256"]:
        raise CheckpointCorruptError(
            f"{path} does not match its SHA-256: go back to an older checkpoint"
        )


def _describe(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_HASH_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _digest_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _shards(tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Cuts a group into files; a group without tensors has none."""
    shard: dict[str, torch.Tensor] = {}
    num_bytes = 0
    for name, tensor in tensors.items():
        if shard and num_bytes + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard, num_bytes = {}, 0
        shard[name] = tensor.detach().cpu().contiguous()
        num_bytes += tensor.nbytes
    if shard:
        yield shard
