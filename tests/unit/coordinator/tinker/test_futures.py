"""Promises of results, fetched by long polling."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import pytest

from rolemesh.coordinator.tinker import futures
from rolemesh.coordinator.tinker.forms.forms import WireError
from rolemesh.coordinator.tinker.futures import (
    Failure,
    Promises,
    TooManyError,
    UnknownPromiseError,
)
from rolemesh.rpc.errors import (
    InvalidRequestError,
    PreconditionError,
    UnavailableError,
)


@pytest.fixture
async def promises() -> AsyncIterator[Promises]:
    made = Promises()
    yield made
    await made.close()


async def giving(result: Any) -> Any:
    return result


async def failing(error: Exception) -> NoReturn:
    raise error


async def test_a_poll_gives_nothing_and_then_the_result(promises: Promises) -> None:
    is_due = asyncio.Event()

    async def work() -> str:
        await is_due.wait()
        return "made"

    promise = promises.make("ann", work())
    assert await promises.result("ann", promise, wait_s=0.01) is None
    polling = asyncio.create_task(promises.result("ann", promise, wait_s=30.0))
    await asyncio.sleep(0)
    is_due.set()
    assert await polling == "made"
    # For a client that lost the answer.
    assert await promises.result("ann", promise) == "made"


async def test_a_poll_that_is_given_up_leaves_the_work_alone(promises: Promises) -> None:
    is_due = asyncio.Event()
    promise = promises.make("ann", is_due.wait())
    polling = asyncio.create_task(promises.result("ann", promise))
    await asyncio.sleep(0)
    polling.cancel()
    await asyncio.gather(polling, return_exceptions=True)
    is_due.set()
    assert await promises.result("ann", promise) is True


async def test_a_call_that_was_made_gives_its_promise_again(promises: Promises) -> None:
    first = promises.make("ann", giving(1), ("turn", 1))
    again = giving(2)
    assert promises.make("ann", again, ("turn", 1)) == first
    # Dropped: nothing warns of a coroutine that was never awaited.
    assert inspect.getcoroutinestate(again) == inspect.CORO_CLOSED
    assert await promises.result("ann", first) == 1
    # Also once it was fetched.
    assert promises.make("ann", giving(3), ("turn", 1)) == first


async def test_other_calls_and_other_owners_get_promises_of_their_own(promises: Promises) -> None:
    calls = [("ann", ("turn", 1)), ("ann", ("turn", 2)), ("bob", ("turn", 1))]
    calls += [("ann", None), ("ann", None)]  # type: ignore[list-item]
    made = [promises.make(owner, giving(at), call) for at, (owner, call) in enumerate(calls)]
    assert len(set(made)) == len(calls)
    found = [await promises.result(owner, one) for (owner, _), one in zip(calls, made, strict=True)]
    assert found == [0, 1, 2, 3, 4]


async def test_a_promise_is_its_owners_alone(promises: Promises) -> None:
    promise = promises.make("ann", giving(1))
    for owner, asked in (("bob", promise), ("ann", "0" * 32)):
        with pytest.raises(UnknownPromiseError, match=asked):
            await promises.result(owner, asked)


@pytest.mark.parametrize(
    ("error", "category"),
    [
        (WireError("loss_fn", "mse", "give another"), "user"),
        (InvalidRequestError("column is missing"), "user"),
        (PreconditionError("no gradient was accumulated"), "user"),
        (UnavailableError("the actor is away"), "server"),
        (RuntimeError("a fault"), "server"),
        (RuntimeError(), "server"),
    ],
    ids=repr,
)
async def test_failures_say_whose_they_are(
    promises: Promises, error: Exception, category: str
) -> None:
    promise = promises.make("ann", failing(error))
    failure = await promises.result("ann", promise)
    assert failure == Failure(str(error) or "RuntimeError", category)
    assert failure.text


async def test_faults_of_the_server_itself_are_logged(
    promises: Promises, caplog: pytest.LogCaptureFixture
) -> None:
    for error in (WireError("a", "b", "c"), UnavailableError("away"), RuntimeError("a fault")):
        await promises.result("ann", promises.make("ann", failing(error)))
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert caplog.records[0].exc_info is not None
    assert "a fault" in caplog.text


async def test_no_more_than_some_are_pending(
    promises: Promises, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(futures, "MOST_PENDING", 2)
    is_due = asyncio.Event()
    made = [promises.make("ann", is_due.wait(), number) for number in range(2)]
    refused = giving(1)
    with pytest.raises(TooManyError):
        promises.make("ann", refused)
    assert inspect.getcoroutinestate(refused) == inspect.CORO_CLOSED
    # One that is there already is none more.
    assert promises.make("ann", giving(1), 1) == made[1]
    is_due.set()
    await promises.result("ann", made[0])
    assert await promises.result("ann", promises.make("ann", giving(3))) == 3


async def test_results_are_forgotten_long_after_they_were_fetched(
    promises: Promises, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = promises.make("ann", giving(1), "fetched")
    unfetched = promises.make("ann", giving(2), "unfetched")
    await promises.result("ann", fetched)
    promises.make("ann", giving(3))
    assert await promises.result("ann", fetched) == 1
    monkeypatch.setattr(futures, "KEPT_S", 0.0)
    promises.make("ann", giving(3))
    with pytest.raises(UnknownPromiseError):
        await promises.result("ann", fetched)
    assert await promises.result("ann", unfetched) == 2
    assert promises.make("ann", giving(4), "fetched") != fetched


async def test_results_that_nobody_fetches_are_forgotten(
    promises: Promises, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_due = asyncio.Event()
    unwanted, pending = promises.make("ann", giving(1)), promises.make("ann", is_due.wait())
    await asyncio.sleep(0)
    monkeypatch.setattr(futures, "UNFETCHED_S", 0.0)
    promises.make("ann", giving(3))
    with pytest.raises(UnknownPromiseError):
        await promises.result("ann", unwanted)
    is_due.set()
    assert await promises.result("ann", pending) is True


async def test_work_that_is_not_done_when_the_server_ends_is_a_failure() -> None:
    promises = Promises()
    promise = promises.make("ann", asyncio.Event().wait())
    await asyncio.sleep(0)
    await promises.close()
    failure = await promises.result("ann", promise)
    assert failure.category == "server"
    assert "the server ended" in failure.text


# --- together, and given up ------------------------------------------------------------------


async def test_those_that_have_ended_are_told_of_together(promises: Promises) -> None:
    made = promises.make("ann", giving(1), group="samples")
    failed = promises.make("ann", failing(WireError("a", 1, "b")), group="samples")
    promises.make("ann", giving(2), group="others")
    await asyncio.sleep(0)
    found, cursor = await promises.ended("ann", "samples", 0)
    assert found == [(made, True), (failed, False)]
    # A client that lost the answer asks again from the same place.
    assert await promises.ended("ann", "samples", 0) == (found, cursor)
    assert await promises.ended("ann", "samples", cursor, wait_s=0.01) == ([], cursor)
    later = promises.make("ann", giving(3), group="samples")
    found, after = await promises.ended("ann", "samples", cursor)
    assert found == [(later, True)]
    assert after > cursor
    # Another owner's client hears nothing of them.
    assert await promises.ended("bob", "samples", 0, wait_s=0.01) == ([], 0)


async def test_who_waits_for_a_group_hears_of_it_at_once(promises: Promises) -> None:
    is_due = asyncio.Event()
    promise = promises.make("ann", is_due.wait(), group="samples")
    waiting = asyncio.create_task(promises.ended("ann", "samples", 0, wait_s=30.0))
    await asyncio.sleep(0)
    is_due.set()
    found, _ = await asyncio.wait_for(waiting, 5.0)
    assert found == [(promise, True)]


async def test_numbers_go_on_where_a_group_was_forgotten(
    promises: Promises, monkeypatch: pytest.MonkeyPatch
) -> None:
    promises.make("ann", giving(1), group="samples")
    await asyncio.sleep(0)
    _, cursor = await promises.ended("ann", "samples", 0)
    monkeypatch.setattr(futures, "UNFETCHED_S", -1.0)
    promises.make("ann", giving(2))  # this forgets
    monkeypatch.undo()
    later = promises.make("ann", giving(3), group="samples")
    await asyncio.sleep(0)
    found, _ = await promises.ended("ann", "samples", cursor)
    assert found == [(later, True)]


async def test_work_that_nobody_wants_is_ended(promises: Promises) -> None:
    promise = promises.make("ann", asyncio.Event().wait(), group="samples")
    await asyncio.sleep(0)
    with pytest.raises(UnknownPromiseError):
        promises.give_up("bob", promise)
    promises.give_up("ann", promise)
    failure = await promises.result("ann", promise)
    assert isinstance(failure, Failure)
    assert "given up" in failure.text
    assert (await promises.ended("ann", "samples", 0))[0] == [(promise, False)]
    # What was made stays.
    made = promises.make("ann", giving(1), group="samples")
    await promises.result("ann", made)
    promises.give_up("ann", made)
    assert await promises.result("ann", made) == 1


async def test_work_that_others_count_on_is_not_given_up(promises: Promises) -> None:
    promise = promises.make("ann", giving(1))
    with pytest.raises(WireError, match="samples alone"):
        promises.give_up("ann", promise)
    assert await promises.result("ann", promise) == 1


async def test_polls_return_when_the_server_ends(promises: Promises) -> None:
    promise = promises.make("ann", asyncio.Event().wait(), group="samples")
    polls = [
        asyncio.create_task(promises.result("ann", promise, wait_s=60.0)),
        asyncio.create_task(promises.ended("ann", "samples", 0, wait_s=60.0)),
    ]
    await asyncio.sleep(0)
    promises.end_polls()
    assert await asyncio.wait_for(asyncio.gather(*polls), 5.0) == [None, ([], 0)]
    assert await promises.result("ann", promise, wait_s=60.0) is None
