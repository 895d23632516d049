"""A store with a run that ended and one that goes on, and what a coordinator answers from it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.fake_run import NUM_STEPS, fill_store

from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.store import StateStore


@pytest.fixture
async def store(tmp_path: Path) -> StateStore:
    store = MemoryStateStore()
    await fill_store(store, "made", tmp_path / "made", num_steps=NUM_STEPS)
    await fill_store(store, "live", tmp_path / "live", num_steps=NUM_STEPS, is_live=True)
    return store


@pytest.fixture
def operations(store: StateStore) -> StoreOperations:
    return StoreOperations(store)
