"""Files of slots and logs: their names, owners and locks, and the room for them.

Each file belongs to a rank of a role in a run, and is locked by the process that uses it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import mmap
import os
import re
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from rolemesh.engine.transport.slots.shm_directory import SHM_DIRECTORY

logger = logging.getLogger(__name__)

NUM_SLOTS = 2
"""Slots of a rank: while one is written, the other one stays whole."""

NUM_LOGS = NUM_SLOTS + 1
"""Logs of a rank, one a step: of the step in progress, and of those whose cuts may be there."""

SLOT_NAME = re.compile(
    r"rolemesh-cut-[0-9a-f]{16}-[a-z][a-z0-9_]*-[0-9]{1,6}of[0-9]{1,6}-(?:[01]|log[0-2](?:s[0-9]{1,2})?)",
    re.ASCII,
)
"""The only names that are ever opened or removed. Leftovers of other shared memory differ."""

MAX_TEXT_BYTES = 1 << 28
"""Longest header that is read."""

KEPT_UNHELD_S = 24 * 3600.0
"""Slots that no process holds are kept this long, for a run that is started again."""

LOCK_WAIT_S = 10.0
"""A process that was just killed takes a while to let go of gigabytes, and of its lock."""

PAGE_BYTES = mmap.PAGESIZE

_MAGIC = b"RMCUT-1\n"
_PROLOGUE = struct.Struct("<8sQQ")
"""Magic, mark (bytes of the header's text, 0: not whole), bytes of the run's id, which follows."""
MARK_AT = 8
"""Byte at which the mark begins."""
TEXT_AT = PAGE_BYTES
"""Byte at which the header's text begins."""
_LOCK_POLL_S = 0.05
STAT_BLOCK_BYTES = 512
"""Of a block of `stat`, whatever the file system's own are."""
_NO_ROOM = (errno.ENOSPC, errno.EFBIG, errno.ENOMEM, errno.EDQUOT)


class SlotHeldError(RuntimeError):
    """A process that still lives holds the lock of a slot."""


class SlotRoomError(RuntimeError):
    """The file system of shared memory lacks the room for a slot, or is not to be had."""


@dataclass(frozen=True, slots=True)
class SlotOwner:
    """The rank of a role in a run to which slots belong, in whatever process."""

    run_id: str
    role: str
    rank: int
    world_size: int
    directory: Path = SHM_DIRECTORY
    """Where the files are."""
    number: int = 0
    """Of the process among those of several services of the role: each has logs of its own."""

    def path(self, index: int) -> Path:
        """The file of a slot, 0 <= index < NUM_SLOTS."""
        return self._file(str(index))

    def log_path(self, index: int) -> Path:
        """The file of a log, 0 <= index < NUM_LOGS."""
        return self._file(f"log{index}s{self.number}" if self.number else f"log{index}")

    def _file(self, name: str) -> Path:
        place = f"{self.rank}of{self.world_size}"
        return self.directory / f"{prefix(self.run_id)}-{self.role}-{place}-{name}"


def prefix(run_id: str) -> str:
    """How the names of a run's files begin."""
    return f"rolemesh-cut-{hashlib.sha256(run_id.encode()).hexdigest()[:16]}"


def slots_in(directory: Path) -> Iterator[Path]:
    """Files of this user with the name of a slot."""
    for path in directory.iterdir():
        if SLOT_NAME.fullmatch(path.name) is None:
            continue
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
            yield path


def memory_of_slots(run_id: str, directory: Path = SHM_DIRECTORY) -> int:
    """Bytes of memory that all slots and logs of a run take on this host.

    Raises:
        FileNotFoundError: There is no such folder.
    """
    taken = 0
    for path in slots_in(directory):
        if path.name.startswith(f"{prefix(run_id)}-"):
            with suppress(FileNotFoundError):  # removed meanwhile
                taken += path.stat().st_blocks * STAT_BLOCK_BYTES
    return taken


def open_checked(path: Path) -> int | None:
    """A descriptor of a slot that is what it should be; None if there is none."""
    if SLOT_NAME.fullmatch(path.name) is None:
        raise ValueError(f"{path.name!r} is not the name of a slot: give the role as a plain word")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EACCES, errno.ELOOP):
            return None  # not there, or not ours
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        os.close(descriptor)
        return None
    return descriptor


def create_locked(path: Path) -> int:
    """A descriptor of a new file of this name, with its lock."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        descriptor = os.open(path, flags, 0o600)
        # A process that makes room may look at the new file first: it lets the lock go at once,
        # and may have removed the file.
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)


def open_locked(path: Path, wait_s: float | None = None) -> int | None:
    """A descriptor with the lock of the file that has this name now; None if there is none."""
    deadline = time.monotonic() + (LOCK_WAIT_S if wait_s is None else wait_s)
    while (descriptor := open_checked(path)) is not None:
        if is_free(descriptor):
            if os.fstat(descriptor).st_nlink:
                return descriptor
            os.close(descriptor)  # removed meanwhile
            continue
        os.close(descriptor)
        if time.monotonic() >= deadline:
            raise SlotHeldError(
                f"shared memory {path} is held by another process that still lives: end the "
                "service of this run that hangs, then try again"
            )
        time.sleep(_LOCK_POLL_S)
    return None


def is_free(descriptor: int) -> bool:
    """Takes the lock; False where another process has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _prologue(descriptor: int) -> tuple[int, bytes]:
    """Mark and run of a slot."""
    given = os.pread(descriptor, TEXT_AT, 0)
    if len(given) < TEXT_AT:
        return 0, b""
    magic, mark, length = _PROLOGUE.unpack_from(given)
    if magic != _MAGIC:
        return 0, b""
    return mark, given[_PROLOGUE.size : _PROLOGUE.size + length]


def write_prologue(descriptor: int, owner: SlotOwner) -> None:
    """Says whose file it is, and that no header is whole."""
    run_id = owner.run_id.encode()
    os.pwrite(descriptor, _PROLOGUE.pack(_MAGIC, 0, len(run_id)) + run_id, 0)


def run_of(descriptor: int) -> str:
    """Run of a slot; empty where that was not written yet."""
    return _prologue(descriptor)[1].decode(errors="replace")


def header_of(descriptor: int) -> bytes | None:
    """The text of a slot's header; None where the slot is not whole."""
    mark, _ = _prologue(descriptor)
    if not 0 < mark <= min(MAX_TEXT_BYTES, os.fstat(descriptor).st_size - TEXT_AT):
        return None
    return os.pread(descriptor, mark, TEXT_AT)


@dataclass(frozen=True, slots=True)
class FreeSlot:
    """A slot or log that no process holds."""

    path: Path
    run_id: str
    written_at: float


@contextmanager
def free_slots(directory: Path) -> Iterator[list[FreeSlot]]:
    """Slots of this user that no process holds, the oldest first; locked as long as it lasts."""
    found, descriptors = [], []
    try:
        for path in slots_in(directory):
            descriptor = open_checked(path)
            if descriptor is None:
                continue
            descriptors.append(descriptor)
            if is_free(descriptor):
                run_id, status = run_of(descriptor), os.fstat(descriptor)
                found.append(FreeSlot(path, run_id, status.st_mtime))
        yield sorted(found, key=lambda slot: slot.written_at)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def reserve(descriptor: int, num_bytes: int, owner: SlotOwner) -> None:
    """Reserves all bytes, so that a lack of room does not show as SIGBUS at the first write.

    A file system of shared memory may be larger than the memory: that lack would show as a process
    that the system ends.
    """
    while True:
        try:
            if num_bytes > psutil.virtual_memory().available:
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            os.posix_fallocate(descriptor, 0, num_bytes)
            return
        except OSError as error:
            if error.errno not in _NO_ROOM or not _make_room(owner):
                raise SlotRoomError(why_no_room(owner, num_bytes, error)) from error


def _make_room(owner: SlotOwner) -> bool:
    """Removes the oldest slot of another run that no process holds; False if there is none."""
    with free_slots(owner.directory) as free:
        for slot in free:
            if not slot.path.name.startswith(f"{prefix(owner.run_id)}-"):
                slot.path.unlink(missing_ok=True)
                logger.warning(
                    "removed the cut %s of run %r, which no process holds, to make room for run %r",
                    *(slot.path.name, slot.run_id or "(unknown)", owner.run_id),
                )
                return True
    return False


def why_no_room(owner: SlotOwner, num_bytes: int, error: OSError) -> str:
    """What a user reads where slots have no room: how much is needed, free, and the remedy."""
    try:
        status = os.statvfs(owner.directory)
        left = min(status.f_bavail * status.f_frsize, psutil.virtual_memory().available)
        free = f"{left} are free"
    except OSError as problem:
        free = f"it cannot be asked ({problem.strerror})"
    return (
        f"a cut of rank {owner.rank} takes {NUM_SLOTS} slots of {num_bytes} bytes in "
        f"{owner.directory}, but {free} ({error.strerror}): enlarge /dev/shm (Docker: shm_size) "
        "or the host's memory, or switch cuts off (run.recovery.cuts=false)"
    )
