"""An event loop on a thread of its own, for callers without a loop or with a busy one."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator
from contextlib import suppress
from typing import Any, TypeVar, cast

from rolemesh.rpc.errors import CallCancelledError

Result = TypeVar("Result")


class LoopThread:
    """Runs coroutines for other threads, also for one in which a loop runs (a notebook's).

    The thread begins with the first coroutine.

    Invariant: after close nothing of it is left: no task, no thread.

    Example: LoopThread("naps", "bed").run(asyncio.sleep(1, result=7)) == 7
    """

    def __init__(self, name: str, owner: str) -> None:
        """Prepares.

        Args:
            name: Of the thread.
            owner: What is closed when this is, e.g. "client", for errors.
        """
        self._name = name
        self._owner = owner
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False
        # What is handed over before close is cancelled by it, and nothing is handed over after it.
        # Reentrant: the garbage of this thread, collected meanwhile, may hold iterators of ours.
        self._handing_over = threading.RLock()

    @property
    def is_running(self) -> bool:
        """Whether it has begun and was not closed yet."""
        return self._thread is not None and not self._is_closed

    def run(self, coroutine: Coroutine[Any, Any, Result], timeout_s: float | None = None) -> Result:
        """The coroutine's result; an interrupt of the waiting thread cancels it.

        Args:
            coroutine: What to run.
            timeout_s: Most seconds to wait; None: without end.

        Raises:
            CallCancelledError: The thread was closed, before or meanwhile.
            TimeoutError: It took longer; it is cancelled.
        """
        future = self._handed_over(coroutine)
        try:
            return future.result(timeout_s)
        except concurrent.futures.CancelledError:
            raise CallCancelledError(f"the {self._owner} was closed while the call ran") from None
        except BaseException:
            future.cancel()
            raise

    async def run_async(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """The coroutine's result, for another loop; cancelling the await cancels the coroutine."""
        return await asyncio.wrap_future(self._handed_over(coroutine))

    def iterate(self, items: AsyncIterator[Result]) -> Iterator[Result]:
        """The items of an asynchronous generator, each as it comes."""
        generator = cast(AsyncGenerator[Result, None], items)
        # A step whose wait was interrupted may still be on its way out of the generator.
        turn = asyncio.Lock()

        async def step() -> tuple[Result] | None:
            async with turn:
                try:
                    return (await anext(generator),)
                except StopAsyncIteration:
                    return None

        async def finish() -> None:
            async with turn:
                await generator.aclose()

        try:
            while (item := self.run(step())) is not None:
                yield item[0]
        finally:
            # A closed thread has ended the generator already.
            with suppress(CallCancelledError):
                if threading.current_thread() is self._thread:
                    # Collected as garbage by the loop itself, which must not wait for itself.
                    self._handed_over(finish())
                else:
                    self.run(finish())

    def close(self, timeout_s: float | None = None) -> None:
        """Cancels what runs, and ends the thread. Not from the thread itself.

        Args:
            timeout_s: Most seconds to wait for the end of what runs; None: without end.
        """
        with self._handing_over:
            if self._is_closed:
                return
            self._is_closed = True
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout_s)

    def _handed_over(
        self, coroutine: Coroutine[Any, Any, Result]
    ) -> concurrent.futures.Future[Result]:
        with self._handing_over:
            if self._is_closed:
                coroutine.close()
                raise CallCancelledError(f"the {self._owner} is closed: make another one")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                # Daemon: a thread that was not closed must not keep the program from ending.
                self._thread = threading.Thread(
                    target=_work, args=(self._loop,), name=self._name, daemon=True
                )
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)


def _work(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
        loop.run_until_complete(_cancel_all())
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


async def _cancel_all() -> None:
    # Again for those that begin while others end.
    while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
