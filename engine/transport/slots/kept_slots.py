"""What runs have left in shared memory: whose it is, whether a process holds it, its removal."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rolemesh.engine.transport.slots.shm_directory import SHM_DIRECTORY
from rolemesh.engine.transport.slots.slot_files import (
    STAT_BLOCK_BYTES,
    SlotHeldError,
    is_free,
    open_checked,
    run_of,
    slots_in,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSlots:
    """Slots and logs of one run on this host, as they were at a look."""

    run_id: str
    """Empty where none of the files says it yet."""
    roles: tuple[str, ...]
    paths: tuple[Path, ...]
    num_bytes: int
    """Of memory that they take."""
    written_at: float
    """When the newest one was written, Unix time in seconds."""
    is_held: bool
    """Whether a process that lives holds one of them."""

    @property
    def age_s(self) -> float:
        """Seconds since the newest one was written."""
        return max(0.0, time.time() - self.written_at)


def kept_slots(directory: Path = SHM_DIRECTORY) -> list[KeptSlots]:
    """All slots and logs of this user, a run each, the largest first; none without the folder."""
    if not directory.is_dir():
        return []
    files: dict[str, list[Path]] = defaultdict(list)
    for path in slots_in(directory):
        files[_parts(path)[0]].append(path)
    found = [one for paths in files.values() if (one := _looked_at(sorted(paths))) is not None]
    return sorted(found, key=lambda one: -one.num_bytes)


def remove_unheld(slots: KeptSlots) -> None:
    """Removes the files of a run, all or none, and those that came since the look as well.

    Raises:
        SlotHeldError: A process that lives holds one of them.
    """
    with ExitStack() as stack:
        locked: list[Path] = []
        run = _parts(slots.paths[0])[0]
        for path in slots_in(slots.paths[0].parent):
            if _parts(path)[0] != run or (descriptor := open_checked(path)) is None:
                continue
            stack.callback(os.close, descriptor)
            if not is_free(descriptor):
                raise SlotHeldError(
                    f"{path} of run {slots.run_id!r} is held by a process that lives: end the "
                    "run, or the service that hangs, first"
                )
            locked.append(path)
        for path in locked:
            path.unlink(missing_ok=True)


def _parts(path: Path) -> tuple[str, str]:
    """Run, hashed, and role in the name of a slot."""
    _, _, run, role, *_ = path.name.split("-")
    return run, role


def _looked_at(paths: list[Path]) -> KeptSlots | None:
    """The files of one run; None where they have gone meanwhile."""
    run_id, num_bytes, written_at, is_held, there = "", 0, 0.0, False, []
    for path in paths:
        descriptor = open_checked(path)
        if descriptor is None:
            continue
        try:
            status = os.fstat(descriptor)
            run_id = run_id or run_of(descriptor)
            # Until it is closed: whoever wants the file looks again a moment later.
            is_held = is_held or not is_free(descriptor)
        finally:
            os.close(descriptor)
        there.append(path)
        num_bytes += status.st_blocks * STAT_BLOCK_BYTES
        written_at = max(written_at, status.st_mtime)
    if not there:
        return None
    return KeptSlots(
        run_id=run_id,
        roles=tuple(sorted({_parts(path)[1] for path in there})),
        paths=tuple(there),
        num_bytes=num_bytes,
        written_at=written_at,
        is_held=is_held,
    )
