"""Tests of watching a run: each event once, from any place, until the run ends."""

from __future__ import annotations

import asyncio

import pytest
from support.fake_run import NUM_STEPS, append_step

from rolemesh.coordinator.api.reads import watches
from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.coordinator.state.store import RunState, RunStream, StateStore
from rolemesh.rpc.errors import CapacityError, OutOfRangeError
from rolemesh.v1 import coordinator_pb2


async def events_of(operations: StoreOperations, run_id: str, after: str = "") -> list[str]:
    return [event.event_id async for event in operations.watch_run(run_id, after)]


async def test_a_watch_sends_every_event_once_and_ends_with_the_run(
    operations: StoreOperations,
) -> None:
    events = [event async for event in operations.watch_run("made")]
    made = [event.step for event in events if event.HasField("step_made")]
    assert made == list(range(1, NUM_STEPS + 1))
    assert events[-1].state.state == coordinator_pb2.RUN_STATE_SUCCEEDED
    ids = [event.event_id for event in events]
    assert len(set(ids)) == len(ids)
    # Whichever event was the last that arrived: what follows is the rest.
    for place in (0, 5, len(ids) - 2):
        assert await events_of(operations, "made", ids[place]) == ids[place + 1 :]


async def test_a_watch_waits_for_what_comes(store: StateStore, operations: StoreOperations) -> None:
    watch = operations.watch_run("live")
    known = (await store.read_entries("live", RunStream.EVENTS))[-1].entry_id
    watch = operations.watch_run("live", known)
    coming = asyncio.ensure_future(anext(aiter(watch)))
    await asyncio.sleep(0)
    await append_step(store, await store.get_run("live"), NUM_STEPS + 1)
    assert (await coming).step_made.metrics["step"] == NUM_STEPS + 1


async def test_more_watches_than_there_may_be_are_refused_as_load(
    store: StateStore, operations: StoreOperations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watches, "MAX_WATCHES", 2)
    open_watches = [operations.watch_run("live"), operations.watch_run("live")]
    for watch in open_watches:
        await anext(aiter(watch))
    with pytest.raises(CapacityError, match="2 watches of runs go on") as refused:
        await anext(aiter(operations.watch_run("live")))
    assert (refused.value.reason, refused.value.retryable) == ("TOO_MANY_STREAMS", True)
    await open_watches.pop().aclose()  # type: ignore[attr-defined]
    await anext(aiter(operations.watch_run("live")))


async def test_a_watch_ends_when_the_last_event_was_never_written(
    store: StateStore, operations: StoreOperations
) -> None:
    await store.update_run("live", state=RunState.FAILED)
    assert len(await events_of(operations, "live")) > NUM_STEPS


async def test_a_watch_after_an_event_that_is_gone_is_refused(operations: StoreOperations) -> None:
    with pytest.raises(OutOfRangeError, match="begin anew") as refused:
        await events_of(operations, "live", "0-1")
    assert refused.value.reason == "EVENTS_EXPIRED"


async def test_a_watch_passes_an_end_after_which_the_run_was_resumed(
    store: StateStore, operations: StoreOperations
) -> None:
    states = coordinator_pb2.RUN_STATE_STARTING, coordinator_pb2.RUN_STATE_STOPPED
    for state in states:
        change = coordinator_pb2.RunEvent(state=coordinator_pb2.RunStateChange(state=state))
        await store.append_entry("made", RunStream.EVENTS, change.SerializeToString())
    told = [event.state.state async for event in operations.watch_run("made")]
    assert told[-3:] == [coordinator_pb2.RUN_STATE_SUCCEEDED, *states]
