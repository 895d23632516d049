"""Stores that go away and come back: nothing is lost, nothing is done twice, and waiting ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio
from support.tcp_proxy import TcpProxy

from rolemesh.coordinator.state.embedded import EmbeddedValkey
from rolemesh.coordinator.state.redis import RedisStateStore
from rolemesh.coordinator.state.redis_scripts import REMEMBERED_S
from rolemesh.coordinator.state.store import (
    JournalEntry,
    RunExistsError,
    RunRecord,
    RunStream,
    StoreRefusedError,
    StoreUnavailableError,
)

RECORD = RunRecord(
    run_id="a", name="quick", num_steps=3, directory="/tmp/run", created_at=1.0, updated_at=1.0
)


def entry(epoch: int, step: int) -> JournalEntry:
    return JournalEntry(epoch=epoch, step=step, operation="actor.update", sequence=0, result={})


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedValkey]:
    async with EmbeddedValkey(tmp_path / "store") as started:
        yield started


@pytest.fixture
async def proxy(server: EmbeddedValkey) -> AsyncIterator[TcpProxy]:
    one = TcpProxy(int(server.url.split(":")[2].partition("/")[0]))
    await one.start()
    yield one
    await one.cut()


@pytest.fixture
async def store(proxy: TcpProxy) -> AsyncIterator[RedisStateStore]:
    opened = RedisStateStore(f"redis://{proxy.address}/0")
    await opened.ping()
    yield opened
    await opened.close()


async def test_what_was_done_though_its_answer_was_lost_is_done_once(
    store: RedisStateStore, proxy: TcpProxy
) -> None:
    proxy.answers_to_lose = 2
    await store.create_run(RECORD)
    proxy.answers_to_lose = 2
    assert await store.next_epoch("a") == 1
    assert await store.next_epoch("a") == 2
    proxy.answers_to_lose = 2
    await store.append_metrics("a", {"step": 1.0})
    proxy.answers_to_lose = 2
    await store.append_graph("a", 1, b"graph")
    proxy.answers_to_lose = 2
    await store.append_entry("a", RunStream.EVENTS, b"event", 2)
    proxy.answers_to_lose = 2
    await store.append_journal("a", entry(2, 1))
    proxy.answers_to_lose = 2
    await store.update_run("a", epoch=2, step=1)
    proxy.answers_to_lose = 2
    await store.rewind("a", 1, epoch=2)
    assert proxy.answers_to_lose == 0

    with pytest.raises(RunExistsError):
        await store.create_run(RECORD)
    assert (await store.get_run("a")).step == 1
    assert len(await store.read_metrics("a")) == 1
    assert len(await store.read_graphs("a")) == 1
    assert len(await store.read_entries("a", RunStream.EVENTS)) == 1
    assert [found.operation for found in await store.read_journal("a")] == [
        "actor.update",
        "run.rewind",
    ]


async def test_what_is_remembered_of_requests_is_forgotten(
    store: RedisStateStore, server: EmbeddedValkey
) -> None:
    await store.append_metrics("a", {"step": 1.0})
    client = redis.asyncio.Redis.from_url(server.url)
    (key,) = await client.keys("*request*")
    assert 0 < await client.ttl(key) <= REMEMBERED_S
    await client.aclose()
    with pytest.raises(ValueError, match="outage_s is 301"):
        RedisStateStore("redis://127.0.0.1:1/0", outage_s=301)


async def test_commands_wait_for_the_store_and_reach_it_in_their_order(
    store: RedisStateStore, proxy: TcpProxy
) -> None:
    epoch = await store.next_epoch("a")
    await proxy.cut()
    waiting = []
    for step in range(50):
        waiting.append(asyncio.create_task(store.append_journal("a", entry(epoch, step))))
        await asyncio.sleep(0.01)
    assert not any(one.done() for one in waiting)
    await proxy.start()
    later = [asyncio.create_task(store.append_journal("a", entry(epoch, 50)))]
    await asyncio.gather(*waiting, *later)
    assert [found.step for found in await store.read_journal("a")] == list(range(51))


async def test_a_command_that_waits_for_the_store_can_be_cancelled(
    store: RedisStateStore, proxy: TcpProxy
) -> None:
    await proxy.cut()
    waiting = [asyncio.create_task(store.get_run("a")) for _ in range(3)]
    await asyncio.sleep(0.1)
    for one in waiting:
        one.cancel()
    await asyncio.wait(waiting, timeout=5)
    assert all(one.cancelled() for one in waiting)
    await proxy.start()
    assert await store.next_epoch("a") == 1


async def test_waiting_ends_and_the_error_says_for_how_long(
    server: EmbeddedValkey, proxy: TcpProxy
) -> None:
    store = RedisStateStore(f"redis://{proxy.address}/0", outage_s=0.5)
    await store.ping()
    await proxy.cut()
    began = time.monotonic()
    answers = await asyncio.gather(
        *(store.next_epoch("a") for _ in range(20)), return_exceptions=True
    )
    assert time.monotonic() - began >= 0.5
    for answer in answers:
        assert isinstance(answer, StoreUnavailableError)
        assert ", tried for " in str(answer)
    with pytest.raises(StoreUnavailableError) as refused:
        await store.ping()
    assert ", tried for " not in str(refused.value)
    await store.close()


async def test_a_server_that_is_loading_is_waited_for(server: EmbeddedValkey) -> None:
    store = RedisStateStore(server.url)
    await store.ping()
    send, num_refused = store._link._client.execute_command, 0

    async def loading(*arguments: object) -> object:
        nonlocal num_refused
        if num_refused < 3:
            num_refused += 1
            raise redis.exceptions.BusyLoadingError("Valkey is loading the dataset in memory")
        return await send(*arguments)

    store._link._client.execute_command = loading  # type: ignore[method-assign,assignment]
    assert await store.next_epoch("a") == 1
    assert num_refused == 3
    await store.close()


async def test_a_refusal_is_not_repeated(server: EmbeddedValkey) -> None:
    port = server.url.split(":")[2].partition("/")[0]
    admin = redis.asyncio.Redis.from_url(server.url)
    store = RedisStateStore(f"redis://me:secret@127.0.0.1:{port}/0")
    await admin.execute_command("ACL", "SETUSER", "me", "on", ">secret", "~*", "+@all")
    await store.ping()
    await admin.execute_command("ACL", "SETUSER", "me", "-eval")
    with pytest.raises(StoreRefusedError, match="NoPermission"):
        await store.next_epoch("a")
    await admin.execute_command("ACL", "SETUSER", "me", "resetpass", ">other")
    await admin.execute_command("CLIENT", "KILL", "USER", "me")
    with pytest.raises(StoreRefusedError, match="AuthenticationError") as refused:
        await store.get_run("a")
    assert "secret" not in str(refused.value)
    await store.close()
    await admin.aclose()
