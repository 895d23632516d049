"""Slots: files of shared memory that outlive their process, and say whether they are whole.

A slot has a fixed area for a header, and room for tensors behind it. Its mark is cleared before
anything is written and set last: a process that is killed in between leaves a slot that is not
whole. Its living owner holds a lock on it.

Logs lie beside them, with equal names, owners and ends. What is in a log grows record by record.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from pathlib import Path

import torch

from rolemesh.engine.transport.slots.shm_directory import SHM_DIRECTORY
from rolemesh.engine.transport.slots.slot_files import (
    MARK_AT,
    PAGE_BYTES,
    TEXT_AT,
    SlotHeldError,
    SlotOwner,
    SlotRoomError,
    create_locked,
    free_slots,
    header_of,
    open_checked,
    open_locked,
    prefix,
    reserve,
    run_of,
    slots_in,
    why_no_room,
    write_prologue,
)


class LogUnavailableError(RuntimeError):
    """A log can be neither opened nor made; says why."""


class LogHeldError(LogUnavailableError):
    """A process that still lives holds the lock of a log."""


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
        descriptor = open_locked(path)
        if descriptor is None:
            return None
        try:
            num_bytes = os.fstat(descriptor).st_size
            if num_bytes <= TEXT_AT or run_of(descriptor) != owner.run_id:
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
        before = open_locked(path)
        if before is not None:
            path.unlink(missing_ok=True)
            os.close(before)
        try:
            descriptor = create_locked(path)
        except OSError as error:
            raise SlotRoomError(why_no_room(owner, num_bytes, error)) from error
        try:
            reserve(descriptor, num_bytes, owner)
            write_prologue(descriptor, owner)
            slot = Slot(path, descriptor, num_bytes)
            # The first write to a page takes far longer than the later ones.
            slot.memory[TEXT_AT::PAGE_BYTES].zero_()
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
        return header_of(self._descriptor)

    def clear(self) -> None:
        """Says that the slot is not whole."""
        self._mapping[MARK_AT : MARK_AT + 8] = bytes(8)

    def finish(self, text: bytes) -> None:
        """Writes the header, then says that the slot is whole.

        Args:
            text: Not empty; the bytes from page 1 on are its area, as long as the caller leaves it.
        """
        self._mapping[TEXT_AT : TEXT_AT + len(text)] = text
        # A mapping that is written to does not change the time of the file.
        os.utime(self._descriptor)
        self._mapping[MARK_AT : MARK_AT + 8] = len(text).to_bytes(8, "little")

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
    descriptor = open_checked(owner.path(index))
    if descriptor is None:
        return None
    try:
        return header_of(descriptor) if run_of(descriptor) == owner.run_id else None
    finally:
        os.close(descriptor)


def open_log(owner: SlotOwner, index: int) -> int:
    """Opens a log, or makes an empty one; closing the descriptor lets it go, and the file stays.

    Args:
        owner: Of the log.
        index: Of the log, 0 <= index < NUM_LOGS.

    Returns:
        A descriptor with the lock of the file. Records begin at byte PAGE_BYTES.

    Raises:
        LogHeldError: A process that still lives holds it.
        LogUnavailableError: There is no room, or something else has its name.
    """
    path = owner.log_path(index)
    descriptor = None
    try:
        descriptor = open_locked(path, wait_s=0.0)
        if descriptor is None:
            descriptor = create_locked(path)
        if run_of(descriptor) != owner.run_id:
            os.ftruncate(descriptor, 0)
            write_prologue(descriptor, owner)
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
    descriptor = open_checked(owner.log_path(index))
    if descriptor is None:
        return b""
    try:
        return os.pread(descriptor, num_bytes, start) if run_of(descriptor) == owner.run_id else b""
    finally:
        os.close(descriptor)


def remove_slots(run_id: str, role: str, directory: Path = SHM_DIRECTORY) -> list[str]:
    """Removes all slots and logs of a role in a run, also of other layouts; returns their names."""
    removed = []
    for path in slots_in(directory):
        if path.name.startswith(f"{prefix(run_id)}-{role}-"):
            path.unlink(missing_ok=True)
            removed.append(path.name)
    return removed


def remove_old_slots(max_age_s: float, directory: Path = SHM_DIRECTORY) -> list[tuple[str, str]]:
    """Removes slots and logs of this user that no process holds and that were not written for long.

    Returns:
        Name and run of each.
    """
    oldest_kept = time.time() - max_age_s
    with free_slots(directory) as free:
        old = [slot for slot in free if slot.written_at < oldest_kept]
        for slot in old:
            slot.path.unlink(missing_ok=True)
    return [(slot.path.name, slot.run_id) for slot in old]
