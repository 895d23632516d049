"""Folders and files that are either whole or absent, also after a crash, and with several writers.

A folder is written under a temporary name beside its target, forced to disk, and renamed. A
crash leaves at most a `<name>.tmp-<uuid>`, which no reader opens.
"""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rolemesh.engine.parallel.agreement import Peers

_FILE_MODE = 0o644


class FolderExistsError(ValueError):
    """A folder that must be fresh exists already."""


def sync_path(path: Path) -> None:
    """Forces a file's bytes, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def settle_file(path: Path) -> None:
    """Makes a file readable by all and forces it to disk.

    safetensors writes files that only their owner may read; a folder is shared between containers
    whose users differ.
    """
    path.chmod(_FILE_MODE)
    sync_path(path)


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """Yields the name of a file to write, which becomes the target when the block ends well.

    When the block raises, what was written is removed and the target is as before.

    Args:
        target: The file to make, or to replace; parents are made if absent.
    """
    target = Path(target).absolute()
    temporary = target.with_name(f"{target.name}.tmp-{uuid.uuid4().hex}")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield temporary
        settle_file(temporary)
        temporary.replace(target)
        sync_path(target.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _settle_tree(directory: Path) -> None:
    """Settles every file below the directory, and the folders themselves."""
    for parent, _, files in os.walk(directory, topdown=False):
        for name in files:
            settle_file(Path(parent, name))
        sync_path(Path(parent))


@contextmanager
def whole_folder(
    target: Path, *, replace: bool = False, peers: Peers | None = None
) -> Iterator[Path]:
    """Yields an empty folder that becomes the target when the block ends well.

    When the block raises, the temporary folder is removed and the target is as before.

    Ranks that write a folder together (on a disk that all of them see) all get the same temporary
    folder. Rank 0 makes, settles and renames it. What can fail in their blocks must be done through
    `peers.agree`, so that a block that raises does so on every rank; a rank on another machine
    settles its files itself, since rank 0 can force only what its own machine holds.

    Args:
        target: The folder to make; parents are made if absent.
        replace: Put the new folder in the place of an old one. The old one is moved aside first
            and removed last, so for a moment no folder has the name, but none is ever half.
        peers: The ranks; None for one alone.

    Raises:
        FolderExistsError: The target exists and replace is False.
        ValueError: A rank does not see the folder that rank 0 made.
    """
    target = Path(target).absolute()
    ranks = peers or Peers.alone()
    name = f"{target.name}.tmp-{uuid.uuid4().hex}"

    def make() -> tuple[None, str]:
        if ranks.is_first:
            if target.exists() and not replace:
                raise FolderExistsError(
                    f"directory {str(target)!r} exists already: give a fresh one, or remove it"
                )
            target.parent.mkdir(parents=True, exist_ok=True)
            target.with_name(name).mkdir()
        return None, name

    def see() -> tuple[None, None]:
        if not temporary.is_dir():
            raise ValueError(
                f"rank {ranks.rank} does not see {str(temporary)!r}, which rank 0 made: give a "
                "directory on a disk that all ranks share"
            )
        return None, None

    def finish() -> tuple[None, None]:
        if ranks.is_first:
            _settle_tree(temporary)
            _move_into_place(temporary, target, replace=replace)
            sync_path(target.parent)
        return None, None

    try:
        _, names = ranks.agree(make, (FolderExistsError, ValueError))
        temporary = target.with_name(names[0])
        ranks.agree(see)
        yield temporary
        ranks.agree(finish, (FolderExistsError,))
    except BaseException:
        if ranks.is_first:
            shutil.rmtree(target.with_name(name), ignore_errors=True)
        raise


def _move_into_place(temporary: Path, target: Path, *, replace: bool) -> None:
    if not (replace and target.exists()):
        # A target that appeared meanwhile makes rename fail, unless it is an empty folder.
        try:
            temporary.rename(target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise FolderExistsError(
                f"directory {str(target)!r} has appeared meanwhile: give a fresh one"
            ) from error
        return
    old = target.with_name(f"{target.name}.old-{uuid.uuid4().hex}")
    target.rename(old)
    temporary.rename(target)
    sync_path(target.parent)
    shutil.rmtree(old)
