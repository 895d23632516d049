"""Clock of a run: that of its event loop, so that a simulation's loop can have one of its own."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol, runtime_checkable


@runtime_checkable
class HasUnixTime(Protocol):
    """A loop whose clock says what time of day it is, too."""

    def unix_time(self) -> float:
        """Unix time in seconds."""


def now() -> float:
    """Seconds on the clock by which the running loop's timers wait; differences mean something."""
    return asyncio.get_running_loop().time()


def unix_time() -> float:
    """Unix time in seconds; of a loop that has its own, that."""
    loop = asyncio.get_running_loop()
    return loop.unix_time() if isinstance(loop, HasUnixTime) else time.time()
