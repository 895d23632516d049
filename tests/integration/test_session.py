"""A session: one folder, one run."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.fake_roles import FakeMesh, fake_mesh, fake_recipe, until

from rolemesh.coordinator.observer import QuietObserver
from rolemesh.coordinator.session import InputError, Session
from rolemesh.coordinator.state.store import RunState


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
