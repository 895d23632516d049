"""A session: one folder, one run."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.coordinator_doors import bearer, made_token
from support.fake_roles import FakeMesh, fake_mesh, fake_recipe, until
from support.fake_runs import Recorder

from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.coordinator.dataflow.errors import RunAbortedError
from rolemesh.coordinator.dataflow.observer import QuietObserver, RunObserver
from rolemesh.coordinator.run import session as session_module
from rolemesh.coordinator.run.checks import start_checks
from rolemesh.coordinator.run.services.commands import ServiceCommand
from rolemesh.coordinator.run.services.launch import LaunchError
from rolemesh.coordinator.run.session import InputError, InterruptedEarlyError, Session
from rolemesh.coordinator.sdk import AsyncClient, StateChanged
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.store import RunState
from rolemesh.engine.transport.slots.slot_files import SlotOwner
from rolemesh.engine.transport.slots.slots import Slot, remove_slots


def make_session(mesh: FakeMesh, directory: Path) -> Session:
    services = {role: {"address": address} for role, address in mesh.addresses.items()}
    return Session(fake_recipe(steps=1, services=services), directory, QuietObserver())


async def test_two_sessions_in_one_folder_are_kept_apart(tmp_path: Path) -> None:
    async with fake_mesh() as mesh:
        # Both look before either has written anything.
        first, second, third = (make_session(mesh, tmp_path) for _ in range(3))
        gate = mesh.roles["actor"].gates["Initialize"] = asyncio.Event()
        task = asyncio.create_task(first.execute())
        await until(lambda: "actor.Initialize" in mesh.running)
        with pytest.raises(InputError, match=r"run\.directory: another run is being made in"):
            await second.execute()
        gate.set()
        assert (await task).state is RunState.SUCCEEDED
        assert {call.key[0] for call in mesh.calls} == {first.run_id}
        with pytest.raises(InputError, match="holds a run already"):
            await third.execute()


async def test_services_with_models_are_asked_for_gpus_where_their_pool_names_some(
    tmp_path: Path,
) -> None:
    async with fake_mesh() as mesh:
        services = {role: {"address": address} for role, address in mesh.addresses.items()}
        pools = {
            "a": {"devices": ["cuda:0"], "roles": ["actor", "reward"]},
            "b": {"roles": ["critic", "reference"]},
        }
        recipe = fake_recipe(steps=1, services=services, pools=pools, deterministic=True)
        for role in mesh.roles.values():
            role.sees = ["cuda:0 NVIDIA H100"]
        recorder = Recorder()
        await Session(recipe, tmp_path, recorder).execute()
        asked = {name: role.device_type for name, role in mesh.roles.items()}
        assert all(role.deterministic for role in mesh.roles.values())
    # The reward, arithmetic, computes nowhere else than on a CPU.
    assert asked == {"actor": "cuda", "reward": "", "critic": "", "reference": ""}
    # Where a pool names the CPU, and the service has a GPU all the same, people learn of it.
    told = [text for text in recorder.events if "computes on cuda:0 NVIDIA H100" in text]
    assert sorted(text.split()[1] for text in told) == ["critic", "reference"]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStateStore:
    """The store of every session, which outlives it."""
    store = MemoryStateStore()

    @asynccontextmanager
    async def opened(*arguments: Any, **settings: Any) -> AsyncIterator[MemoryStateStore]:
        yield store

    monkeypatch.setattr(session_module, "open_store", opened)
    return store


def session_whose_services_run(
    program: str,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    observer: RunObserver | None = None,
) -> Session:
    command = ServiceCommand(arguments=[sys.executable, "-c", program], environment={})
    monkeypatch.setattr(session_module, "service_commands", lambda *_: lambda *names: command)
    # Its models are nowhere.
    monkeypatch.setattr(start_checks, "check_paths", lambda *arguments: None)
    return Session(fake_recipe(steps=1), directory, observer or QuietObserver(), run_id="starting")


async def last_state(store: MemoryStateStore) -> tuple[RunState, str]:
    """State and failure as the record has them, which the last event has too."""
    record = await store.get_run("starting")
    events = [event async for event in StoreOperations(store).watch_run("starting")]
    assert events[-1].state.failure == record.failure
    assert len([event for event in events if event.HasField("state")]) == 2
    return record.state, record.failure


async def test_a_run_is_known_while_its_services_start_and_can_be_stopped_then(
    tmp_path: Path, store: MemoryStateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "import time; time.sleep(300)"
    session = session_whose_services_run(program, tmp_path, monkeypatch)
    task = asyncio.create_task(session.execute())
    place = tmp_path / "coordinator.json"
    await until(lambda: place.is_file())
    facts = json.loads(place.read_text())
    right = bearer(made_token(tmp_path))
    async with httpx.AsyncClient(base_url=facts["url"], headers=right) as client:
        (run,) = (await client.get("api/v1/runs")).json()["runs"]
        assert (run["run_id"], run["state"]) == ("starting", "starting")
        assert (await client.post("api/v1/runs/starting/stop")).json()["state"] == "stopping"
    with pytest.raises(RunAbortedError, match="before its services had started"):
        await task
    assert (await last_state(store))[0] is RunState.STOPPED


async def test_a_run_whose_services_do_not_start_has_failed(
    tmp_path: Path, store: MemoryStateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "raise SystemExit('no memory for me')"
    session = session_whose_services_run(program, tmp_path, monkeypatch)
    with pytest.raises(LaunchError, match="no memory for me"):
        await session.execute()
    state, failure = await last_state(store)
    assert state is RunState.FAILED
    assert "no memory for me" in failure


async def test_a_run_that_ends_says_how_much_memory_its_cuts_still_take(
    tmp_path: Path, store: MemoryStateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    session = session_whose_services_run("raise SystemExit(1)", tmp_path, monkeypatch, recorder)
    owner = SlotOwner("starting", "actor", 0, 1)
    Slot.create(owner, 0, 3 * 2**20).close()
    try:
        with pytest.raises(LaunchError):
            await session.execute()
    finally:
        remove_slots("starting", "actor")
    told = [event for event in recorder.events if "of cuts stay in memory" in event]
    assert [text.split()[0] for text in told] == ["3.0"]
    assert f"--resume {tmp_path}` loses no step" in told[0]
    assert told[0].split("`")[3] == "rolemesh cuts --prune starting"


async def test_whoever_watches_a_run_hears_that_its_services_did_not_start(
    store: MemoryStateStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "import sys, time; time.sleep(2); sys.exit(3)"
    session = session_whose_services_run(program, tmp_path, monkeypatch)
    task = asyncio.create_task(session.execute())
    place = tmp_path / "coordinator.json"
    await until(lambda: place.is_file())
    async with AsyncClient(json.loads(place.read_text())["address"]) as client:
        events = [event async for event in client.watch_run("starting")]
    assert isinstance(events[-1], StateChanged)
    assert events[-1].state.value == RunState.FAILED.value
    with pytest.raises(LaunchError):
        await task


async def test_a_run_that_a_signal_ends_while_its_services_start_says_so(
    store: MemoryStateStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = session_whose_services_run("import time; time.sleep(300)", tmp_path, monkeypatch)
    task = asyncio.create_task(session.execute())
    await until(lambda: (tmp_path / "coordinator.json").is_file())
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(InterruptedEarlyError):
        await task
    assert await last_state(store) == (RunState.STOPPED, "ended before it had begun")
