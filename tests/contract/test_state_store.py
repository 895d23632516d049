"""One suite for every state store: they differ in means, never in behaviour.

Servers of stores, and their addresses in recipes, are in test_store_servers.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fakeredis import FakeAsyncRedis
from support.run_records import entry, record

from rolemesh.coordinator.state.errors import (
    JournalLostError,
    RunExistsError,
    RunNotFoundError,
    StaleEpochError,
)
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.redis import RedisStateStore
from rolemesh.coordinator.state.registrations import Registration
from rolemesh.coordinator.state.server.embedded import EmbeddedValkey
from rolemesh.coordinator.state.store import (
    EntryExpiredError,
    RunState,
    RunStream,
    ServiceLease,
    StateStore,
)

LEASE_TTL_S = 0.05
LEASE_WAIT_S = 0.2


@pytest.fixture(params=["memory", "fakeredis", "valkey"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[StateStore]:
    if request.param == "memory":
        yield MemoryStateStore()
    elif request.param == "fakeredis":
        client = FakeAsyncRedis(max_connections=1_000)
        yield RedisStateStore("redis://fake", client=client)
        await client.aclose()
    else:
        async with EmbeddedValkey(tmp_path / "store") as server:
            opened = RedisStateStore(server.url)
            yield opened
            await opened.close()


async def test_a_run_comes_back_as_it_was_created(store: StateStore) -> None:
    await store.create_run(record("a"))
    assert await store.get_run("a") == record("a")


async def test_a_cancellation_gets_through_whenever_it_comes(store: StateStore) -> None:
    async def ask() -> None:
        while True:
            await store.ping()
            await asyncio.sleep(0)

    # At each of these moments a command is somewhere else on its way.
    for turns in range(200):
        asking = asyncio.create_task(ask())
        for _ in range(turns % 50 + 3):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait({asking}, timeout=5)
        assert asking.done(), f"cancelled after {turns % 50 + 3} turns of the loop, it goes on"
        assert asking.cancelled()


async def test_a_run_id_is_given_once(store: StateStore) -> None:
    await store.create_run(record("a"))
    with pytest.raises(RunExistsError, match="'a'"):
        await store.create_run(record("a"))


async def test_an_unknown_run_is_named(store: StateStore) -> None:
    with pytest.raises(RunNotFoundError, match="'ghost'"):
        await store.get_run("ghost")
    with pytest.raises(RunNotFoundError, match="'ghost'"):
        await store.update_run("ghost", step=1)


async def test_update_changes_only_the_named_fields(store: StateStore) -> None:
    await store.create_run(record("a"))
    await store.update_run("a", stop_requested=True)
    services = {"actor": {"role": "actor", "address": "127.0.0.1:5", "policy_version": 3}}
    await store.update_run("a", state=RunState.RUNNING, step=2, metrics={"reward/mean": 0.5})
    await store.update_run("a", services=services)
    found = await store.get_run("a")
    assert (found.stop_requested, found.pause_requested) == (True, False)
    assert found.services == services
    assert found.state is RunState.RUNNING
    assert (found.step, found.metrics, found.name) == (2, {"reward/mean": 0.5}, "quick")
    assert found.updated_at > 1.0


async def test_update_refuses_an_unknown_field(store: StateStore) -> None:
    await store.create_run(record("a"))
    with pytest.raises(ValueError, match="colour"):
        await store.update_run("a", colour="red")


async def test_runs_are_listed_newest_first_and_bounded(store: StateStore) -> None:
    for run_id, created_at in (("a", 1.0), ("c", 3.0), ("b", 2.0)):
        await store.create_run(record(run_id, created_at))
    assert [run.run_id for run in await store.list_runs()] == ["c", "b", "a"]
    assert [run.run_id for run in await store.list_runs(limit=2)] == ["c", "b"]


async def test_epochs_rise_by_one_and_belong_to_a_run(store: StateStore) -> None:
    assert [await store.next_epoch("a") for _ in range(3)] == [1, 2, 3]
    assert await store.next_epoch("b") == 1


async def test_stale_epoch_is_refused(store: StateStore) -> None:
    await store.create_run(record("a"))
    old = await store.next_epoch("a")
    new = await store.next_epoch("a")
    with pytest.raises(StaleEpochError) as refused:
        await store.append_journal("a", entry(old, 1))
    assert refused.value.current == new
    with pytest.raises(StaleEpochError):
        await store.update_run("a", epoch=old, step=9)
    assert (await store.get_run("a")).step == 0
    assert await store.read_journal("a") == []


async def test_an_epoch_may_be_asked_for_that_is_newer_than_a_known_one(store: StateStore) -> None:
    assert await store.next_epoch("a", at_least=7) == 7
    assert await store.next_epoch("a", at_least=3) == 8
    assert await store.next_epoch("a") == 9


async def test_of_all_that_lead_a_run_one_alone_gets_the_next_epoch(store: StateStore) -> None:
    led = await store.next_epoch("a")
    asked = (store.next_epoch("a", led=led) for _ in range(8))
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert sorted(map(str, answers))[:1] == [str(led + 1)]
    refused = [answer for answer in answers if isinstance(answer, StaleEpochError)]
    assert [error.current for error in refused] == [led + 1] * 7
    with pytest.raises(JournalLostError):
        await store.next_epoch("a", led=led + 5)
    assert await store.next_epoch("a") == led + 2


async def test_a_store_that_has_lost_the_run_says_so(store: StateStore) -> None:
    await store.create_run(record("a"))
    newest = await store.next_epoch("a")
    lost = newest + 1  # as if the store had given it, and had come back without its data
    for write in (
        store.append_journal("a", entry(lost, 1)),
        store.update_run("a", epoch=lost, step=9),
        store.append_entry("a", RunStream.EVENTS, b"x", epoch=lost),
        store.rewind("a", 0, epoch=lost),
        store.update_run("gone", epoch=1, step=9),
    ):
        with pytest.raises(JournalLostError, match=r"has lost the run .* switch on appendonly"):
            await write
    assert (await store.get_run("a")).step == 0
    assert await store.read_journal("a") == []


async def test_a_rewind_takes_later_steps_back(store: StateStore) -> None:
    old, epoch = await store.next_epoch("a"), await store.next_epoch("a")
    await store.append_metrics("a", {"loss": 0.5})
    metrics, samples = [], []
    for step in range(1, 601):
        metrics.append(await store.append_metrics("a", {"step": float(step)}))
        await store.append_entry("a", RunStream.GRAPHS, b"x", step=step)
        samples.append(
            await store.append_entry("a", RunStream.SAMPLES, b"s%d" % step, epoch, step=step)
        )
    await store.append_entry("a", RunStream.SAMPLES, b"of no step", epoch)
    for step in (597, 598):
        await store.append_entry("a", RunStream.EXPERTS, b"e", epoch, step=step)
    await store.append_entry("a", RunStream.FLOW, b"601", epoch, step=601)
    await store.append_metrics("b", {"step": 600.0})
    await store.append_journal("a", entry(epoch, 600))
    with pytest.raises(StaleEpochError):
        await store.rewind("a", 0, epoch=old)
    assert await store.newest_rewind("a") == ""

    rewound = await store.rewind("a", 597, epoch=epoch)
    assert await store.rewind("a", 597, epoch=epoch) == rewound
    assert await store.newest_rewind("a") == rewound
    read = await store.read_metrics("a")
    assert [found.values.get("step", 0) for found in read] == list(range(598))
    graphs = await store.read_entries("a", RunStream.GRAPHS)
    assert [found.step for found in graphs] == list(range(345, 598))
    kept = await store.read_entries("a", RunStream.SAMPLES)
    assert [found.payload for found in kept] == [b"s%d" % n for n in range(538, 598)] + [
        b"of no step"
    ]
    assert await store.read_entries("a", RunStream.FLOW) == []
    assert [found.step for found in await store.read_entries("a", RunStream.EXPERTS)] == [597]
    assert len(await store.read_metrics("b")) == 1
    assert [(e.operation, e.step, e.epoch) for e in await store.read_journal("a")] == [
        ("actor.update", 600, epoch),
        ("run.rewind", 597, epoch),
    ]

    # A reader whose cursor was taken back goes on with what comes then.
    again = await store.append_metrics("a", {"step": 598.0})
    assert [found.entry_id for found in await store.read_metrics("a", metrics[-1])] == [again]
    await store.append_entry("a", RunStream.GRAPHS, b"y", step=598)
    assert (await store.read_entries("a", RunStream.GRAPHS))[-1].payload == b"y"
    with pytest.raises(EntryExpiredError):
        await store.read_entries("a", RunStream.SAMPLES, samples[-1])


async def test_journal_keeps_order_and_content(store: StateStore) -> None:
    epoch = await store.next_epoch("a")
    for step in range(5):
        await store.append_journal("a", entry(epoch, step))
    read = await store.read_journal("a")
    assert [found.step for found in read] == [0, 1, 2, 3, 4]
    assert read[3].result == {"policy_version": 3}
    assert [found.step for found in await store.read_journal("a", read[2].entry_id)] == [3, 4]


async def test_a_repeated_append_changes_nothing(store: StateStore) -> None:
    epoch = await store.next_epoch("a")
    first = await store.append_journal("a", entry(epoch, 1))
    again = await store.append_journal("a", entry(epoch, 1))
    other = await store.append_journal("a", entry(epoch, 1, "critic.update"))
    assert again == first
    assert other != first
    assert len(await store.read_journal("a")) == 2


async def test_many_appends_at_once_are_all_recorded(store: StateStore) -> None:
    epoch = await store.next_epoch("a")
    await asyncio.gather(*[store.append_journal("a", entry(epoch, step)) for step in range(300)])
    assert {found.step for found in await store.read_journal("a")} == set(range(300))


async def test_metrics_are_read_after_an_id_and_bounded(store: StateStore) -> None:
    ids = [await store.append_metrics("a", {"step": float(step)}) for step in range(4)]
    assert [dict(found.values) for found in await store.read_metrics("a", ids[1])] == [
        {"step": 2.0},
        {"step": 3.0},
    ]
    assert len(await store.read_metrics("a", limit=3)) == 3
    assert await store.read_metrics("b") == []


async def test_graphs_are_read_with_their_steps(store: StateStore) -> None:
    graphs = [b'{"step": 1, "nodes": []}', b"\x00\xff", b"", b"x"]
    ids = [
        await store.append_entry("a", RunStream.GRAPHS, graph, step=step)
        for step, graph in enumerate(graphs, start=1)
    ]
    read = await store.read_entries("a", RunStream.GRAPHS)
    assert [(entry.entry_id, entry.step, entry.payload) for entry in read] == [
        (entry_id, step, graph)
        for step, (entry_id, graph) in enumerate(zip(ids, graphs, strict=True), start=1)
    ]


async def test_entries_of_a_stream_are_read_after_an_id_and_bounded(store: StateStore) -> None:
    for stream in (RunStream.EVENTS, RunStream.DEVICES):
        for number in range(3):
            await store.append_entry("a", stream, f"{stream.value} {number} \x00".encode())
    entries = await store.read_entries("a", RunStream.EVENTS)
    assert [entry.payload for entry in entries] == [b"events 0 \0", b"events 1 \0", b"events 2 \0"]
    after_first = await store.read_entries("a", RunStream.EVENTS, entries[0].entry_id, limit=1)
    assert after_first == entries[1:2]
    assert await store.read_entries("a", RunStream.EVENTS, entries[2].entry_id) == []
    assert await store.read_entries("b", RunStream.EVENTS) == []


@pytest.mark.parametrize("stream", [RunStream.FLOW, RunStream.SAMPLES, RunStream.GRAPHS])
async def test_only_the_newest_entries_of_a_stream_are_kept(
    store: StateStore, stream: RunStream
) -> None:
    num_dropped = 3
    ids = [
        await store.append_entry("a", stream, str(number).encode())
        for number in range(num_dropped + stream.keep)
    ]
    kept = await store.read_entries("a", stream)
    assert [entry.entry_id for entry in kept] == ids[num_dropped:]
    assert [int(entry.payload) for entry in kept] == list(
        range(num_dropped, num_dropped + stream.keep)
    )


async def test_reading_on_after_an_entry_that_was_dropped_is_refused(store: StateStore) -> None:
    dropped = await store.append_entry("a", RunStream.FLOW, b"0")
    kept = await store.append_entry("a", RunStream.FLOW, b"1")
    assert await store.read_entries("a", RunStream.FLOW, kept) == []
    # Neither an id that never was given, nor a text that cannot be one, stands for an entry.
    for absent in (dropped, kept[:-1] + "9", "7", "no-id", "(1-1", "é"):
        with pytest.raises(EntryExpiredError, match="begin anew"):
            await store.read_entries("a", RunStream.FLOW, absent)


async def test_an_entry_of_a_stale_epoch_is_refused_and_a_wish_is_not(store: StateStore) -> None:
    old, new = await store.next_epoch("a"), await store.next_epoch("a")
    with pytest.raises(StaleEpochError) as refused:
        await store.append_entry("a", RunStream.EVENTS, b"late", epoch=old)
    assert refused.value.current == new
    await store.append_entry("a", RunStream.EVENTS, b"mine", epoch=new)
    await store.append_entry("a", RunStream.CHECKPOINT_WISHES, b"wish")
    (event,) = await store.read_entries("a", RunStream.EVENTS)
    assert event.payload == b"mine"


async def test_a_lease_ends_without_renewal(store: StateStore) -> None:
    await store.register_service(ServiceLease(role="actor", address="h:1", pid=7), LEASE_TTL_S)
    await store.register_service(ServiceLease(role="critic", address="h:2", status="ready"), 60)
    await asyncio.sleep(LEASE_WAIT_S)
    for _ in range(2):  # What ended is swept out, and what holds is not.
        (left,) = await store.list_services()
        assert (left.role, left.address, left.status) == ("critic", "h:2", "ready")


async def test_names_of_services_whose_lease_ended_do_not_heap_up() -> None:
    client = FakeAsyncRedis()
    store = RedisStateStore("redis://fake", client=client)
    await store.register_service(ServiceLease(role="actor", address="h:1"), LEASE_TTL_S)
    await store.register_service(ServiceLease(role="critic", address="h:2"), 60)
    await asyncio.sleep(LEASE_WAIT_S)
    await store.list_services()
    assert await client.scard("rolemesh:services") == 1


async def test_a_renewed_lease_holds_and_a_removed_one_does_not(store: StateStore) -> None:
    lease = ServiceLease(role="actor", address="h:1", pid=7)
    first = await store.register_service(lease, LEASE_TTL_S)
    renewed = await store.register_service(lease, 60)
    await asyncio.sleep(LEASE_WAIT_S)
    assert renewed.lease_until > first.lease_until
    assert [found.pid for found in await store.list_services()] == [7]
    await store.remove_service("actor", "h:1")
    await store.remove_service("actor", "h:1")
    assert await store.list_services() == []


async def test_an_older_coordinator_adds_no_metrics_and_no_graph(store: StateStore) -> None:
    await store.create_run(record("a"))
    old, new = await store.next_epoch("a"), await store.next_epoch("a")
    with pytest.raises(StaleEpochError):
        await store.append_metrics("a", {"step": 1.0}, old)
    with pytest.raises(StaleEpochError):
        await store.append_entry("a", RunStream.GRAPHS, b"x", old, step=1)
    await store.append_metrics("a", {"step": 2.0}, new)
    await store.append_entry("a", RunStream.GRAPHS, b"y", new, step=2)
    assert [entry.values for entry in await store.read_metrics("a")] == [{"step": 2.0}]
    assert [graph.step for graph in await store.read_entries("a", RunStream.GRAPHS)] == [2]


def registration(number: int = 0, process: str = "a", **changes: Any) -> Registration:
    fields = {"mesh": "m", "role": "actor", "address": f"{process}:1", "incarnation": process * 32}
    return Registration(number=number, **(fields | changes))


async def places(store: StateStore, mesh: str = "m") -> list[tuple[str, str]]:
    return [(one.place, one.address) for one in await store.registrations(mesh)]


async def test_a_place_is_one_process_s_as_long_as_its_lease_holds(store: StateStore) -> None:
    entered = await store.enter(registration(), 60.0)
    assert entered.incarnation == "a" * 32
    assert (await store.enter(registration(process="b"), 60.0)) == entered
    assert await places(store) == [("actor/0", "a:1")]
    # Its own renewal says more of it, and is another entry.
    renewed = await store.enter(registration(is_leaving=True), 60.0)
    assert renewed.is_leaving
    assert await store.registrations("m") == [renewed]
    assert renewed.lease_until > entered.lease_until


async def test_a_place_is_free_when_its_lease_has_ended(store: StateStore) -> None:
    await store.enter(registration(), LEASE_TTL_S)
    await asyncio.sleep(LEASE_WAIT_S)
    assert await places(store) == []
    await store.enter(registration(process="b"), 60.0)
    assert await places(store) == [("actor/0", "b:1")]


async def test_a_process_frees_its_own_place_alone(store: StateStore) -> None:
    await store.enter(registration(), 60.0)
    await store.take_out(registration(process="b"))
    assert await places(store) == [("actor/0", "a:1")]
    await store.take_out(registration())
    await store.take_out(registration())
    assert await places(store) == []


async def test_places_are_of_a_mesh_a_role_and_a_number(store: StateStore) -> None:
    entered = [
        registration(10, "a"),
        registration(2, "b"),
        registration(0, "c", role="critic"),
        registration(2, "d", mesh="n"),
    ]
    for one in entered:
        assert (await store.enter(one, 60.0)).incarnation == one.incarnation
    assert await places(store) == [("actor/2", "b:1"), ("actor/10", "a:1"), ("critic/0", "c:1")]
    assert await places(store, "n") == [("actor/2", "d:1")]
