"""Command lines of processes that may end at any moment."""

from __future__ import annotations

import psutil


def command_of(process: psutil.Process) -> list[str]:
    """Its command line; empty when it has ended."""
    try:
        return process.cmdline()
    except (psutil.ZombieProcess, psutil.NoSuchProcess):
        return []
