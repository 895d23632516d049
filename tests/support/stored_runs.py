"""A run in a store, and a CoordinatorService over it that can be stopped and started again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from rolemesh.coordinator.api.doors.coordinator_service import serve_coordinator
from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.coordinator.sdk import RetryPolicy
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.store import RunRecord
from rolemesh.coordinator.state.store import RunState as StoredState

QUICK = RetryPolicy(budget_s=20.0, first_s=0.01, longest_s=0.05)


async def add_run(store: MemoryStateStore, run_id: str, directory: Path) -> None:
    """A run of three steps."""
    await store.create_run(
        RunRecord(
            run_id=run_id,
            name="<b>quick</b>",
            num_steps=3,
            directory=str(directory),
            created_at=1.5,
            updated_at=2.5,
            state=StoredState.RUNNING,
            algorithm="ppo",
        )
    )


async def store_of_a_run(directory: Path) -> MemoryStateStore:
    """A store with the run "run", which is running."""
    store = MemoryStateStore()
    await add_run(store, "run", directory)
    return store


class Coordinator:
    """A server over a store, which can be ended and started again on its port."""

    def __init__(self, store: MemoryStateStore) -> None:
        self.store = store
        self.port = 0
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        operations = StoreOperations(self.store)
        self._server, self.port = await serve_coordinator(operations, port=self.port)

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None


@asynccontextmanager
async def running_coordinator(store: MemoryStateStore) -> AsyncIterator[Coordinator]:
    """A server over the store, which ends with the block."""
    coordinator = Coordinator(store)
    await coordinator.start()
    yield coordinator
    await coordinator.stop()
