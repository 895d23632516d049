"""Early end of a run: the first reason counts, and is reported with its place."""

from __future__ import annotations

import asyncio

from rolemesh.coordinator.dataflow.errors import NodeFailedError, RunError, ServiceLostError
from rolemesh.rpc.errors import RolemeshError


class EarlyEnd:
    """The first reason to end a run early. May be set before anybody waits."""

    def __init__(self) -> None:
        self._error: RunError | None = None
        self._is_set = asyncio.Event()

    def set(self, error: RunError) -> None:
        """Ends the run with this error, unless it ends with another one."""
        if self._error is None:
            self._error = error
            self._is_set.set()

    async def wait(self) -> RunError:
        """The error, once there is one."""
        await self._is_set.wait()
        assert self._error is not None
        return self._error


def placed(end: RunError, symptom: BaseException) -> RunError:
    """The end, with the node that suffered it: it had failed before the loss was known."""
    if isinstance(end, ServiceLostError) and isinstance(symptom, NodeFailedError):
        return ServiceLostError(end.role, end.cause, f"step {symptom.step}, {symptom.node}")
    return end


def failed(error: RolemeshError, activity: str) -> RunError:
    """What went wrong outside of a node, with what the run did then."""
    where = error.role or error.metadata.get("address", "a service")
    if error.role and error.rank is not None:
        where = f"{error.role} rank {error.rank}"
    return RunError(f"{activity} failed on {where} [{error.reason}]: {error.message}")
