"""Servers of state stores: how they are opened, what outlives a kill, and what a refusal tells."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path

import psutil
import pytest
from support.run_records import entry, record

from rolemesh.coordinator.recipe.stores import EmbeddedStoreSpec, MemoryStoreSpec, RedisStoreSpec
from rolemesh.coordinator.state.embedded import EmbeddedValkey
from rolemesh.coordinator.state.errors import StoreUnavailableError
from rolemesh.coordinator.state.opening import open_store
from rolemesh.coordinator.state.redis import RedisStateStore
from rolemesh.coordinator.state.store import RunStream


async def test_an_unreachable_store_is_named_with_a_remedy() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{probe.getsockname()[1]}/0"
    store = RedisStateStore(url)
    with pytest.raises(StoreUnavailableError) as refused:
        await store.next_epoch("a")
    assert url in str(refused.value)
    assert "store.type=embedded" in str(refused.value)
    await store.close()


async def test_acknowledged_writes_survive_kill_of_the_embedded_server(tmp_path: Path) -> None:
    async with EmbeddedValkey(tmp_path / "store") as server:
        store = RedisStateStore(server.url)
        epoch = await store.next_epoch("a")
        await store.append_journal("a", entry(epoch, 1))
        os.kill(server.pid, signal.SIGKILL)
        await store.close()
    async with EmbeddedValkey(tmp_path / "store") as server:
        store = RedisStateStore(server.url)
        assert [found.step for found in await store.read_journal("a")] == [1]
        assert await store.next_epoch("a") == epoch + 1
        await store.close()


@pytest.mark.skipif(sys.platform != "linux", reason="parent-death signals are a Linux feature")
def test_the_embedded_server_ends_with_its_parent(tmp_path: Path) -> None:
    program = (
        "import asyncio, os, pathlib, sys\n"
        "from rolemesh.coordinator.state.embedded import EmbeddedValkey\n"
        "async def main():\n"
        "    server = EmbeddedValkey(pathlib.Path(sys.argv[1]))\n"
        "    await server.start()\n"
        "    print(server.pid, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "store")], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        server = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    psutil.wait_procs([server], timeout=30)
    assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE


async def test_the_recipe_opens_each_kind_of_store(tmp_path: Path) -> None:
    specs = [MemoryStoreSpec(), EmbeddedStoreSpec()]
    for spec in specs:
        async with open_store(spec, tmp_path) as opened:
            assert await opened.next_epoch("a") == 1
    assert (tmp_path / "store" / "appendonlydir").is_dir()


async def test_opening_an_unreachable_store_is_refused_at_once(tmp_path: Path) -> None:
    spec = RedisStoreSpec(url="redis://127.0.0.1:1/0")
    with pytest.raises(StoreUnavailableError, match=r"redis://127\.0\.0\.1:1/0"):
        async with open_store(spec, tmp_path):
            pass


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h:x/0", "redis://h:x/0"),
        ("redis://user:secret@h:99999/0", "redis://***@h:99999/0"),
        ("redis://:sec/ret@h:1/0", "redis://***@h:1/0"),
        ("redis://:sec?ret@h:x/0", "redis://***"),
        ("redis://h:x/0?password=secret", "redis://h:x/0?***"),
        ("redis://127.0.0.1:PORT/0?colour=secret", "redis://127.0.0.1:PORT/0?***"),
        ("redis://user:secret@127.0.0.1:PORT/99", "redis://***@127.0.0.1:PORT/99"),
    ],
)
async def test_a_url_that_cannot_be_used_is_refused_without_its_password(
    tmp_path: Path, url: str, shown: str
) -> None:
    async with EmbeddedValkey(tmp_path) as server:
        port = server.url.split(":")[2].partition("/")[0]
        url, shown = (text.replace("PORT", port) for text in (url, shown))
        with pytest.raises((ValueError, StoreUnavailableError)) as refused:
            async with open_store(RedisStoreSpec(url=url), tmp_path):
                pass
    assert shown in str(refused.value)
    told = "".join(traceback.format_exception(refused.value))
    assert not any(part in told for part in ("secret", "sec/", "sec?", "ret@"))


async def test_an_unreachable_store_is_told_without_its_password(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailableError) as refused:
        async with open_store(RedisStoreSpec(url="redis://me:secret@127.0.0.1:1/0"), tmp_path):
            pass
    assert "redis://***@127.0.0.1:1/0" in str(refused.value)
    # The coordinator's own service hands it on as metadata.
    assert refused.value.url == "redis://***@127.0.0.1:1/0"


async def test_a_store_without_memory_refuses_as_a_store_and_keeps_the_rest(tmp_path: Path) -> None:
    async with EmbeddedValkey(tmp_path / "store") as server:
        store = RedisStateStore(server.url)
        for run_id in ("removed", "kept"):
            await store.create_run(record(run_id))
        await store._link.command("DEL", "rolemesh:{removed}:run")
        assert [run.run_id for run in await store.list_runs()] == ["kept"]
        await store._link.command("CONFIG", "SET", "maxmemory", "1")
        with pytest.raises(StoreUnavailableError, match=r"refuses a command \(OutOfMemoryError"):
            await store.append_metrics("kept", {"loss": 1.0})
        with pytest.raises(StoreUnavailableError, match=r"refuses a command \(OutOfMemoryError"):
            await store.append_entry("kept", RunStream.EVENTS, b"x")
        assert (await store.get_run("kept")).run_id == "kept"
        await store.close()
