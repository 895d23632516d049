"""A folder that only this user may enter, for a socket: a leftover of a killed process is removed.

It lies in the folder for temporary files, since a socket's path may have 107 bytes (unix(7)) and a
run's folder any length. Not in XDG_RUNTIME_DIR, which goes when its user logs out: a run may stay.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

_PREFIX = "rolemesh-store-"
_LONGEST_PATH_BYTES = 107
_ROOM_BYTES = 64
"""For the folder's own name and the name of a socket in it."""

_LEFTOVER_AGE_S = 60.0
"""A younger folder may be one whose process is about to lock it."""


class SocketFolder:
    """A folder of mode 0700 that exists until `remove`.

    Invariant: it is locked while this process lives, so that others can tell it from a leftover.
    The lock also keeps it from systemd-tmpfiles, which removes old files.

    Example::

        folder = SocketFolder()
        path = folder.path / "socket"  # /tmp/rolemesh-store-x3k9_2ab/socket
        folder.remove()
    """

    def __init__(self) -> None:
        """Makes the folder, after removing those of this user whose process is gone."""
        parent = _parent()
        _remove_leftovers(parent)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self._lock = _opened(self.path)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def remove(self) -> None:
        """Removes the folder with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _parent() -> Path:
    """The folder for temporary files, or /tmp where a socket in that would have too long a path."""
    parent = Path(tempfile.gettempdir()).absolute()
    fits = len(os.fsencode(parent)) + _ROOM_BYTES <= _LONGEST_PATH_BYTES
    return parent if fits else Path("/tmp")


def _opened(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _remove_leftovers(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        # Gone meanwhile, of another user, no folder, or locked: then it is none of ours to remove.
        with contextlib.suppress(OSError):
            descriptor = _opened(folder)
            try:
                found = os.fstat(descriptor)
                is_old = time.time() - found.st_mtime > _LEFTOVER_AGE_S
                if is_old and found.st_uid == os.geteuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)
            finally:
                os.close(descriptor)
