"""A thread that works beside the loop: the one of a process that computes, above all."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")

_Job = tuple[Callable[[], Any], "concurrent.futures.Future[Any]"]


class ComputeThread:
    """Runs functions one after another on a thread of its own.

    Invariant: at most one function runs at a time, in the order of submission. The loop never
    computes, so that the service answers while torch or vLLM works. The thread is a daemon: a
    function that never returns cannot keep the process alive.

    Example: `await compute.run(torch.mm, a, b)` returns the product; an exception of the function
    is raised by the await.
    """

    def __init__(self, name: str = "compute") -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._is_closed = False
        self._thread.start()

    async def run(self, fn: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Runs fn(*args, **kwargs) on the thread, within the caller's context variables.

        Cancelling the await drops a job that has not begun; one that runs goes on unheard.
        """
        if self._is_closed:
            raise RuntimeError("the compute thread has ended: the service is stopped")
        future: concurrent.futures.Future[Result] = concurrent.futures.Future()
        context = contextvars.copy_context()
        self._jobs.put((lambda: context.run(fn, *args, **kwargs), future))
        return await asyncio.wrap_future(future)

    def close(self, timeout_s: float) -> bool:
        """Lets the queue run empty and ends the thread; False when it is still busy then."""
        self._is_closed = True
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            function, future = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
            finally:
                # An idle thread must not keep a batch or a traceback alive.
                del job, function, future
