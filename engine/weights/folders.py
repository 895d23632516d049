"""Folders that are either whole or absent, also after a crash.

A folder is written under a temporary name beside its target, forced to disk, and renamed. A
crash leaves at most a `<name>.tmp-<uuid>` that nobody reads.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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


def _settle_tree(directory: Path) -> None:
    """Makes every file below the directory readable and forces all of it to disk."""
    for parent, _, files in os.walk(directory, topdown=False):
        for name in files:
            # safetensors writes files that only their owner may read; a folder is shared between
            # containers whose users differ.
            Path(parent, name).chmod(_FILE_MODE)
            sync_path(Path(parent, name))
        sync_path(Path(parent))


@contextmanager
def whole_folder(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yields an empty folder that becomes the target when the block ends well.

    When the block raises, the temporary folder is removed and the target is as before.

    Args:
        target: the folder to make; parents are made if absent.
        replace: put the new folder in the place of an old one. The old one is moved aside first
            and removed last, so for a moment no folder has the name, but none is ever half.

    Raises:
        FolderExistsError: the target exists and replace is False.
    """
    target = Path(target).absolute()
    if target.exists() and not replace:
        raise FolderExistsError(
            f"directory {str(target)!r} exists already: give a fresh one, or remove it"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{target.name}.tmp-{uuid.uuid4().hex}")
    temporary.mkdir()
    try:
        yield temporary
        _settle_tree(temporary)
        _move_into_place(temporary, target, replace=replace)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_path(target.parent)


def _move_into_place(temporary: Path, target: Path, *, replace: bool) -> None:
    if not (replace and target.exists()):
        # A target that appeared meanwhile makes rename fail, unless it is an empty folder.
        temporary.rename(target)
        return
    old = target.with_name(f"{target.name}.old-{uuid.uuid4().hex}")
    target.rename(old)
    temporary.rename(target)
    sync_path(target.parent)
    shutil.rmtree(old)
