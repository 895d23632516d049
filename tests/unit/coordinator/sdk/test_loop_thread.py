"""The loop behind the synchronous client."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from rolemesh.coordinator.sdk.loop_thread import LoopThread
from rolemesh.rpc.errors import CallCancelledError, NotFoundError

END_S = 10.0


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "rolemesh-sdk"]


async def answer(value: int) -> int:
    await asyncio.sleep(0)
    return value


async def test_it_works_while_another_loop_runs_and_leaves_no_thread() -> None:
    loop = LoopThread()
    assert loop.run(answer(7)) == 7  # as in a notebook: this thread's loop stands still meanwhile
    assert len(threads()) == 1
    loop.close()
    assert threads() == []
    loop.close()  # a second time does nothing
    with pytest.raises(CallCancelledError, match="closed"):
        loop.run(answer(7))


def test_an_error_comes_as_it_is() -> None:
    async def fail() -> None:
        raise NotFoundError("no such run", reason="RUN_NOT_FOUND")

    loop = LoopThread()
    with pytest.raises(NotFoundError) as caught:
        loop.run(fail())
    loop.close()
    assert caught.value.reason == "RUN_NOT_FOUND"


def test_closing_ends_a_call_that_runs() -> None:
    loop, errors, began = LoopThread(), [], threading.Event()

    async def endless() -> None:
        began.set()
        await asyncio.Event().wait()

    def wait() -> None:
        try:
            loop.run(endless())
        except CallCancelledError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert began.wait(END_S)
    loop.close()
    waiting.join(END_S)
    assert [error.reason for error in errors] == ["CANCELLED"]


def test_items_are_pulled_one_by_one_and_leaving_early_closes_the_generator() -> None:
    made, closed = [], threading.Event()

    async def count() -> AsyncIterator[int]:
        try:
            for number in range(100):
                made.append(number)
                yield number
        finally:
            closed.set()

    loop = LoopThread()
    items = loop.iterate(count())
    assert next(items) == 0
    assert next(items) == 1
    assert made == [0, 1]
    items.close()  # type: ignore[attr-defined]
    assert closed.is_set()
    assert list(loop.iterate(count())) == list(range(100))
    loop.close()
