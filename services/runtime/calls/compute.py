"""A thread that works beside the loop: the one of a process that computes, above all."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from rolemesh.engine.train.randomness import capture_random_state, restore_random_state

Result = TypeVar("Result")

_Job = tuple[Callable[[], Any], "concurrent.futures.Future[Any]"]


class Computes(Protocol):
    """What functions are run by: a compute thread, or a run's share of one."""

    async def run(self, fn: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Runs fn(*args, **kwargs) and returns what it returns."""


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

    def has_waiting(self) -> bool:
        """Whether a function waits for the one that runs; from any thread."""
        return not self._jobs.empty()

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


class RunCompute:
    """A run's share of the compute thread.

    Where several runs share it, each has the state of the process's random generators by itself:
    functions of the others do not move it, so that a run draws what it would draw alone.
    """

    def __init__(self, thread: ComputeThread, *, has_own_generators: bool) -> None:
        """Takes the thread; `has_own_generators` where other runs use it, too."""
        self._thread = thread
        self._has_own_generators = has_own_generators
        self._generators: tuple[dict[str, Any], dict[str, Any]] | None = None
        """Their state after the run's last function; None before the first."""

    async def run(self, fn: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """As `ComputeThread.run`."""
        if self._has_own_generators:
            return await self._thread.run(self._with_own_generators, fn, args, kwargs)
        return await self._thread.run(fn, *args, **kwargs)

    def _with_own_generators(
        self, fn: Callable[..., Result], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Result:
        if self._generators is not None:
            restore_random_state(*self._generators)
        try:
            return fn(*args, **kwargs)
        finally:
            self._generators = capture_random_state()
