"""The loop behind the synchronous client."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from rolemesh.rpc.errors import CallCancelledError, NotFoundError
from rolemesh.rpc.loop_thread import LoopThread

END_S = 10.0


def make() -> LoopThread:
    return LoopThread("rolemesh-test", "client")


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "rolemesh-test"]


async def answer(value: int) -> int:
    await asyncio.sleep(0)
    return value


async def test_it_works_while_another_loop_runs_and_leaves_no_thread() -> None:
    loop = make()
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

    loop = make()
    with pytest.raises(NotFoundError) as caught:
        loop.run(fail())
    loop.close()
    assert caught.value.reason == "RUN_NOT_FOUND"


def test_closing_ends_a_call_that_runs() -> None:
    loop, errors, began = make(), [], threading.Event()

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

    loop = make()
    items = loop.iterate(count())
    assert next(items) == 0
    assert next(items) == 1
    assert made == [0, 1]
    items.close()  # type: ignore[attr-defined]
    assert closed.is_set()
    assert list(loop.iterate(count())) == list(range(100))
    loop.close()


async def ticks() -> AsyncIterator[int]:
    try:
        yield 0
        await asyncio.Event().wait()
    finally:
        for _ in range(3):  # its end takes some turns of the loop, like that of a call
            await asyncio.sleep(0)


@pytest.mark.parametrize("round_", range(5))
def test_closing_ends_those_who_iterate_in_other_threads(round_: int) -> None:
    loop, errors = make(), []

    def follow(items: Iterator[int]) -> None:
        try:
            list(items)
        except CallCancelledError as error:
            errors.append(error)

    iterators = [loop.iterate(ticks()) for _ in range(8)]
    assert [next(items) for items in iterators] == [0] * 8
    following = [threading.Thread(target=follow, args=(items,), daemon=True) for items in iterators]
    for thread in following:
        thread.start()
    loop.close()
    for thread in following:
        thread.join(END_S)
    assert len(errors) == 8


def test_an_interrupt_of_an_iteration_comes_as_it_is() -> None:
    loop = make()
    items = loop.iterate(ticks())
    assert next(items) == 0
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            next(items)
    finally:
        signal.signal(signal.SIGINT, before)
        loop.close()


def test_an_iterator_that_the_loop_itself_collects_as_garbage_does_not_stop_it() -> None:
    loop, collected = make(), threading.Event()

    async def collect() -> None:
        gc.collect()
        collected.set()

    items = loop.iterate(ticks())
    assert next(items) == 0
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        cycle: list[object] = [items]
        cycle.append(cycle)
        del items, cycle
        threading.Thread(target=loop.run, args=(collect(),), daemon=True).start()
        assert collected.wait(END_S)
    finally:
        if was_enabled:
            gc.enable()
    loop.close()
