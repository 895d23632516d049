"""Events and logs that the SDK's client follows, through restarts and cut connections."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.stored_runs import QUICK, Coordinator, running_coordinator, store_of_a_run
from support.tcp_proxy import TcpProxy

from rolemesh.coordinator.sdk import (
    AsyncClient,
    CheckpointSaved,
    Client,
    Evaluated,
    Event,
    Noted,
    Recovered,
    Resumed,
    RetryPolicy,
    RolemeshError,
    RunState,
    StateChanged,
    StepMade,
)
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.store import RunState as StoredState
from rolemesh.coordinator.state.store import RunStream
from rolemesh.rpc.errors import UnavailableError
from rolemesh.v1 import coordinator_pb2 as pb

NUM_EVENTS = 300


async def tell(store: MemoryStateStore, event: pb.RunEvent) -> None:
    await store.append_entry("run", RunStream.EVENTS, event.SerializeToString())


async def end(store: MemoryStateStore) -> None:
    await store.update_run("run", state=StoredState.SUCCEEDED)
    ended = pb.RunStateChange(state=pb.RUN_STATE_SUCCEEDED)
    await tell(store, pb.RunEvent(step=NUM_EVENTS, state=ended))


def note(number: int) -> pb.RunEvent:
    return pb.RunEvent(step=number, note=pb.Note(text=f"event {number}"))


@pytest.fixture
async def store(tmp_path: Path) -> MemoryStateStore:
    return await store_of_a_run(tmp_path)


@pytest.fixture
async def coordinator(store: MemoryStateStore) -> AsyncIterator[Coordinator]:
    async with running_coordinator(store) as coordinator:
        yield coordinator


@pytest.fixture
async def client(coordinator: Coordinator) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(coordinator.address, retry=QUICK) as client:
        yield client


async def test_a_log_is_read_and_followed_to_the_end_of_the_run(
    store: MemoryStateStore, client: AsyncClient, tmp_path: Path
) -> None:
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "actor.log"
    log.write_text("one\n")
    piece = await client.read_log("run", "actor")
    assert (piece.text, piece.next_offset, piece.logs) == ("one\n", 4, ("actor",))

    followed = client.follow_log("run", "actor")
    assert await anext(followed) == "one\n"
    with log.open("a") as file:
        file.write("two\n")
    assert await anext(followed) == "two\n"
    with log.open("a") as file:
        file.write("three\n")
    await end(store)
    assert [text async for text in followed] == ["three\n"]


async def test_events_of_every_kind_come_typed(
    store: MemoryStateStore, client: AsyncClient
) -> None:
    await tell(store, pb.RunEvent(step=0, state=pb.RunStateChange(state=pb.RUN_STATE_RUNNING)))
    await tell(store, pb.RunEvent(step=1, step_made=pb.StepMade(metrics={"reward/mean": 0.5})))
    await tell(store, pb.RunEvent(step=1, evaluated=pb.Evaluated(metrics={"score": 0.25})))
    saved = pb.CheckpointSaved(directory="/runs/quick/step-1")
    await tell(store, pb.RunEvent(step=1, checkpoint_saved=saved))
    await tell(store, note(1))
    recovered = pb.Recovered(
        step=1, cause="killed", seconds=2.5, restarted=["actor", "critic"], lost_steps=3
    )
    await tell(store, pb.RunEvent(step=1, recovered=recovered))
    await tell(store, pb.RunEvent(step=1, state=pb.RunStateChange(state=pb.RUN_STATE_FAILED)))
    await tell(store, pb.RunEvent(step=1, resumed=pb.Resumed(step=1, where="its journal")))
    await tell(store, pb.RunEvent(step=1, state=pb.RunStateChange(state=pb.RUN_STATE_RUNNING)))
    await end(store)
    events = [event async for event in client.watch_run("run")]
    assert [type(event) for event in events] == [
        StateChanged, StepMade, Evaluated, CheckpointSaved, Noted, Recovered, StateChanged,
        Resumed, StateChanged, StateChanged,
    ]  # fmt: skip
    assert events[5] == Recovered(
        events[5].event_id, events[5].time, 1, "killed", 2.5, ("actor", "critic"), 3
    )
    assert isinstance(events[7], Resumed)
    assert events[7].where == "its journal"
    made = events[1]
    assert isinstance(made, StepMade)
    assert made.metrics == {"reward/mean": 0.5}
    later = [event async for event in client.watch_run("run", after=made.event_id)]
    assert later == events[2:]
    assert (await client.wait_run("run")).state is RunState.SUCCEEDED


def numbers(events: list[Event]) -> list[int]:
    return [event.step for event in events if isinstance(event, Noted)]


async def test_a_watch_through_restarts_of_the_coordinator_misses_and_repeats_nothing(
    store: MemoryStateStore, coordinator: Coordinator
) -> None:
    async def write() -> None:
        for number in range(NUM_EVENTS):
            await tell(store, note(number))
            await asyncio.sleep(0.005)
            if number in (60, 150, 151, 240):
                await coordinator.stop()
                await asyncio.sleep(0.1)
                await coordinator.start()
        await end(store)

    async with AsyncClient(coordinator.address, retry=QUICK) as client:
        writing = asyncio.create_task(write())
        events = [event async for event in client.watch_run("run")]
        await writing
    assert numbers(events) == list(range(NUM_EVENTS))
    assert isinstance(events[-1], StateChanged)


async def test_a_watch_through_cut_connections_misses_and_repeats_nothing(
    store: MemoryStateStore, coordinator: Coordinator
) -> None:
    proxy = TcpProxy(coordinator.port)
    await proxy.start()

    async def write() -> None:
        for number in range(NUM_EVENTS):
            await tell(store, note(number))
            await asyncio.sleep(0.005)
            if number % 50 == 25:
                await proxy.cut()
                await asyncio.sleep(0.05)
                await proxy.start()
        await end(store)

    async with AsyncClient(proxy.address, retry=QUICK) as client:
        writing = asyncio.create_task(write())
        events = [event async for event in client.watch_run("run")]
        await writing
    await proxy.cut()
    assert numbers(events) == list(range(NUM_EVENTS))
    assert proxy.num_connections > NUM_EVENTS // 50


async def test_a_watch_of_a_coordinator_that_is_gone_for_good_ends_with_an_error(
    store: MemoryStateStore, coordinator: Coordinator
) -> None:
    policy = RetryPolicy(budget_s=0.3, first_s=0.01, longest_s=0.05)
    await tell(store, note(0))
    async with AsyncClient(coordinator.address, retry=policy) as client:
        watch = client.watch_run("run")
        assert (await anext(watch)).step == 0
        await coordinator.stop()
        with pytest.raises(UnavailableError):
            await anext(watch)


async def test_a_run_that_ended_without_its_last_event_ends_the_watch(
    store: MemoryStateStore, client: AsyncClient
) -> None:
    await tell(store, note(0))
    await store.update_run("run", state=StoredState.FAILED)
    events = [event async for event in client.watch_run("run")]
    assert numbers(events) == [0]


async def test_the_synchronous_client_does_the_same_in_a_thread(
    store: MemoryStateStore, coordinator: Coordinator
) -> None:
    for number in range(3):
        await tell(store, note(number))
    await store.append_metrics("run", {"step": 1, "reward/mean": math.pi})
    await end(store)

    def use() -> tuple[list[Event], float, str]:
        with Client(coordinator.address, retry=QUICK) as client:
            events = list(client.watch_run("run"))
            early = client.watch_run("run")
            next(early)
            early.close()  # type: ignore[attr-defined]
            with pytest.raises(RolemeshError):
                client.get_run("other")
            return events, float(client.get_metrics("run")["reward/mean"][0]), repr(client)

    events, reward, shown = await asyncio.to_thread(use)
    assert numbers(events) == [0, 1, 2]
    assert reward == math.pi
    assert shown == f"Client('{coordinator.address}')"
    assert not [thread for thread in threading.enumerate() if thread.name == "rolemesh-sdk"]
