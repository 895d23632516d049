"""Coroutines side by side: results in order, and one failure that ends all."""

from __future__ import annotations

import asyncio

import pytest

from rolemesh.rpc.together import together


async def test_results_come_in_the_order_of_the_coroutines() -> None:
    async def after(turns: int) -> int:
        for _ in range(turns):
            await asyncio.sleep(0)
        return turns

    assert await together(after(turns) for turns in (3, 1, 2)) == [3, 1, 2]
    assert await together([]) == []


async def test_the_first_failure_ends_the_others_and_is_raised_alone() -> None:
    ended = asyncio.Event()

    async def fails() -> None:
        await asyncio.sleep(0)
        raise ValueError("this one")

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.set()
            raise KeyError("because it was cancelled")

    with pytest.raises(ValueError, match="this one"):
        await together([waits(), fails()])
    assert ended.is_set()
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling(), "a later timeout of the caller must not take it for a cancel"


async def test_a_cancelled_caller_ends_all_and_is_cancelled() -> None:
    ended: list[int] = []

    async def waits(number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(number)

    task = asyncio.ensure_future(together([waits(1), waits(2)]))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(ended) == [1, 2]
