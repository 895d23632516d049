"""Sessions and what they hold of the service: their models, and how these give way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from rolemesh.coordinator.tinker.forms.forms import SampleCall, SampleResult, WireError
from rolemesh.coordinator.tinker.models.fair_turns import Client
from rolemesh.coordinator.tinker.models.held_models import (
    HeldModel,
    HeldModels,
    NoPlaceError,
    Snapshot,
)
from rolemesh.coordinator.tinker.sessions import Session, Sessions
from rolemesh.coordinator.tinker.shapes import ModelShape
from rolemesh.coordinator.tinker.store import UnknownPathError, WeightStore

T = TypeVar("T")

SESSION_S = 300.0
"""A session whose client was silent for so long ends, with its models. Clients tell every 10 s."""

GIVES_WAY_S = 60.0
"""A session whose client was silent for so long ends where its owner wants its place: a program
that has ended without a word is often started again."""


class Tenants:
    """Gives places to sessions, and ends sessions with all that they hold. Owner: one loop."""

    def __init__(
        self, sessions: Sessions, models: HeldModels, store: WeightStore, *, session_s: float
    ) -> None:
        """Takes the parts of a server, and how long a session lasts whose client is silent."""
        self._sessions = sessions
        self._models = models
        self._store = store
        self._session_s = session_s
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Tenants:
        """Begins to look after sessions and saved weights."""
        self._store.sweep(with_unnamed=True)
        self._sessions.sweep()
        self._watch = asyncio.create_task(self._end_silent())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Looks after them no more."""
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch

    async def create(
        self, session: Session, model_id: str, shape: ModelShape, **how: Any
    ) -> HeldModel:
        """A new model of a session; see `HeldModels.create`."""
        held = await self._placed(
            session.owner,
            lambda: self._models.create(model_id, session.session_id, session.owner, shape, **how),
        )
        if not self._sessions.has(session.session_id):
            # It ended while the model was loaded.
            await self._models.unload(model_id)
            raise WireError("session_id", session.session_id, "it has ended: begin another one")
        self._sessions.add(session, run=model_id)
        return held

    async def sample(self, owner: str, snapshot: Snapshot, call: SampleCall) -> SampleResult:
        """Samples for an owner; see `HeldModels.sample`."""
        client = Client(owner, (call.sampling_session_id or "").partition(":")[0])
        return await self._placed(owner, lambda: self._models.sample(snapshot, call, client))

    async def _placed(self, owner: str, work: Callable[[], Awaitable[T]]) -> T:
        """What work gives that needs a place; the owner's own silent sessions give way to it."""
        while True:
            try:
                return await work()
            except NoPlaceError:
                holding = {one.session_id for one in self._models.by_id.values()}
                for session in self._sessions.silent(GIVES_WAY_S):
                    if session.owner == owner and session.session_id in holding:
                        await self.end(session.session_id)
                        break
                else:
                    raise

    async def end(self, session_id: str, status: Mapping[str, Any] | None = None) -> None:
        """Ends a session, with its models and what was there for it alone; see `Sessions.end`."""
        session = self._sessions.end(session_id, status)
        for held in list(self._models.by_id.values()):
            if held.session_id == session_id:
                await self._models.unload(held.model_id)
        if session is None:
            return
        # Weights that were there for a sampling session alone.
        for snapshot in session.snapshots.values():
            if snapshot.is_unnamed and snapshot.folder is not None:
                await self._models.drop_sampler(snapshot.folder)
                with contextlib.suppress(UnknownPathError):
                    self._store.remove(session.owner, snapshot.path)

    async def _end_silent(self) -> None:
        while True:
            await asyncio.sleep(self._session_s / 10)
            for session in self._sessions.silent(self._session_s):
                await self.end(session.session_id)
            self._store.sweep()
