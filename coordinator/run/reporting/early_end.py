"""Early end of a run: the first reason counts, and is reported with its place."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from rolemesh.coordinator.dataflow.errors import NodeFailedError, RunError, ServiceLostError
from rolemesh.rpc.errors import RolemeshError


class EarlyEnd:
    """The first reason to end a run early. It may be set before a task waits for it."""

    def __init__(self) -> None:
        self._error: RunError | None = None
        self._is_set = asyncio.Event()

    def set(self, error: RunError) -> None:
        """Ends the run with this error, unless an earlier error has ended it."""
        if self._error is None:
            self._error = error
            self._is_set.set()

    async def wait(self) -> RunError:
        """The error, once there is one."""
        await self._is_set.wait()
        assert self._error is not None
        return self._error

    async def cuts_short(self, work: Coroutine[Any, Any, None]) -> None:
        """Does the work; raises the error, with the work cancelled, as soon as there is one."""
        task = asyncio.create_task(work)
        ending = asyncio.create_task(self.wait())
        try:
            await asyncio.wait({task, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ending.result()
            task.result()
        finally:
            ending.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait({task})


async def to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Does the work to its end, also where this task is cancelled meanwhile."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


def placed(end: RunError, symptom: BaseException) -> RunError:
    """Adds the node that failed because of a lost service to the error of the loss."""
    if isinstance(end, ServiceLostError) and isinstance(symptom, NodeFailedError):
        return ServiceLostError(end.role, end.cause, f"step {symptom.step}, {symptom.node}")
    return end


def failed(error: RolemeshError, activity: str) -> RunError:
    """The error of a failure outside of a node, with what the run did at that time."""
    where = error.role or error.metadata.get("address", "a service")
    if error.role and error.rank is not None:
        where = f"{error.role} rank {error.rank}"
    return RunError(f"{activity} failed on {where} [{error.reason}]: {error.message}")
