"""An event loop on a thread of its own, so that programs without one can use the SDK."""

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

    Invariant: after close nothing of it is left: no task, no thread.

    Example: LoopThread().run(asyncio.sleep(1, result=7)) == 7
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._is_open = True
        # What is handed over before close is cancelled by it, and nothing is handed over after it.
        # Reentrant: the garbage of this thread, collected meanwhile, may hold iterators of ours.
        self._handing_over = threading.RLock()
        # Daemon: a client that nobody closed must not keep the program from ending.
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="rolemesh-sdk", daemon=True
        )
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Whether it was not closed yet."""
        return self._is_open

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """The coroutine's result; an interrupt of the waiting thread cancels it.

        Raises:
            CallCancelledError: The thread was closed, before or meanwhile.
        """
        future = self._handed_over(coroutine)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise CallCancelledError("the client was closed while the call ran") from None
        except BaseException:
            future.cancel()
            raise

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

    def close(self) -> None:
        """Cancels what runs, and ends the thread."""
        with self._handing_over:
            if not self._is_open:
                return
            self._is_open = False
            cancelled = asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop)
        cancelled.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _handed_over(
        self, coroutine: Coroutine[Any, Any, Result]
    ) -> concurrent.futures.Future[Result]:
        with self._handing_over:
            if not self._is_open:
                coroutine.close()
                raise CallCancelledError("the client is closed: make another one")
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _cancel_all(self) -> None:
        # Again for those that begin while others end.
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await self._loop.shutdown_asyncgens()
