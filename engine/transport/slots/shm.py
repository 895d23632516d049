"""Shared memory between processes of one host: named files under /dev/shm.

A producer writes a payload once and peers map it. multiprocessing.shared_memory is not used: its
resource tracker is one more process, and it unlinks segments that others still announce.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import stat
import struct
import uuid
from pathlib import Path

import psutil
import torch

from rolemesh.engine.transport.slots.shm_directory import SHM_DIRECTORY

SEGMENT_NAME = re.compile(r"rolemesh-(?P<pid>[1-9][0-9]{0,8})-[0-9a-f]{32}")
"""The only names that are ever opened or removed. The pid fits into 32 bits, as Linux's do."""


class SegmentInvalidError(ValueError):
    """A shared memory segment is not what its handle says."""


def host_identity() -> str:
    """Equal for two processes that can open each other's segments.

    Boot id tells hosts apart, the device number of /dev/shm tells containers apart that do not
    share it, and the user id tells who may open a file of mode 0600.
    """
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    device = SHM_DIRECTORY.stat().st_dev
    return f"{boot_id}/{device}/{os.geteuid()}"


class Segment:
    """A writable segment of this process.

    Invariant: the file exists until unlink(); the mapping lives as long as a tensor views it. The
    file is locked while this process lives, so that others can tell it from a leftover.

    Example::

        segment = Segment.create(1 << 20)
        write_payload(batch, layout, segment.buffer)
        peer: open_segment(segment.name, 1 << 20)  # uint8 [1048576]
        segment.unlink()
    """

    def __init__(self, name: str, descriptor: int, mapping: mmap.mmap) -> None:
        self.name = name
        self._descriptor: int | None = descriptor
        self._mapping = mapping

    @staticmethod
    def create(num_bytes: int) -> Segment:
        """Makes a segment whose pages are all reserved.

        Raises:
            OSError: Shared memory is full (ENOSPC) or not available.
        """
        name = _new_name()
        path = SHM_DIRECTORY / name
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Without this a full /dev/shm shows as SIGBUS at the first write.
            os.posix_fallocate(descriptor, 0, num_bytes)
            mapping = mmap.mmap(descriptor, num_bytes)
        except BaseException:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            raise
        return Segment(name, descriptor, mapping)

    @property
    def buffer(self) -> memoryview:
        """The whole segment, writable."""
        return memoryview(self._mapping)

    def tensor(self) -> torch.Tensor:
        """uint8 [num_bytes] over the segment; keeps the mapping alive."""
        return torch.frombuffer(self._mapping, dtype=torch.uint8)

    def forget_name(self) -> None:
        """Removes the name, but stays locked: for once all peers have opened the segment.

        From then on nothing is left behind, however this process ends.
        """
        (SHM_DIRECTORY / self.name).unlink(missing_ok=True)

    def rename(self) -> None:
        """Takes a new name: nobody can open the segment by the one that was announced."""
        name = _new_name()
        os.rename(SHM_DIRECTORY / self.name, SHM_DIRECTORY / name)
        self.name = name

    def renew(self) -> bool:
        """Takes a new name, and says whether nobody else maps the segment.

        Only then may its contents change. Who comes with the old name finds nothing.
        """
        self.rename()
        assert self._descriptor is not None, "a segment that was unlinked is not used again"
        if not _lock_reading(self._descriptor, fcntl.F_WRLCK):
            return False
        _lock_reading(self._descriptor, fcntl.F_UNLCK)
        return True

    def unlink(self) -> None:
        """Removes the name. Mappings stay valid; the memory is freed with the last of them."""
        if self._descriptor is None:
            return
        (SHM_DIRECTORY / self.name).unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = None


class PeerSegment:
    """A segment of another process of this user, as it changes.

    Example::

        peer = PeerSegment(name, 4096)
        peer.view[0]  # what the owner wrote last
        peer.is_owner_alive()
        peer.close()
    """

    def __init__(self, name: str, num_bytes: int) -> None:
        """Maps it, read-only.

        Raises:
            SegmentInvalidError: The name is not a segment's name, or the file does not fit.
            FileNotFoundError: The owner has removed it.
        """
        self._descriptor = _open_checked(name, num_bytes)
        try:
            self._mapping = mmap.mmap(
                self._descriptor, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ
            )
        except BaseException:
            os.close(self._descriptor)
            raise
        self._is_open = True

    @property
    def view(self) -> memoryview:
        """The whole segment, read-only."""
        return memoryview(self._mapping)

    def is_owner_alive(self) -> bool:
        """Whether the owner still holds its lock: it neither ended nor unlinked the segment."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return False

    def close(self) -> None:
        """Lets go; views stay valid. Safe to repeat."""
        if self._is_open:
            self._is_open = False
            os.close(self._descriptor)


def open_segment(name: str, num_bytes: int) -> torch.Tensor:
    """Maps a segment of another process of this user.

    As long as a view of it lives, its owner leaves the contents as they are (`Segment.renew`).

    Returns:
        uint8 [num_bytes]. The mapping is private: writing to it changes no other process's memory.

    Raises:
        SegmentInvalidError: The name is not a segment's name, or the file does not fit.
        FileNotFoundError: The producer has removed it.
    """
    descriptor = _open_checked(name, num_bytes)
    try:
        # The mapping keeps a duplicate of the descriptor, and with it this lock.
        _lock_reading(descriptor, fcntl.F_RDLCK)
        # The owner takes a new name before it looks for such locks.
        if not os.path.samestat(os.fstat(descriptor), os.stat(SHM_DIRECTORY / name)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        mapping = mmap.mmap(descriptor, num_bytes, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
    return torch.frombuffer(mapping, dtype=torch.uint8)


def _new_name() -> str:
    return f"rolemesh-{os.getpid()}-{uuid.uuid4().hex}"


def _lock_reading(descriptor: int, kind: int) -> bool:
    """Locks a segment for reading (F_RDLCK), or asks whether nobody does (F_WRLCK).

    Such a lock is of the open file, not of the process (fcntl(2), OFD locks), and it is another one
    than the owner's flock.

    Returns:
        Whether the lock was to be had.
    """
    # struct flock: type, whence, start and length of the bytes, pid, which has to be 0.
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack("@hhqqi4x", kind, 0, 0, 1, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def _open_checked(name: str, num_bytes: int) -> int:
    """A read-only descriptor of a segment that is what it should be."""
    if SEGMENT_NAME.fullmatch(name) is None:
        raise SegmentInvalidError(
            f"shared memory name {name!r} is not of the form rolemesh-<pid>-<32 hex digits>"
        )
    descriptor = os.open(SHM_DIRECTORY / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise SegmentInvalidError(
                f"shared memory {name} is not a regular file of user {os.geteuid()}"
            )
        if num_bytes < 1 or status.st_size != num_bytes:
            raise SegmentInvalidError(
                f"shared memory {name} has {status.st_size} bytes, but its handle says {num_bytes}"
            )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def remove_leftovers() -> list[str]:
    """Removes segments of this user whose process is gone; returns their names.

    A process in another container may share /dev/shm but not our pids, so a dead pid is not
    enough: the lock that every live producer holds must be free as well.
    """
    removed = []
    for path in SHM_DIRECTORY.iterdir():
        match = SEGMENT_NAME.fullmatch(path.name)
        if match is None or psutil.pid_exists(int(match["pid"])):
            continue
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EACCES, errno.ELOOP):
                continue  # gone meanwhile, or not ours
            raise
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed.append(path.name)
        except BlockingIOError:
            continue  # held by a live process of another pid namespace
        finally:
            os.close(descriptor)
    return removed
