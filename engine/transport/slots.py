"""Slots: files of shared memory that outlive their process, and say whether they are whole.

A slot has a fixed area for a header, and room for tensors behind it. Its mark is cleared before
anything is written and set last: a process that is killed in between leaves a slot that is not
whole. Its living owner holds a lock on it.

Logs lie beside them, with equal names, owners and ends. What is in a log grows record by record.
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
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from rolemesh.engine.transport.shm import SHM_DIRECTORY

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

LOCK_WAIT_S = 10.0
"""A process that was just killed takes a while to let go of gigabytes, and of its lock."""

PAGE_BYTES = mmap.PAGESIZE

_MAGIC = b"RMCUT-1\n"
_PROLOGUE = struct.Struct("<8sQQ")
"""Magic, mark (bytes of the header's text, 0: not whole), bytes of the run's id, which follows."""
_MARK_AT = 8
_TEXT_AT = PAGE_BYTES
_LOCK_POLL_S = 0.05
_NO_ROOM = (errno.ENOSPC, errno.EFBIG, errno.ENOMEM, errno.EDQUOT)


class SlotHeldError(RuntimeError):
    """A process that still lives holds the lock of a slot."""


class SlotRoomError(RuntimeError):
    """The file system of shared memory lacks the room for a slot, or is not to be had."""


class LogUnavailableError(RuntimeError):
    """A log can be neither opened nor made; says why."""


class LogHeldError(LogUnavailableError):
    """A process that still lives holds the lock of a log."""


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
        return self.directory / f"{_prefix(self.run_id)}-{self.role}-{place}-{name}"


class Slot:
    """An open slot, which this process holds. Owner: the compute thread.

    Invariant: while `header` gives a text, all that was written before `finish` of it is in place.

    Example::

        slot = Slot.create(owner, 0, 1 << 20)
        slot.clear()
        slot.memory[2 * PAGE_BYTES :].copy_(bytes_of_something)
        slot.finish(b"{}")
        slot.close()  # and the file stays
    """

    def __init__(self, path: Path, descriptor: int, num_bytes: int) -> None:
        """Maps a file whose lock this process has; made by `open` and `create`."""
        self.num_bytes = num_bytes
        self._path = path
        self._descriptor = descriptor
        self._mapping = mmap.mmap(descriptor, num_bytes)
        self.memory = torch.frombuffer(self._mapping, dtype=torch.uint8)
        """uint8 [num_bytes] over the whole file."""

    @staticmethod
    def open(owner: SlotOwner, index: int) -> Slot | None:
        """Opens the slot that is there; None if there is none that could be one.

        Raises:
            SlotHeldError: A process that still lives holds it.
        """
        path = owner.path(index)
        descriptor = _open_locked(path)
        if descriptor is None:
            return None
        try:
            num_bytes = os.fstat(descriptor).st_size
            if num_bytes <= _TEXT_AT or _run_of(descriptor) != owner.run_id:
                os.close(descriptor)
                return None
            return Slot(path, descriptor, num_bytes)
        except BaseException:
            os.close(descriptor)
            raise

    @staticmethod
    def create(owner: SlotOwner, index: int, num_bytes: int) -> Slot:
        """Makes an empty slot in place of what is there; all its pages are reserved and warm.

        Slots of other runs that no process holds make room for it, the oldest first.

        Raises:
            SlotHeldError: A process that still lives holds the slot that is there.
            SlotRoomError: There is no room; says how much is needed and free.
        """
        path = owner.path(index)
        before = _open_locked(path)
        if before is not None:
            path.unlink(missing_ok=True)
            os.close(before)
        try:
            descriptor = _create_locked(path)
        except OSError as error:
            raise SlotRoomError(_no_room(owner, num_bytes, error)) from error
        try:
            _reserve(descriptor, num_bytes, owner)
            _write_prologue(descriptor, owner)
            slot = Slot(path, descriptor, num_bytes)
            # The first write to a page takes far longer than the later ones.
            slot.memory[_TEXT_AT::PAGE_BYTES].zero_()
            return slot
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(descriptor)
            raise

    @property
    def is_named(self) -> bool:
        """Whether the name still leads to this file, so that a later process finds it."""
        try:
            found = os.stat(self._path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        own = os.fstat(self._descriptor)
        return (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino)

    def header(self) -> bytes | None:
        """The text of the header; None where the slot is not whole."""
        return _read_header(self._descriptor)

    def clear(self) -> None:
        """Says that the slot is not whole."""
        self._mapping[_MARK_AT : _MARK_AT + 8] = bytes(8)

    def finish(self, text: bytes) -> None:
        """Writes the header, then says that the slot is whole.

        Args:
            text: Not empty; the bytes from page 1 on are its area, as long as the caller leaves it.
        """
        self._mapping[_TEXT_AT : _TEXT_AT + len(text)] = text
        # A mapping that is written to does not change the time of the file.
        os.utime(self._descriptor)
        self._mapping[_MARK_AT : _MARK_AT + 8] = len(text).to_bytes(8, "little")

    def close(self) -> None:
        """Lets the slot go; the file stays. The slot must not be used any more."""
        # A mapping keeps a descriptor of its own, and views keep the mapping.
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)

    def remove(self) -> None:
        """Removes the file and lets the slot go."""
        if self.is_named:
            self._path.unlink(missing_ok=True)
        self.close()


def read_header(owner: SlotOwner, index: int) -> bytes | None:
    """The header of a slot that another process may hold; None where there is no whole one."""
    descriptor = _open_checked(owner.path(index))
    if descriptor is None:
        return None
    try:
        return _read_header(descriptor) if _run_of(descriptor) == owner.run_id else None
    finally:
        os.close(descriptor)


def open_log(owner: SlotOwner, index: int, wait_s: float = 0.0) -> int:
    """Opens a log, or makes an empty one; closing the descriptor lets it go, and the file stays.

    Args:
        owner: Of the log.
        index: Of the log, 0 <= index < NUM_LOGS.
        wait_s: Longest wait for another process to let it go, in seconds.

    Returns:
        A descriptor with the lock of the file. Records begin at byte PAGE_BYTES.

    Raises:
        LogHeldError: A process that still lives holds it.
        LogUnavailableError: There is no room, or something else has its name.
    """
    path = owner.log_path(index)
    descriptor = None
    try:
        descriptor = _open_locked(path, wait_s)
        if descriptor is None:
            descriptor = _create_locked(path)
        if _run_of(descriptor) != owner.run_id:
            os.ftruncate(descriptor, 0)
            _write_prologue(descriptor, owner)
            os.ftruncate(descriptor, PAGE_BYTES)
        return descriptor
    except SlotHeldError as error:
        raise LogHeldError(f"{path} is not to be had: {error}") from error
    except OSError as error:
        if descriptor is not None:
            os.close(descriptor)
        raise LogUnavailableError(f"{path} is not to be had: {error}") from error


def read_log(owner: SlotOwner, index: int, start: int, num_bytes: int) -> bytes:
    """Bytes of a log that another process may be writing; fewer, or none, where it ends before."""
    descriptor = _open_checked(owner.log_path(index))
    if descriptor is None:
        return b""
    try:
        return (
            os.pread(descriptor, num_bytes, start) if _run_of(descriptor) == owner.run_id else b""
        )
    finally:
        os.close(descriptor)


def remove_slots(run_id: str, role: str, directory: Path = SHM_DIRECTORY) -> list[str]:
    """Removes all slots and logs of a role in a run, also of other layouts; returns their names."""
    removed = []
    for path in _slots_in(directory):
        if path.name.startswith(f"{_prefix(run_id)}-{role}-"):
            path.unlink(missing_ok=True)
            removed.append(path.name)
    return removed


def remove_old_slots(max_age_s: float, directory: Path = SHM_DIRECTORY) -> list[tuple[str, str]]:
    """Removes slots and logs of this user that no process holds and that were not written for long.

    Returns:
        Name and run of each.
    """
    oldest_kept = time.time() - max_age_s
    with _free_slots(directory) as free:
        old = [slot for slot in free if slot.written_at < oldest_kept]
        for slot in old:
            slot.path.unlink(missing_ok=True)
    return [(slot.path.name, slot.run_id) for slot in old]


# --- inside -------------------------------------------------------------------------------


def _prefix(run_id: str) -> str:
    return f"rolemesh-cut-{hashlib.sha256(run_id.encode()).hexdigest()[:16]}"


def _slots_in(directory: Path) -> Iterator[Path]:
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


def _open_checked(path: Path) -> int | None:
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


def _create_locked(path: Path) -> int:
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


def _open_locked(path: Path, wait_s: float | None = None) -> int | None:
    """A descriptor with the lock of the file that has this name now; None if there is none."""
    deadline = time.monotonic() + (LOCK_WAIT_S if wait_s is None else wait_s)
    while (descriptor := _open_checked(path)) is not None:
        if _is_free(descriptor):
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


def _is_free(descriptor: int) -> bool:
    """Takes the lock; False where another process has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _prologue(descriptor: int) -> tuple[int, bytes]:
    """Mark and run of a slot."""
    given = os.pread(descriptor, _TEXT_AT, 0)
    if len(given) < _TEXT_AT:
        return 0, b""
    magic, mark, length = _PROLOGUE.unpack_from(given)
    if magic != _MAGIC:
        return 0, b""
    return mark, given[_PROLOGUE.size : _PROLOGUE.size + length]


def _write_prologue(descriptor: int, owner: SlotOwner) -> None:
    """Says whose file it is, and that no header is whole."""
    run_id = owner.run_id.encode()
    os.pwrite(descriptor, _PROLOGUE.pack(_MAGIC, 0, len(run_id)) + run_id, 0)


def _run_of(descriptor: int) -> str:
    """Run of a slot; empty where that was not written yet."""
    return _prologue(descriptor)[1].decode(errors="replace")


def _read_header(descriptor: int) -> bytes | None:
    mark, _ = _prologue(descriptor)
    if not 0 < mark <= min(MAX_TEXT_BYTES, os.fstat(descriptor).st_size - _TEXT_AT):
        return None
    return os.pread(descriptor, mark, _TEXT_AT)


@dataclass(frozen=True, slots=True)
class _FreeSlot:
    path: Path
    run_id: str
    written_at: float


@contextmanager
def _free_slots(directory: Path) -> Iterator[list[_FreeSlot]]:
    """Slots of this user that no process holds, the oldest first; locked as long as it lasts."""
    found, descriptors = [], []
    try:
        for path in _slots_in(directory):
            descriptor = _open_checked(path)
            if descriptor is None:
                continue
            descriptors.append(descriptor)
            if _is_free(descriptor):
                run_id, status = _run_of(descriptor), os.fstat(descriptor)
                found.append(_FreeSlot(path, run_id, status.st_mtime))
        yield sorted(found, key=lambda slot: slot.written_at)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _reserve(descriptor: int, num_bytes: int, owner: SlotOwner) -> None:
    """Reserves all bytes, so that a lack of room does not show as SIGBUS at the first write."""
    while True:
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
            return
        except OSError as error:
            if error.errno not in _NO_ROOM or not _make_room(owner):
                raise SlotRoomError(_no_room(owner, num_bytes, error)) from error


def _make_room(owner: SlotOwner) -> bool:
    """Removes the oldest slot of another run that no process holds; False if there is none."""
    with _free_slots(owner.directory) as free:
        for slot in free:
            if not slot.path.name.startswith(f"{_prefix(owner.run_id)}-"):
                slot.path.unlink(missing_ok=True)
                logger.warning(
                    "removed the cut %s of run %r, which no process holds, to make room for run %r",
                    *(slot.path.name, slot.run_id or "(unknown)", owner.run_id),
                )
                return True
    return False


def _no_room(owner: SlotOwner, num_bytes: int, error: OSError) -> str:
    try:
        status = os.statvfs(owner.directory)
        free = f"{status.f_bavail * status.f_frsize} are free"
    except OSError as problem:
        free = f"it cannot be asked ({problem.strerror})"
    return (
        f"a cut of rank {owner.rank} takes {NUM_SLOTS} slots of {num_bytes} bytes in "
        f"{owner.directory}, but {free} ({error.strerror}): enlarge /dev/shm (Docker: shm_size), "
        "or switch cuts off (run.recovery.cuts=false)"
    )
