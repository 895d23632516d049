"""bubblewrap (`bwrap`): namespaces of its own, in which only the view is mounted."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from rolemesh.engine.messages import said_last
from rolemesh.engine.sandbox.view import View

_PROBE_TIMEOUT_S = 10.0

SIGNALLED = 128
"""Added to the number of a signal, where that ended what bubblewrap has started."""

_NAMESPACES = (
    *("--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-uts"),
    *("--unshare-cgroup-try", "--die-with-parent", "--cap-drop", "ALL"),
)
_PLACES = ("--proc", "/proc", "--dev", "/dev")


def bubblewrap() -> str | None:
    """Path of the program; None where it is not installed."""
    return shutil.which("bwrap")


@functools.cache
def why_not(program: str) -> str:
    """Why it makes no sandbox here; empty: it does. Tried once a process."""
    command = [program, *_NAMESPACES, "--unshare-net", "--ro-bind", "/", "/", *_PLACES, "true"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    said = said_last(done.stderr)
    return "" if done.returncode == 0 else said or f"exit code {done.returncode}"


def wrapped(program: str, command: Sequence[str], view: View) -> list[str]:
    """A command line that runs a command within a view.

    Args:
        program: Path of bwrap.
        command: What to run. Its first process has the parent 1.
        view: What it sees.
    """
    # Ports are this host's: the worker gives up all others by itself.
    is_apart = not view.network and not view.ports
    words = [program, *_NAMESPACES, *(("--unshare-net",) if is_apart else ())]
    # What is mounted later covers what was mounted there before.
    everything = "/" in view.reads
    words += ["--ro-bind", "/", "/", *_PLACES] if everything else [*_PLACES, "--tmpfs", "/tmp"]
    shown = [Path("/")] if everything else []
    # Folders come before what is in them.
    for path in sorted(map(Path, view.reads)):
        if not any(path.is_relative_to(folder) for folder in shown):
            shown.append(path)
            words += ["--ro-bind-try", str(path.resolve()), str(path)]
    for device in view.devices:
        words += ["--dev-bind-try", device, device]
    here = os.getcwd()
    words += ["--bind", view.folder, view.folder, "--dir", here, "--chdir", here]
    # A write beside the folder fails, where it would else be lost. /tmp and /dev/shm are private.
    return [*words, "--remount-ro", "/", "--", *command]
