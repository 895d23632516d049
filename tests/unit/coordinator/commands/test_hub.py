"""Tests of a hub whose callers hang up and whose store fails; integration/ has the rest."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.fake_recipes import PPO_ROLES, fake_recipe
from support.fake_roles import until

from rolemesh.coordinator.commands import hub as hub_module
from rolemesh.coordinator.commands.hub import Hub
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.store import RunState, StoreUnavailableError
from rolemesh.rpc.errors import InvalidRequestError

ENDS_AT_ONCE = "import sys; sys.exit(3)"


class FlakyStore(MemoryStateStore):
    """Fails or waits where the test wants it."""

    url = "redis://127.0.0.1:1/0"

    def __init__(self) -> None:
        super().__init__()
        self.failures_to_come: dict[str, int] = {}
        self.gate = asyncio.Event()
        self.gate.set()

    def _fail(self, method: str) -> None:
        if self.failures_to_come.get(method, 0):
            self.failures_to_come[method] -= 1
            raise StoreUnavailableError(self.url, ConnectionError("gone"))

    async def append_entry(self, *arguments: Any, **named: Any) -> str:
        await self.gate.wait()
        self._fail("append_entry")
        return await super().append_entry(*arguments, **named)

    async def next_epoch(self, run_id: str, *, at_least: int = 1) -> int:
        self._fail("next_epoch")
        return await super().next_epoch(run_id, at_least=at_least)


def recipe(**run: Any) -> str:
    services = {role: {"address": "127.0.0.1:1"} for role in PPO_ROLES}
    values = fake_recipe(services=services, **run).model_dump(mode="json")
    del values["store"]
    return yaml.safe_dump(values)


@pytest.fixture
async def store() -> FlakyStore:
    return FlakyStore()


@pytest.fixture
async def spawned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs that got a process, which ends at once."""
    run_ids: list[str] = []
    started = subprocess.Popen

    def popen(command: list[str], **settings: Any) -> Any:
        run_ids.append(command[command.index("--run-id") + 1])
        return started([command[0], "-c", ENDS_AT_ONCE], **settings)

    monkeypatch.setattr(subprocess, "Popen", popen)
    return run_ids


@pytest.fixture
async def hub(store: FlakyStore, spawned: list[str], tmp_path: Path) -> AsyncIterator[Hub]:
    hub = Hub(store, tmp_path, outlives=True, max_runs=4, token_file=None)
    yield hub
    await hub.close()


async def test_a_run_begins_although_its_creator_hung_up(
    hub: Hub, store: FlakyStore, spawned: list[str]
) -> None:
    store.gate.clear()
    creating = asyncio.create_task(hub.create_run("run-1", recipe(), ()))
    await until(lambda: "run-1" in store._runs)
    creating.cancel()
    await asyncio.wait({creating})
    store.gate.set()
    await until(lambda: spawned == ["run-1"])


async def test_a_repeat_begins_the_run_that_a_failing_store_kept_from_beginning(
    hub: Hub, store: FlakyStore, spawned: list[str]
) -> None:
    store.failures_to_come["append_entry"] = 1
    with pytest.raises(StoreUnavailableError):
        await hub.create_run("run-1", recipe(), ())
    assert (await store.get_run("run-1")).state is RunState.STARTING
    for _ in range(2):
        await hub.create_run("run-1", recipe(), ())
    assert spawned == ["run-1"]


async def test_the_end_of_a_run_is_written_down_once_the_store_is_back(
    hub: Hub, store: FlakyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "_STORE_PAUSE_S", 0.01, raising=False)
    store.failures_to_come["next_epoch"] = 3
    await hub.create_run("run-1", recipe(), ())
    await until(lambda: store._runs["run-1"].state is RunState.FAILED)
    assert "exit code 3" in store._runs["run-1"].failure


async def test_a_recipe_nested_too_deep_is_refused(hub: Hub) -> None:
    deep = "run: " + "[" * 3000 + "]" * 3000
    with pytest.raises(InvalidRequestError, match="nested") as refused:
        await hub.create_run("run-1", deep, ())
    assert refused.value.reason == "RECIPE_INVALID"


async def test_what_may_hold_a_password_is_read_by_the_owner_alone(
    hub: Hub, tmp_path: Path
) -> None:
    await hub.create_run("run-1", recipe(), ())
    for name in ("request.json", "recipe.yaml"):
        assert (tmp_path / "runs/run-1" / name).stat().st_mode & 0o077 == 0
