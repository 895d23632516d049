"""The event loop on which coroutines of environments run: one for all calls of a process.

So what belongs to a loop, e.g. a session of HTTP that `reset` opened, serves `step` as well.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Awaitable
from typing import Any

logger = logging.getLogger(__name__)


class _Shared:
    """Makes the loop when it is first asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                loop = asyncio.new_event_loop()
                # It must keep no process alive: a coroutine may never end.
                threading.Thread(
                    target=_run, args=(loop,), name="environments", daemon=True
                ).start()
                self._loop = loop
            return self._loop


_SHARED = _Shared()


def shared_loop() -> asyncio.AbstractEventLoop:
    """The loop, which runs on a thread of its own. From any thread."""
    return _SHARED.loop()


def finished(said: Any) -> Any:
    """What a call gave; an awaitable is run to its end on the shared loop, and its value taken.

    Not for the loop's own thread, which would wait for itself. What the awaitable raises is raised
    here, SystemExit too.
    """
    if not inspect.isawaitable(said):
        return said
    value, error = asyncio.run_coroutine_threadsafe(_outcome(said), shared_loop()).result()
    if error is None:
        return value
    try:
        raise error
    finally:
        # Else the error would hold this frame, and this frame the error.
        del error


async def _outcome(said: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    """The value or the error. SystemExit that leaves a task would end the loop for all others."""
    try:
        return await said, None
    except BaseException as error:
        return None, error


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    while True:
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt) as error:
            # Of a task that a user's code started by itself. Whoever awaits that task gets the
            # error, and tasks of others go on.
            logger.warning("a task of an environment raised %r", error)
