"""A part as a process: it ends at its limit, with all that it started. Standard library alone."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

SKIPPED = 77
"""Exit code of a part that cannot be done here; its result says why."""
GRACE_S = 8.0
"""Between SIGTERM and SIGKILL."""
LAST_LINES = 30
"""Of the log of a part that failed."""
_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Has what a part started become a child of this process when its parent has ended.

    So that it is found: a service that is killed leaves ranks that are in no group of the part's.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def run_part(
    command: Sequence[str],
    result: Path,
    log: Path,
    limit_s: float,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Runs a part and ends it, and all that it started, at its limit.

    Args:
        command: Of the part; it is given the file for its result as the last argument.
        result: That file; is removed when it has been read.
        log: What the part prints is appended to it.
        limit_s: Seconds that it may take.
        environment: What is set for it beside the environment of this process.

    Returns:
        "status" (ok, failed, skipped), "seconds", "found", and why it failed or was skipped.

    Raises:
        KeyboardInterrupt: This process is to end; the part has ended.
    """
    result.unlink(missing_ok=True)
    log.touch()
    begin = log.stat().st_size
    started = time.monotonic()
    family = Family()
    with log.open("ab") as output:
        part = subprocess.Popen(
            [*command, str(result)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
            env={**os.environ, **(environment or {})},
        )
        try:
            code: int | None = part.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            family.end(part)
    report: dict[str, Any] = {"status": "ok", "seconds": round(time.monotonic() - started, 1)}
    # What it had found when it was ended counts too.
    found = found_in(result)
    result.unlink(missing_ok=True)
    reason = found.pop("skipped", "")
    report["found"] = found
    if code == SKIPPED:
        return report | {"status": "skipped", "reason": reason}
    if code == 0:
        return report
    with log.open("rb") as text:
        text.seek(begin)
        lines = text.read().decode(errors="replace").splitlines()[-LAST_LINES:]
    how = f"did not end within {limit_s:.0f} s" if code is None else f"ended with exit code {code}"
    return report | {"status": "failed", "error": how, "log": lines}


def found_in(result: Path) -> dict[str, Any]:
    """What a part has found so far."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        found: dict[str, Any] = json.loads(result.read_text())
        return found
    return {}


class Family:
    """What a part has started, however deep. Made before it; what was there then is none of it."""

    def __init__(self) -> None:
        self._others = frozenset(descendants(os.getpid()))
        self._seen: set[int] = set()

    def end(self, part: subprocess.Popen[bytes]) -> None:
        """Ends it with its part, also what is left when that has ended by itself.

        Not waited for longer than that: a process that hangs in the driver cannot be ended.
        """
        for number in (signal.SIGTERM, signal.SIGKILL):
            # Once each: a service that gets a second SIGTERM does not end in order.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(part.pid, number)
            for pid in self._alive():
                if _group_of(pid) != part.pid:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
            deadline = time.monotonic() + GRACE_S
            while (is_left := bool(self._alive())) and time.monotonic() < deadline:
                part.poll()
                time.sleep(0.05)
            if not is_left:
                break
        part.poll()
        for pid in self._seen - {part.pid}:
            # Those that were adopted; the part is subprocess's own.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def _alive(self) -> list[int]:
        found = descendants(os.getpid(), self._others)
        self._seen.update(found)
        return found


def descendants(ancestor: int, others: Collection[int] = ()) -> list[int]:
    """Processes that one has started and that have not ended, without `others` and theirs."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) in others:
            continue
        with contextlib.suppress(OSError):
            # pid (name) state ppid: a name may hold spaces and brackets.
            state, parent = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                children.setdefault(int(parent), []).append(int(entry))
    found, waiting = [], [ancestor]
    while waiting:
        own = children.get(waiting.pop(), [])
        found += own
        waiting += own
    return found


def _group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0
