"""A sender and takers of the same weights find each other, or do without, within a bound."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from support.fake_in_process import run_jumping

from rolemesh.coordinator.dataflow.calls.exchanges import PAIR_S, Pairing

SERVICES = ("rollout-0", "rollout-1")


def timed(work: Callable[[Pairing], Awaitable[None]]) -> float:
    """Seconds that it takes, on a clock that jumps."""

    async def measured() -> float:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        await work(Pairing(SERVICES))
        return loop.time() - begun

    return run_jumping(measured())


async def taker(pairing: Pairing, service: str, after_s: float = 0.0) -> str:
    await asyncio.sleep(after_s)
    return await pairing.exchange_for(service)


async def sender(pairing: Pairing, after_s: float = 0.0) -> set[str]:
    """Whom it finds; each is told an exchange named after it."""
    await asyncio.sleep(after_s)
    found = await pairing.takers()
    for service, told in found.items():
        told.set_result(f"by {service}")
    return set(found)


def test_those_who_come_at_about_the_same_time_are_paired() -> None:
    async def work(pairing: Pairing) -> None:
        found, one, other = await asyncio.gather(
            sender(pairing, 0.5),
            taker(pairing, "rollout-0"),
            taker(pairing, "rollout-1", 1.0),
        )
        assert found == set(SERVICES)
        assert (one, other) == ("by rollout-0", "by rollout-1")

    # Once all are there, it waits no longer.
    assert timed(work) == 1.0


def test_a_taker_without_a_sender_goes_on_without_one() -> None:
    async def work(pairing: Pairing) -> None:
        assert await taker(pairing, "rollout-0") == ""

    assert timed(work) == PAIR_S


def test_a_sender_that_comes_too_late_does_not_wait() -> None:
    async def work(pairing: Pairing) -> None:
        found, *told = await asyncio.gather(
            sender(pairing, PAIR_S + 1.0), *(taker(pairing, service) for service in SERVICES)
        )
        assert (found, told) == (set(), ["", ""])

    assert timed(work) == PAIR_S + 1.0


def test_a_taker_that_comes_too_late_is_told_so_at_once() -> None:
    async def work(pairing: Pairing) -> None:
        found, one, late = await asyncio.gather(
            sender(pairing),
            taker(pairing, "rollout-0", 0.1),
            taker(pairing, "rollout-1", PAIR_S + 1.0),
        )
        assert (found, one, late) == ({"rollout-0"}, "by rollout-0", "")

    assert timed(work) == PAIR_S + 1.0


def test_a_taker_that_was_cancelled_is_not_sent_to() -> None:
    async def work(pairing: Pairing) -> None:
        leaving = asyncio.create_task(taker(pairing, "rollout-0"))
        await asyncio.sleep(0.1)
        leaving.cancel()
        staying = asyncio.create_task(taker(pairing, "rollout-1"))
        assert await sender(pairing) == {"rollout-1"}
        assert await staying == "by rollout-1"
        assert leaving.cancelled()

    assert timed(work) < PAIR_S
