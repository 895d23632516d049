"""Writing of checkpoints, whole or absent: by all ranks in step, or by each at its own pace.

Ranks in step agree on everything by collective operations. Ranks at their own pace need none: rank
0 has the others write their parts (`write_part`) into a folder that it made, and finishes it.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from safetensors import SafetensorError
from safetensors.torch import save_file

from rolemesh.engine.layout.manifest import ITEM_BYTES, Parameter, num_elements
from rolemesh.engine.parallel.agreement import Peers
from rolemesh.engine.weights.checkpoints.checkpoint import (
    FORMAT,
    MANIFEST_FILE,
    SHARED_ERRORS,
    STATE_FILE,
    RandomState,
    digest_of,
    random_files,
    sha256_of,
)
from rolemesh.engine.weights.checkpoints.disk_layout import (
    check_whole,
    decode_group,
    encode_parameters,
    encode_pieces,
    written_files,
)
from rolemesh.engine.weights.checkpoints.folders import settle_file, sync_path, whole_folder
from rolemesh.engine.weights.copies import Copy
from rolemesh.engine.weights.sharded_tensors import ShardedTensors, part

SHARD_BYTES = 2 * 2**30
"""No file has more bytes of tensors than this."""

ROOM_MARGIN_BYTES = 2**20
"""Room that a checkpoint takes beside its tensors, of which a hundredth comes on top: manifest,
headers, random states."""

_FULL = (errno.ENOSPC, errno.EDQUOT)

Progress: TypeAlias = Callable[[str, int, int], None]
"""Is told a stage, files done and files in all, from the thread that writes."""

Groups: TypeAlias = Mapping[str, ShardedTensors]
"""By group, what the ranks hold: floating, shaped as the layout says, on any device. Layouts are
the same on all ranks."""

OtherParts: TypeAlias = "Callable[[Path], Future[Any]]"
"""Has ranks 1, 2, ... write their parts into a folder; done when every one of them has ended."""


class CheckpointRoomError(RuntimeError):
    """The file system of a checkpoint has no room for it; says how much is needed and free."""


_ERRORS = (CheckpointRoomError, *SHARED_ERRORS)
"""Errors that all ranks raise when one of them has found something."""


def silent(stage: str, done: int, total: int) -> None:
    """Progress that goes nowhere."""


def write_checkpoint(
    directory: Path,
    groups: Groups,
    state: Mapping[str, Any],
    *,
    random: RandomState | None = None,
    peers: Peers | None = None,
    others: OtherParts | None = None,
    progress: Progress = silent,
) -> None:
    """Writes a checkpoint that is on disk, whole, when this returns.

    Ranks in step all call it, with `peers`. Of ranks at their own pace rank 0 alone does, with
    `others`, as whom `peers` names none. When a rank fails, all raise, and nothing has the
    directory's name. (When one dies after all files are written, the checkpoint may be there,
    whole.)

    Args:
        directory: Must not exist; on a disk that all ranks see.
        groups: Tensors of all ranks.
        state: What json can hold; rank 0's is written.
        random: This rank's generators: uint8 [bytes] tensors, and what json can hold.
        peers: The ranks; None for one alone.
        others: Writes the parts of ranks at their own pace; None where there are none.
        progress: Told of this rank's files. If it raises, there is no checkpoint.

    Raises:
        CheckpointRoomError: The disk is full, or would be; no byte was written then.
        FolderExistsError: The directory exists.
        ManifestError: Tensors are not those of their layout, or parts of one are missing.
        ValueError: The state holds something that JSON has no form for (NaN included).
        RuntimeError: Another rank failed (its number and cause).
    """
    ranks = peers or Peers.alone()
    directory = Path(directory).absolute()
    needed = needed_bytes(groups)

    def check() -> tuple[tuple[bytes, bytes], None]:
        for group in groups.values():
            group.check(ranks.rank)
        if ranks.is_first:
            _check_room(directory, needed)
        return (_encode(state), _encode(random[1] if random else {})), None

    (encoded_state, encoded_random), _ = ranks.agree(check, (*_ERRORS, ValueError))
    with whole_folder(directory, peers=ranks) as temporary:
        own = _Part(temporary, groups, ranks.rank, random, encoded_random, progress)

        def write() -> tuple[None, dict[str, Any]]:
            with _room_told(directory, needed):
                return None, own.write(encoded_state if ranks.is_first else None)

        pending = None if others is None else others(temporary)
        try:
            _, answers = ranks.agree(write, _ERRORS)
        finally:
            if pending is not None:
                # Nothing may be written into a folder that is being removed.
                wait([pending])
        if pending is not None:
            pending.result()
            answers = [*answers, *_take_parts(temporary, groups)]

        def describe() -> tuple[None, None]:
            if ranks.is_first:
                with _room_told(directory, needed):
                    content = _manifest(groups, answers)
                    manifest = {**content, "sha256": digest_of(content)}
                    (temporary / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1))
            return None, None

        ranks.agree(describe, _ERRORS)


def write_part(
    folder: Path,
    groups: Groups,
    *,
    rank: int,
    random: RandomState | None = None,
    progress: Progress = silent,
) -> None:
    """Writes the part of rank 1, 2, ... at its own pace into a folder that rank 0 finishes.

    Args:
        folder: Made by rank 0.
        groups: Tensors of all ranks.
        rank: This one.
        random: This rank's generators.
        progress: Told of this rank's files. If it raises, the part is not whole.

    Raises:
        CheckpointRoomError: The disk is full.
        ManifestError: Tensors are not those of their layout.
        ValueError: This rank does not see the folder.
    """
    if not folder.is_dir():
        raise ValueError(
            f"rank {rank} does not see {str(folder)!r}, which rank 0 made: the hosts of a service "
            "write checkpoints together, so give run.directory on a disk that all of them share"
        )
    for group in groups.values():
        group.check(rank)
    encoded_random = _encode(random[1] if random else {})
    with _room_told(folder, needed_bytes(groups)):
        written = _Part(folder, groups, rank, random, encoded_random, progress).write(None)
        (folder / _part_file(rank)).write_text(json.dumps(written))


def needed_bytes(groups: Groups) -> int:
    """Bytes that a checkpoint of all ranks takes at most."""
    tensors = sum(
        num_elements(parameter.box) * ITEM_BYTES[group.layout.dtype_of(name)]
        for group in groups.values()
        if group.tensors
        for name, parameter in group.layout.manifest.items()
    )
    return tensors + tensors // 100 + ROOM_MARGIN_BYTES


# --- inside -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Part:
    """What one rank writes."""

    folder: Path
    groups: Groups
    rank: int
    random: RandomState | None
    encoded_random: bytes
    progress: Progress

    def write(self, encoded_state: bytes | None) -> dict[str, Any]:
        """Writes this rank's files; returns what the manifest says of them.

        Args:
            encoded_state: Rank 0's; None on other ranks.
        """
        planned = {name: list(self._files(name, group)) for name, group in self.groups.items()}
        total = sum(len(contents) for contents in planned.values())
        done = 0
        for name, contents in planned.items():
            for file, copies in contents:
                self.progress("write", done, total)
                _write_tensors(self.folder / file, self.groups[name], copies)
                done += 1
        files = [file for contents in planned.values() for file, _ in contents]
        if encoded_state is not None:
            (self.folder / STATE_FILE).write_bytes(encoded_state)
            files.append(STATE_FILE)
        if self.random is not None:
            tensors_file, state_file = random_files(self.rank)
            save_file(
                {name: tensor.cpu() for name, tensor in self.random[0].items()},
                self.folder / tensors_file,
            )
            (self.folder / state_file).write_bytes(self.encoded_random)
            files += [tensors_file, state_file]
        described = {}
        for done, file in enumerate(files):
            self.progress("settle and hash", done, len(files))
            settle_file(self.folder / file)
            described[file] = _describe(self.folder / file)
        sync_path(self.folder)
        return {
            "groups": {
                name: {file: encode_pieces(copies) for file, copies in contents}
                for name, contents in planned.items()
            },
            "random": self.random is not None,
            "files": described,
        }

    def _files(self, name: str, group: ShardedTensors) -> Iterator[tuple[str, Sequence[Copy]]]:
        """This rank's files of a group: name, and what goes into each."""
        files = written_files(group.layout, self.rank, group.tensors, SHARD_BYTES)
        for number, copies in enumerate(files, start=1):
            yield f"{name}-rank{self.rank:05}-{number:05}.safetensors", copies


def _write_tensors(path: Path, group: ShardedTensors, copies: Sequence[Copy]) -> None:
    save_file(
        {
            copy.target_tensor: part(
                group.tensors[copy.source_tensor].detach(), copy.source_origin, copy.box
            )
            .cpu()
            .contiguous()
            for copy in copies
        },
        path,
    )


def _part_file(rank: int) -> str:
    return f"part-rank{rank:05}.json"


def _take_parts(folder: Path, groups: Groups) -> list[dict[str, Any]]:
    """What ranks 1, 2, ... said of their parts; the files that said so are gone."""
    num_ranks = len(next(iter(groups.values())).layout.ranks)
    answers = []
    for rank in range(1, num_ranks):
        path = folder / _part_file(rank)
        answers.append(json.loads(path.read_text()))
        path.unlink()
    return answers


def _check_room(directory: Path, needed: int) -> None:
    free = _free_bytes(directory)
    if free < needed:
        raise CheckpointRoomError(_no_room(directory, needed, free))


@contextmanager
def _room_told(directory: Path, needed: int) -> Iterator[None]:
    """Makes a full disk an error that says so."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        # safetensors has the number in its text alone.
        is_full = any(f"os error {number}" in str(error) for number in _FULL)
        if not is_full and getattr(error, "errno", None) not in _FULL:
            raise
        told = f"{_no_room(directory, needed, _free_bytes(directory))} ({error})"
        raise CheckpointRoomError(told) from error


def _free_bytes(directory: Path) -> int:
    """Bytes that this user may still write to the file system of a folder, which may be absent."""
    there = next(path for path in (directory, *directory.parents) if path.exists())
    status = os.statvfs(there)
    return status.f_bavail * status.f_frsize


def _no_room(directory: Path, needed: int, free: int) -> str:
    return (
        f"a checkpoint in {str(directory)!r} takes {needed} bytes, and its file system has {free} "
        "free: make room there, keep fewer checkpoints (run.checkpoint.keep), or write fewer "
        "(run.checkpoint.every_steps)"
    )


def _manifest(groups: Groups, answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The manifest but for its digest; raises ManifestError when parts were not written."""
    encoded = {}
    for name, group in groups.items():
        files = {
            file: pieces for answer in answers for file, pieces in answer["groups"][name].items()
        }
        present = {piece["parameter"] for pieces in files.values() for piece in pieces}
        parameters = {
            parameter: Parameter(entry.shape, group.layout.dtype_of(parameter))
            for parameter, entry in group.layout.manifest.items()
            if parameter in present
        }
        encoded[name] = {"parameters": encode_parameters(parameters), "files": files}
        check_whole(decode_group(encoded[name]))
    return {
        "format": FORMAT,
        "ranks": len(answers),
        "groups": encoded,
        "random": [rank for rank, answer in enumerate(answers) if answer["random"]],
        "files": {file: entry for answer in answers for file, entry in answer["files"].items()},
    }


def _encode(state: Mapping[str, Any]) -> bytes:
    return json.dumps(state, allow_nan=False, indent=1).encode()


def _describe(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
