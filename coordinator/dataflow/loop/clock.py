"""Clock of a run: that of its event loop, so that a simulation's loop can have one of its own."""

from __future__ import annotations

import asyncio
import time


def now() -> float:
    """Seconds on the clock by which the running loop's timers wait; differences mean something."""
    return asyncio.get_running_loop().time()


def unix_time() -> float:
    """Unix time in seconds; of a loop that says it by itself, by a method of this name, that."""
    said: float = getattr(asyncio.get_running_loop(), "unix_time", time.time)()
    return said
