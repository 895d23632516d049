"""Who works in a run's folder: the lock of its session, and where its coordinator answers."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

COORDINATOR_FILE = "coordinator.json"
"""In the run's folder while its coordinator lives: Doors.facts, and run_id."""

LOCK_FILE = "coordinator.lock"


@contextlib.contextmanager
def held(directory: Path) -> Iterator[None]:
    """Holds the folder against another session, until the end of the block or of the process.

    Raises:
        ValueError: Another session holds it, or its file system has no locks.
    """
    # The file stays. Without it, a session that waits for the lock and a new one would hold
    # locks on two different files.
    with (directory / LOCK_FILE).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"run.directory: another run is being made in {directory}: choose another folder "
                "with --out, or wait until it has ended"
            ) from error
        except OSError as error:
            raise ValueError(
                f"run.directory: {directory} cannot be locked ({error.strerror}): choose a folder "
                "on a file system with locks"
            ) from error
        yield


def living_coordinator(directory: Path) -> dict[str, Any] | None:
    """What COORDINATOR_FILE says, if the process that wrote it still runs; None otherwise."""
    try:
        facts: dict[str, Any] = json.loads((directory / COORDINATOR_FILE).read_text())
    except FileNotFoundError:
        return None
    with contextlib.suppress(PermissionError):
        # The process of another user, which also lives.
        try:
            os.kill(int(facts["pid"]), 0)
        except ProcessLookupError:
            return None
    return facts
