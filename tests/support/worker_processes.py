"""The worker processes of reward functions that this process has started."""

from __future__ import annotations

import contextlib

import psutil

MODULE = "rolemesh.services.reward.outside.functions.worker"


def worker_processes() -> list[psutil.Process]:
    """Those that live. Other tests of the session keep other processes."""
    workers = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.ZombieProcess, psutil.NoSuchProcess):
            if MODULE in child.cmdline():
                workers.append(child)
    return workers
