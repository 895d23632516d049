"""Services that register are waited for, and found where they are by now."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.fake_in_process import run_jumping
from support.fake_recipes import PPO_ROLES, fake_recipe, split_pools

from rolemesh.coordinator.dataflow.observer import QuietObserver
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.run.checks.start_checks import check_start, services_in
from rolemesh.coordinator.run.services.launch import LaunchError
from rolemesh.coordinator.run.services.lost_services import LostServices
from rolemesh.coordinator.run.services.registered import RegisteredServices
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.registrations import Registration

ROLES = (*PPO_ROLES, "rollout")
TTL_S = 10.0


def recipe(**changes: Any) -> Recipe:
    values = fake_recipe(roles=ROLES, pools=split_pools(ROLES)).model_dump(mode="json")
    services = {"reward": {"registers": True}, "rollout": {"registers": True, "replicas": 2}}
    values |= {"certificates": "/certs", "services": services, **changes}
    return Recipe.model_validate(values)


class Mesh:
    """A store that services enter, on a clock that jumps."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.store = MemoryStateStore(clock=loop.time)
        self.found = RegisteredServices(self.store, "m", recipe())

    async def enter(self, place: str, address: str, **changes: Any) -> None:
        role, _, number = place.partition("/")
        fields = {"mesh": "m", "incarnation": address[:1] * 32, **changes}
        one = Registration(role=role, number=int(number), address=address, **fields)
        await self.store.enter(one, TTL_S)

    async def keep(self, place: str, address: str, after_s: float = 0.0, **changes: Any) -> None:
        await asyncio.sleep(after_s)
        while True:
            await self.enter(place, address, **changes)
            await asyncio.sleep(2.0)


def test_all_services_are_waited_for_by_their_places() -> None:
    async def find() -> tuple[dict[str, str], float]:
        mesh = Mesh()
        kept = [
            asyncio.create_task(mesh.keep("rollout/1", "b:1", 3.0)),
            asyncio.create_task(mesh.keep("rollout/0", "a:1")),
            asyncio.create_task(mesh.keep("reward/0", "c:1", 5.0)),
        ]
        found = await mesh.found.addresses(["reward", "rollout-0", "rollout-1"], 60.0)
        for task in kept:
            task.cancel()
        return found, asyncio.get_running_loop().time()

    found, took_s = run_jumping(find())
    assert found == {"reward": "c:1", "rollout-0": "a:1", "rollout-1": "b:1"}
    assert 5.0 <= took_s < 6.0


def test_those_that_do_not_come_are_named_with_what_starts_them() -> None:
    async def find() -> None:
        mesh = Mesh()
        keeping = asyncio.create_task(mesh.keep("rollout/0", "a:1"))
        try:
            await mesh.found.addresses(["reward", "rollout-0", "rollout-1"], 60.0)
        finally:
            assert asyncio.get_running_loop().time() == pytest.approx(60.0, abs=1.0)
            keeping.cancel()

    with pytest.raises(LaunchError) as missing:
        run_jumping(find())
    told = str(missing.value)
    assert "reward (rolemesh serve reward), rollout-1 (rolemesh serve rollout --number 1)" in told
    assert "within 60 s (run.recovery.wait_s)" in told
    assert told.endswith("registered are rollout/0 at a:1")


@pytest.mark.parametrize(
    "changes", [{"mesh": "n"}, {"is_leaving": True}], ids=["another mesh", "leaving"]
)
def test_what_is_of_another_mesh_or_about_to_end_does_not_count(changes: dict[str, Any]) -> None:
    async def find() -> None:
        mesh = Mesh()
        keeping = asyncio.create_task(mesh.keep("reward/0", "a:1", 1.0, **changes))
        try:
            await mesh.found.addresses(["reward"], 20.0)
        finally:
            keeping.cancel()

    with pytest.raises(LaunchError, match="reward"):
        run_jumping(find())


def test_the_lease_of_a_dead_process_is_not_taken_for_the_next_one() -> None:
    async def find() -> tuple[dict[str, str], float]:
        mesh = Mesh()
        # It died just after it had renewed its lease. Its successor asks each second.
        await mesh.enter("reward/0", "a:1")
        keeping = asyncio.create_task(mesh.keep("reward/0", "b:1", 1.0))
        found = await mesh.found.addresses(["reward"], 60.0)
        keeping.cancel()
        return found, asyncio.get_running_loop().time()

    found, took_s = run_jumping(find())
    assert found == {"reward": "b:1"}
    assert took_s >= TTL_S


async def test_a_lost_service_that_registers_is_found_again_where_it_is() -> None:
    async def again(service: str) -> str:
        return "elsewhere:2"

    lost = LostServices(recipe(), {"reward": "here:1"}, again, QuietObserver(), 90.0)
    lost.note("reward", "was killed")
    assert lost.told() == "; reward is waited for"
    await lost.start()
    assert lost.addresses == {"reward": "elsewhere:2"}


def test_of_services_that_join_and_leave_as_many_as_are_wanted_at_least_are_waited_for() -> None:
    changing = {
        "services": {"rollout": {"registers": True, "replicas": 2, "most_replicas": 3}},
        "schedule": {"sampler": {"type": "sync", "batch_size": 1}},
    }

    async def find(number: int) -> dict[str, str]:
        mesh = Mesh()
        mesh.found = RegisteredServices(mesh.store, "m", recipe(**changing))
        kept = [
            asyncio.create_task(mesh.keep(f"rollout/{2 - index}", f"{'abc'[index]}:1"))
            for index in range(number)
        ]
        try:
            return await mesh.found.addresses([f"rollout-{n}" for n in range(3)], 20.0)
        finally:
            for task in kept:
                task.cancel()

    assert run_jumping(find(2)) == {"rollout-2": "a:1", "rollout-1": "b:1"}
    with pytest.raises(LaunchError, match=r"rollout-0 \(.*--number 0\), rollout-1"):
        run_jumping(find(1))


def test_services_that_register_are_not_started_here() -> None:
    known = services_in(recipe())
    assert {name for name, address in known.items() if address is None} == {
        "actor",
        "critic",
        "reference",
    }


def test_a_recipe_without_certificates_cannot_have_services_that_register() -> None:
    with pytest.raises(ValueError, match=r"services\.reward\.registers is true, but certificates"):
        recipe(certificates=None)


def test_an_address_and_a_registration_exclude_each_other() -> None:
    services = {"reward": {"registers": True, "address": "a:1"}}
    with pytest.raises(ValueError, match="registers is true, and address is given"):
        recipe(services=services)


def test_a_run_needs_a_port_at_which_services_register(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"api\.member_port is null"):
        check_start(recipe(), ())
