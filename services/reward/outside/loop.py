"""An event loop for outside rewards, beside the loop of the service."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")

JOIN_S = 5.0
"""Longest wait for cancelled tasks when the loop closes."""


class LoopThread:
    """Runs coroutines on its own loop in its own thread.

    Texts of a batch are encoded and decoded there, so that the service's loop stays free to answer.
    The thread is a daemon, and begins with the first coroutine.

    Invariant: after `close` none of its tasks runs.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    @property
    def has_begun(self) -> bool:
        """Whether it runs."""
        return self._loop is not None

    async def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """The coroutine's result; cancelling the await cancels the coroutine."""
        return await asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(coroutine, self._running_loop())
        )

    def run_from_thread(self, coroutine: Coroutine[Any, Any, Result], timeout_s: float) -> Result:
        """The same for a thread without a loop; raises TimeoutError."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._running_loop()).result(timeout_s)

    def close(self) -> None:
        """Cancels what runs and ends the thread. Not from the thread itself."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None:
            return
        loop.call_soon_threadsafe(loop.stop)
        thread.join(JOIN_S)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._work, args=(self._loop,), name="outside-rewards", daemon=True
                )
                self._thread.start()
            return self._loop

    @staticmethod
    def _work(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()
