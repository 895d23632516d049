"""Threads in which calls of environments run, and how many of them a process has room for."""

from __future__ import annotations

import ctypes
import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

MAX_THREADS = 64
"""Most calls that run in threads of one process at once; further ones wait."""

STACK_BYTES = 8 << 20
"""Address space of a thread's stack: as much as a main thread usually has, for code that recurses
deeply."""

_STACKS_PART = 4
"""Stacks take one part in this many of a process's address space at most."""

_M_ARENA_MAX = -8
_ARENAS = 2


def num_threads(memory_mib: int | None) -> int:
    """Calls that run in threads of a process at once.

    Args:
        memory_mib: Bound of its address space, of which stacks of threads are a part; None: none.

    Example: 4096 MiB and no bound give 64, 512 MiB give 16.
    """
    if memory_mib is None:
        return MAX_THREADS
    return max(1, min(MAX_THREADS, (memory_mib << 20) // _STACKS_PART // STACK_BYTES))


def spare_address_space() -> None:
    """Bounds what each further thread of this process takes. Before the first one starts.

    glibc gives many threads a heap of 64 MiB each, which a bound of the address space counts in
    full. Python's interpreter lets one thread run at a time, so a few heaps serve them all.
    """
    threading.stack_size(STACK_BYTES)
    # Other C libraries have no such heaps, and no such function.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, _ARENAS)


class Threads:
    """Threads that run jobs, up to a number of them, each started when no other one is free.

    They keep no process alive, since a job may never end. A job must not raise.
    """

    def __init__(self, size: int) -> None:
        """Starts the first one.

        Raises:
            RuntimeError: The system has no thread for it.
        """
        self._size = size
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._free = threading.Semaphore(0)
        """One for each thread that waits for a job."""
        self._started = 0
        self._start()

    def run(self, job: Callable[[], None]) -> None:
        """Has a thread run a job; it waits for one when all are busy. From one thread only."""
        self._jobs.put(job)
        if not self._free.acquire(blocking=False) and self._started < self._size:
            try:
                self._start()
            except RuntimeError as error:
                # Memory is short. Those that run already take the job later.
                logger.warning("%d threads run calls, and no more: %s", self._started, error)

    def _start(self) -> None:
        threading.Thread(target=self._work, daemon=True).start()
        self._started += 1

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                self._free.release()
                job = self._jobs.get()
            job()
            # It must not keep what it worked on until the next one comes.
            del job
