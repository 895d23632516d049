"""Services that register themselves at a coordinator, and what it refuses."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.coordinator_doors import written as write_identity

from rolemesh.coordinator.api.doors.doors import open_doors
from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.coordinator.recipe.sections.api_section import ApiSpec
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.rpc.members.authority import Authority
from rolemesh.services.runtime.server import registering as registering_module
from rolemesh.services.runtime.server.config import ServiceConfig
from rolemesh.services.runtime.server.registering import Registering

AUTHORITY = Authority.make()
WAIT_S = 20.0


class Coordinator:
    """A store, and the port at which services enter it."""

    def __init__(self, store: MemoryStateStore, address: str, mesh: str) -> None:
        self.store = store
        self.address = address
        self._mesh = mesh

    async def known(self) -> list[tuple[str, str, bool]]:
        found = await self.store.registrations(self._mesh)
        return [(one.place, one.address, one.is_leaving) for one in found]

    async def until(self, known: list[tuple[str, str, bool]]) -> None:
        for _ in range(round(WAIT_S / 0.02)):
            if await self.known() == known:
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"not {known}, but {await self.known()}")


@contextlib.asynccontextmanager
async def coordinator(folder: Path) -> AsyncIterator[Coordinator]:
    identity = AUTHORITY.issue("coordinator")
    write_identity(identity, folder / "coordinator.pem")
    store = MemoryStateStore()
    async with open_doors(
        StoreOperations(store),
        ApiSpec(http_port=None, member_port=0),
        folder=folder,
        certificates=folder,
        environment={},
    ) as doors:
        assert doors.member_address is not None
        yield Coordinator(store, doors.member_address, identity.mesh)


class Service:
    """The registration of a service that serves nothing."""

    def __init__(self, at: str, folder: Path, name: str = "a", **settings: Any) -> None:
        member = settings.pop("member", "reward")
        identity = settings.pop("authority", AUTHORITY).issue(member)
        place = write_identity(identity, folder / f"{member}-{name}.pem")
        config = ServiceConfig(role="reward", register_at=at, identity=place, **settings)
        self.has_to_end = asyncio.Event()
        self.registering = Registering(config, f"{name}:1", identity, self.has_to_end.set)

    async def refused(self) -> str:
        async with asyncio.timeout(WAIT_S):
            await self.has_to_end.wait()
        await self.registering.end()
        return self.registering.refusal


async def test_a_service_is_there_drains_and_is_gone(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as door:
        service = Service(door.address, tmp_path, number=3)
        await door.until([("reward/3", "a:1", False)])
        await service.registering.leave()
        assert await door.known() == [("reward/3", "a:1", True)]
        await service.registering.end()
        assert await door.known() == []


async def test_leases_are_renewed_as_long_as_the_service_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolemesh.coordinator.api.registry.LEASE_S", 1.0)
    async with coordinator(tmp_path) as door:
        service = Service(door.address, tmp_path)
        await door.until([("reward/0", "a:1", False)])
        (first,) = await door.store.registrations(AUTHORITY.issue("reward").mesh)
        await asyncio.sleep(1.5)
        (later,) = await door.store.registrations(AUTHORITY.issue("reward").mesh)
        assert later.lease_until >= first.lease_until + 1.0
        await service.registering.end()


async def test_a_second_service_of_one_number_ends_once_the_first_has_outlived_a_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registering_module, "PLACE_WAIT_S", 1.0)
    async with coordinator(tmp_path) as door:
        first = Service(door.address, tmp_path)
        await door.until([("reward/0", "a:1", False)])
        second = Service(door.address, tmp_path, "b")
        told = await second.refused()
        assert "number is 0, but the reward at a:1 is registered as number 0" in told
        assert "(--number)" in told
        # Its end takes nothing from the first.
        assert await door.known() == [("reward/0", "a:1", False)]
        await first.registering.end()


async def test_a_successor_has_the_place_of_a_process_that_has_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolemesh.coordinator.api.registry.LEASE_S", 1.5)
    async with coordinator(tmp_path) as door:
        first = Service(door.address, tmp_path)
        await door.until([("reward/0", "a:1", False)])
        first.registering._keeping.cancel()
        second = Service(door.address, tmp_path, "b")
        await door.until([("reward/0", "b:1", False)])
        assert not second.has_to_end.is_set()
        await second.registering.end()


async def test_a_certificate_of_another_role_ends_the_service(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as door:
        told = await Service(door.address, tmp_path, member="critic").refused()
        assert "role is 'reward', but the certificate of the service is that of 'critic'" in told
        assert "--identity reward.pem" in told
        assert await door.known() == []


async def test_a_service_of_another_mesh_ends(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as door:
        told = await Service(door.address, tmp_path, authority=Authority.make()).refused()
        assert f"register_at is '{door.address}', whose certificate is not of this" in told
        assert "--identity" in told


async def test_a_coordinator_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as before:
        address = before.address
    service = Service(address, tmp_path)
    await asyncio.sleep(1.0)
    assert not service.has_to_end.is_set()
    identity = AUTHORITY.issue("coordinator")
    write_identity(identity, tmp_path / "coordinator.pem")
    store, port = MemoryStateStore(), int(address.rpartition(":")[2])
    async with open_doors(
        StoreOperations(store),
        ApiSpec(http_port=None, member_port=port),
        folder=tmp_path,
        certificates=tmp_path,
        environment={},
    ):
        await Coordinator(store, address, identity.mesh).until([("reward/0", "a:1", False)])
        await service.registering.end()
