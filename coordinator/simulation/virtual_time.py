"""An event loop on a clock of its own, which jumps to the next timer when nothing is ready.

Nothing waits, so that hours of a run take seconds, and the same program makes the same run again.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class DeadlockError(Exception):
    """Nothing can happen any more: no task can go on, and no timer is set."""


class _JumpingSelector(selectors.SelectSelector):
    """Passes the time that a loop would wait for at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise DeadlockError("no task can go on, and no timer is set")
            self.now += max(0.0, timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock begins at 0 and jumps to the next timer when nothing is ready.

    Invariant: virtual time passes only while every task waits. Work of other threads is done at
    once in this one, and there are no processes: both have clocks of their own.

    Owner: one thread.

    Example: `run_virtually(asyncio.sleep(3600))` returns at once, at `loop.time() == 3600`.
    """

    def __init__(self) -> None:
        self._virtual = _JumpingSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._virtual.now

    def unix_time(self) -> float:
        """The same: the loop was made at the beginning of Unix time."""
        return self._virtual.now

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, function: Any, *arguments: Any
    ) -> Any:
        """Calls the function at once."""
        future = self.create_future()
        try:
            future.set_result(function(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future

    async def subprocess_exec(self, *arguments: Any, **options: Any) -> Any:
        """Starts nothing: a process does not know this clock.

        Raises:
            OSError: Always.
        """
        raise OSError("a simulation starts no process")


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine on a clock of its own, and ends what it leaves behind.

    Raises:
        DeadlockError: It waits for what cannot come.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
