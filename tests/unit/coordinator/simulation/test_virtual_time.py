"""Tests of the loop whose clock jumps."""

from __future__ import annotations

import asyncio
import time

import pytest

from rolemesh.coordinator.dataflow.loop.clock import now, unix_time
from rolemesh.coordinator.simulation.virtual_time import DeadlockError, run_virtually


def test_hours_pass_at_once_and_timers_keep_their_order() -> None:
    order: list[tuple[str, float]] = []

    async def nap(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        order.append((name, now()))

    async def naps() -> None:
        await asyncio.gather(nap("long", 7200.0), nap("short", 0.25), nap("middle", 3600.0))

    started = time.monotonic()
    run_virtually(naps())
    assert order == [("short", 0.25), ("middle", 3600.0), ("long", 7200.0)]
    assert time.monotonic() - started < 60


def test_what_can_never_come_is_an_error() -> None:
    async def wait() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(DeadlockError):
        run_virtually(wait())


def test_work_of_threads_is_done_at_once_and_no_process_starts() -> None:
    async def work() -> tuple[int, float]:
        found = await asyncio.to_thread(sum, (1, 2))
        with pytest.raises(OSError, match="starts no process"):
            await asyncio.create_subprocess_exec("true")
        return found, now()

    assert run_virtually(work()) == (3, 0.0)


def test_a_timeout_is_of_virtual_seconds() -> None:
    async def give_up() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(900):
                await asyncio.sleep(901)
        return unix_time()

    assert run_virtually(give_up()) == 900.0


async def test_other_loops_have_the_real_clocks() -> None:
    assert abs(unix_time() - time.time()) < 60
    assert abs(now() - time.monotonic()) < 60
