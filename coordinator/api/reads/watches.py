"""Watches of runs: each gets every event once, from a given place to the end of the run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator

from rolemesh.coordinator.api.messages import FINAL_STATES
from rolemesh.coordinator.api.store_errors import translated
from rolemesh.coordinator.state.store import RunStream, StateStore
from rolemesh.rpc.errors import CapacityError
from rolemesh.rpc.limits import MAX_WATCHES
from rolemesh.v1 import coordinator_pb2

_PAGE = 256
_PAUSE_S = 0.25

LAST_EVENT_GRACE_S = 2.0
"""How long a watch waits for the last event once the record has a final state. A coordinator that
was killed in between never sends it."""


class Watches:
    """Readers of the event streams of one store. Owner: one asyncio loop."""

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._number = 0
        self._are_none = asyncio.Event()
        self._are_none.set()

    async def follow(
        self, run_id: str, after_event_id: str
    ) -> AsyncGenerator[coordinator_pb2.RunEvent]:
        """Past and future events after the given one, to the end of the run.

        Raises:
            RolemeshError: As coordinator.proto says of WatchRun.
        """
        if self._number >= MAX_WATCHES:
            raise CapacityError(
                f"{MAX_WATCHES} watches of runs go on, as many as there may be: end one",
                reason="TOO_MANY_STREAMS",
                retryable=True,
            )
        self._number += 1
        self._are_none.clear()
        try:
            async for event in self._events(run_id, after_event_id):
                yield event
        finally:
            self._number -= 1
            if self._number == 0:
                self._are_none.set()

    async def end(self, timeout_s: float) -> None:
        """Returns when all watches have ended, or after timeout_s."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._are_none.wait(), timeout_s)

    async def _events(
        self, run_id: str, after_event_id: str
    ) -> AsyncIterator[coordinator_pb2.RunEvent]:
        with translated():
            await self._store.get_run(run_id)
        after, silent_s, is_over = after_event_id, 0.0, False
        while True:
            with translated():
                entries = await self._store.read_entries(run_id, RunStream.EVENTS, after, _PAGE)
            for entry in entries:
                event = coordinator_pb2.RunEvent.FromString(entry.payload)
                after = event.event_id = entry.entry_id
                if event.HasField("state"):
                    # A run that was resumed has states behind a final one.
                    is_over = event.state.state in FINAL_STATES
                yield event
            if entries:
                silent_s = 0.0
                continue
            with translated():
                record = await self._store.get_run(run_id)
            if record.state.is_final:
                if is_over or silent_s >= LAST_EVENT_GRACE_S:
                    return
                silent_s += _PAUSE_S
            await asyncio.sleep(_PAUSE_S)
