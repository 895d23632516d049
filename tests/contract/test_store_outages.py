"""Stores that go away and come back: nothing is lost, nothing is done twice, and waiting ends."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import psutil
import pytest
import redis.asyncio
from support.fake_roles import until
from support.tcp_proxy import TcpProxy

from rolemesh.coordinator.recipe.sections.stores import EmbeddedStoreSpec
from rolemesh.coordinator.state.errors import (
    RunExistsError,
    StoreRefusedError,
    StoreUnavailableError,
)
from rolemesh.coordinator.state.opening import open_store
from rolemesh.coordinator.state.redis import RedisStateStore
from rolemesh.coordinator.state.redis_scripts import REMEMBERED_S
from rolemesh.coordinator.state.server.embedded import EmbeddedValkey
from rolemesh.coordinator.state.store import JournalEntry, RunRecord, RunStream

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
    one = TcpProxy(server.socket)
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
    await store.append_entry("a", RunStream.GRAPHS, b"graph", step=1)
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
    assert len(await store.read_entries("a", RunStream.GRAPHS)) == 1
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
    admin = redis.asyncio.Redis.from_url(server.url)
    store = RedisStateStore(f"unix://me@{server.socket}", password="secret")
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


# --- the embedded server ---


@pytest.mark.slow
async def test_kills_of_the_embedded_server_lose_and_double_nothing(tmp_path: Path) -> None:
    num_entries, num_kills = 1000, 6
    told: list[str] = []
    async with open_store(EmbeddedStoreSpec(), tmp_path, on_restart=told.append) as store:
        epoch = await store.next_epoch("a")
        appended: list[int] = []

        async def append(first: int) -> None:
            # Four writers at a time, so that a kill meets several commands on their way.
            for step in range(first, num_entries, 4):
                await store.append_journal("a", entry(epoch, step))
                await store.append_metrics("a", {"step": float(step)})
                appended.append(step)

        async def kill() -> None:
            for number in range(1, num_kills + 1):
                facts = await store._link.command("INFO", "server")
                await until_there_are(number * num_entries // (num_kills + 1), appended)
                os.kill(facts["process_id"], signal.SIGKILL)
                await until_there_are(number, told)

        await asyncio.gather(*(append(first) for first in range(4)), kill())
        assert await store.next_epoch("a") == epoch + 1
        journal = [found.step for found in await store.read_journal("a")]
        metrics = [
            found.values["step"] for found in await store.read_metrics("a", limit=2 * num_entries)
        ]
    assert sorted(journal) == sorted(metrics) == list(range(num_entries))
    for first in range(4):
        assert journal_of(journal, first) == list(range(first, num_entries, 4))
    assert len(told) == num_kills
    assert all("(signal 9;" in text and "was started again" in text for text in told)


async def until_there_are(number: int, things: Sequence[object]) -> None:
    await until(lambda: len(things) >= number)


def journal_of(journal: list[int], first: int) -> list[int]:
    """What one of the writers appended, in the order of the store."""
    return [step for step in journal if step % 4 == first]


async def test_a_write_that_was_cut_in_the_middle_is_dropped_and_the_rest_is_there(
    tmp_path: Path,
) -> None:
    async with EmbeddedValkey(tmp_path) as server:
        store = RedisStateStore(server.url)
        epoch = await store.next_epoch("a")
        for step in range(10):
            await store.append_journal("a", entry(epoch, step))
        await store.close()
    (file,) = (tmp_path / "appendonlydir").glob("*.incr.aof")
    os.truncate(file, file.stat().st_size - 7)
    async with EmbeddedValkey(tmp_path) as server:
        store = RedisStateStore(server.url)
        assert [found.step for found in await store.read_journal("a")] == list(range(9))
        await store.append_journal("a", entry(epoch, 9))
        assert len(await store.read_journal("a")) == 10
        await store.close()


async def test_a_server_that_ends_all_the_time_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolemesh.coordinator.state.server.embedded.MAX_RESTARTS", 2)
    told: list[str] = []
    async with EmbeddedValkey(tmp_path, on_restart=told.append) as server:
        for number in (1, 2, 3):
            os.kill(server.pid, signal.SIGKILL)
            await until_there_are(number, told)
        with pytest.raises(StoreUnavailableError):
            await RedisStateStore(server.url).ping()
    assert "was started again" in told[1]
    assert "is not started again, since it was 2 times in the last 600 s" in told[2]


async def test_a_stopped_server_stays_stopped(tmp_path: Path) -> None:
    told: list[str] = []
    server = EmbeddedValkey(tmp_path, on_restart=told.append)
    await server.start()
    process = psutil.Process(server.pid)
    await server.stop()
    assert not process.is_running()
    assert told == []
