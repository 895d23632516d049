from __future__ import annotations

import asyncio

import pytest

from rolemesh.coordinator.dataflow.pools import Pool, Pools
from rolemesh.coordinator.recipe.roles.placement import PoolSpec


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


class Moves:
    """A sleeper that notes what it is asked for."""

    def __init__(self) -> None:
        self.made: list[str] = []

    async def sleep(self, service: str, step: int) -> None:
        self.made.append(f"sleep {service}")

    async def wake(self, service: str, step: int) -> None:
        self.made.append(f"wake {service}")


async def test_a_new_process_loads_when_no_other_service_is_on_the_devices() -> None:
    moves = Moves()
    pool, turns = Pool("main", ("cuda:0",), moves), moves.made

    async def load() -> None:
        async with pool.loading("reward", 1):
            turns.append("load reward")
            await settle()

    async def call(order: int, service: str) -> None:
        async with pool.lease((1, order), service):
            turns.append(f"call {service}")

    async with pool.lease((1, 0), "critic"):
        tasks = [asyncio.create_task(call(order, "reward")) for order in (1, 2)]
        tasks.append(asyncio.create_task(load()))
        await settle()
        assert turns == ["wake critic"]
    await asyncio.gather(*tasks)
    # Its calls come after it, and need not wake it.
    assert turns[1:] == ["sleep critic", "load reward", "call reward", "call reward"]
    assert not pool.is_held


async def test_a_call_that_waits_for_a_new_process_keeps_the_devices_for_it() -> None:
    pool, is_loaded = Pool("main", ("cuda:0",), Moves()), asyncio.Event()
    may_end, others = asyncio.Event(), []

    async def call() -> None:
        async with pool.lease((1, 0), "reward"):
            await is_loaded.wait()

    async def load() -> None:
        async with pool.loading("reward", 1):
            is_loaded.set()
            await may_end.wait()

    async def other() -> None:
        async with pool.lease((1, 1), "critic"):
            others.append("critic")

    tasks = [asyncio.create_task(call())]
    await settle()
    tasks += [asyncio.create_task(load()), asyncio.create_task(other())]
    await settle()
    # The call has ended, but the process still comes to be.
    assert (tasks[0].done(), others) == (True, [])
    may_end.set()
    await asyncio.gather(*tasks)
    assert (others, pool.is_held) == (["critic"], False)


async def test_a_load_that_fails_leaves_the_devices_to_others() -> None:
    pool = Pool("main", ("cuda:0",), Moves())
    with pytest.raises(OSError, match="no memory"):
        async with pool.loading("reward", 1):
            raise OSError("no memory")
    async with asyncio.timeout(5), pool.lease((1, 1), "critic"):
        pass
    assert not pool.is_held


def test_a_role_without_a_pool_is_named() -> None:
    pools = Pools({"main": PoolSpec(roles=("actor",))})
    assert pools.of("actor").name == "main"
    with pytest.raises(ValueError, match="service 'critic' stands in no pool"):
        pools.of("critic")


def replicas(number: int) -> Pools:
    names = tuple(f"rollout-{index}" for index in range(number))
    return Pools({"sample": PoolSpec(roles=("rollout",))}, replicas={"rollout": names})


async def test_the_preferred_service_is_taken_where_several_are_free() -> None:
    pools = replicas(3)
    first = await pools.acquire("rollout-1", (0, 0), or_another=True)
    second = await pools.acquire("rollout-1", (0, 1), or_another=True)
    assert first is pools.of("rollout-1")
    assert second is not first
    assert (first.holder, second.holder) == ("rollout-1", "rollout-0")
    assert not pools.of("rollout-2").is_held
    for pool in (first, second):
        pool.pass_on()
    assert not any(pools.of(f"rollout-{index}").is_held for index in range(3))


async def test_a_call_goes_to_the_service_that_gets_free_first() -> None:
    pools, taken = replicas(2), []

    async def work(order: int, preferred: str, until: asyncio.Event) -> None:
        pool = await pools.acquire(preferred, (0, order), or_another=True)
        taken.append((order, pool.holder))
        await until.wait()
        pool.pass_on()

    slow, quick, late = asyncio.Event(), asyncio.Event(), asyncio.Event()
    tasks = [asyncio.create_task(work(0, "rollout-0", slow))]
    tasks.append(asyncio.create_task(work(1, "rollout-1", quick)))
    await settle()
    # Its own service is the slow one.
    tasks.append(asyncio.create_task(work(2, "rollout-0", late)))
    await settle()
    assert taken == [(0, "rollout-0"), (1, "rollout-1")]
    quick.set()
    await settle()
    assert taken[2:] == [(2, "rollout-1")]
    for event in (slow, late):
        event.set()
    await asyncio.gather(*tasks)
    assert not any(pools.of(f"rollout-{index}").is_held for index in range(2))


async def test_what_a_service_alone_can_do_comes_in_call_order_among_what_any_can() -> None:
    pools, turns = replicas(1 + 1), []

    async def work(order: int, *, or_another: bool) -> None:
        pool = await pools.acquire("rollout-0", (order,), or_another=or_another)
        turns.append((order, pool.holder))
        await settle()
        pool.pass_on()

    held = [
        await pools.of(f"rollout-{index}").acquire((0,), f"rollout-{index}") for index in (0, 1)
    ]
    # 3 and 5 are for rollout-0 alone: 5 has to wait for it.
    works = [work(order, or_another=order not in (3, 5)) for order in (6, 5, 4, 3, 2)]
    tasks = [asyncio.create_task(one) for one in works]
    await settle()
    held[0].pass_on()
    await asyncio.gather(*tasks[1:])
    assert turns[:4] == [(order, "rollout-0") for order in (2, 3, 4, 5)]
    held[1].pass_on()
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("num_turns", [0, 1, 2, 3, 4], ids=lambda n: f"after {n} turns of the loop")
async def test_a_cancelled_waiter_for_several_services_keeps_none(num_turns: int) -> None:
    pools = replicas(2)

    async def work() -> None:
        pool = await pools.acquire("rollout-0", (0, 0), or_another=True)
        try:
            await asyncio.sleep(3600)
        finally:
            pool.pass_on()

    waiter = asyncio.create_task(work())
    for _ in range(num_turns):
        await asyncio.sleep(0)
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)
    await settle()
    assert not any(pools.of(f"rollout-{index}").is_held for index in range(2))
    async with asyncio.timeout(5):
        held = [await pools.acquire("rollout-0", (0, order), or_another=True) for order in (1, 2)]
    assert {pool.holder for pool in held} == {"rollout-0", "rollout-1"}


def changing(*services: str) -> Pools:
    specs = {"sampling": PoolSpec(roles=("rollout",))}
    return Pools(specs, replicas={"rollout": services}, changing=("rollout",))


async def test_a_call_that_waits_goes_to_a_service_that_joins() -> None:
    pools = changing("rollout-0")
    first = await pools.acquire("rollout-0", (1, 0), or_another=True)
    second = asyncio.ensure_future(pools.acquire("rollout-0", (1, 1), or_another=True))
    await settle()
    assert not second.done()
    pools.join("rollout-2")
    assert (await second).holder == "rollout-2"
    assert (await second).name == "sampling/2"
    assert first.holder == "rollout-0"


async def test_a_service_that_leaves_makes_its_own_calls_alone() -> None:
    """They end at once, but have to be held."""
    pools = changing("rollout-0", "rollout-1")
    left = await pools.acquire("rollout-1", (1, 0), or_another=True)
    stays = await pools.acquire("rollout-0", (1, 1), or_another=True)
    pools.leave("rollout-1")
    other = asyncio.ensure_future(pools.acquire("rollout-1", (1, 2), or_another=True))
    own = asyncio.ensure_future(pools.acquire("rollout-1", (1, 3)))
    left.pass_on()
    await settle()
    assert own.done()
    assert (await own).holder == "rollout-1"
    assert not other.done()
    stays.pass_on()
    assert (await other).holder == "rollout-0"


async def test_a_service_that_comes_back_has_a_pool_of_its_own() -> None:
    pools = changing("rollout-0", "rollout-1")
    held = await pools.acquire("rollout-1", (1, 0), or_another=True)
    pools.leave("rollout-1")
    pools.join("rollout-1")
    assert (await pools.acquire("rollout-1", (2, 0), or_another=True)).holder == "rollout-1"
    # What the one before still held gives nothing to others.
    held.pass_on()
    await pools.acquire("rollout-0", (2, 1), or_another=True)
    third = asyncio.ensure_future(pools.acquire("rollout-0", (2, 2), or_another=True))
    await settle()
    assert not third.done()
    third.cancel()
