from __future__ import annotations

import asyncio

import pytest

from rolemesh.coordinator.pools import Pool, Pools
from rolemesh.coordinator.recipe import PoolSpec


async def settle() -> None:
    """Turns the loop often enough for everything that can start to start; waits for no clock."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_a_pool_has_one_holder_at_a_time() -> None:
    pool, holders, most = Pool(name="main", devices=("cpu",)), 0, 0

    async def work(order: int) -> None:
        nonlocal holders, most
        async with pool.lease((order,), "actor"):
            holders += 1
            most = max(most, holders)
            await asyncio.sleep(0)
            holders -= 1

    await asyncio.gather(*(work(order) for order in range(8)))
    assert most == 1
    assert not pool.is_held


async def test_the_call_made_first_has_the_lease_next_whoever_asked_first() -> None:
    pool, turns = Pool(name="main", devices=("cpu",)), []

    async def work(order: int) -> None:
        async with pool.lease((order,), "actor"):
            turns.append(order)

    async with pool.lease((0,), "actor"):
        waiting = []
        for order in (3, 1, 2):
            waiting.append(asyncio.create_task(work(order)))
            await settle()
    await asyncio.gather(*waiting)
    assert turns == [1, 2, 3]


async def test_calls_that_become_ready_together_start_in_call_order() -> None:
    pool, turns = Pool(name="main", devices=("cpu",)), []

    async def work(order: int) -> None:
        async with pool.lease((order,), "actor"):
            turns.append(order)

    await asyncio.gather(*(work(order) for order in (2, 1, 0)))
    assert turns == [0, 1, 2]


@pytest.mark.parametrize("num_turns", [0, 1, 2, 3], ids=lambda n: f"after {n} turns of the loop")
async def test_a_cancelled_waiter_does_not_keep_the_lease(num_turns: int) -> None:
    pool = Pool(name="main", devices=("cpu",))

    async def work(order: int) -> None:
        async with pool.lease((order,), "actor"):
            pass

    async with pool.lease((0,), "actor"):
        waiting = asyncio.create_task(work(1))
        await settle()
    for _ in range(num_turns):
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    async with asyncio.timeout(5):
        await work(2)


def test_a_role_without_a_pool_is_named() -> None:
    pools = Pools({"main": PoolSpec(roles=("actor",))})
    assert pools.of("actor").name == "main"
    with pytest.raises(ValueError, match="'critic' stands in no pool"):
        pools.of("critic")
