"""Servers of state stores: how they are opened, what outlives a kill, and what a refusal tells."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import psutil
import pytest
from pydantic import ValidationError
from redis.asyncio import Redis
from support.run_records import entry, record

from rolemesh.coordinator.recipe.sections.stores import (
    EmbeddedStoreSpec,
    MemoryStoreSpec,
    RedisStoreSpec,
)
from rolemesh.coordinator.state.errors import StoreUnavailableError
from rolemesh.coordinator.state.opening import open_store
from rolemesh.coordinator.state.redis import RedisStateStore
from rolemesh.coordinator.state.server.embedded import EmbeddedValkey
from rolemesh.coordinator.state.server.socket_folder import SocketFolder
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
        "from rolemesh.coordinator.state.server.embedded import EmbeddedValkey\n"
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
        ("redis://user@h:99999/0", "redis://***@h:99999/0"),
        ("unix://SOCKET?colour=s3cret", "unix://SOCKET?***"),
        ("unix://user@SOCKET?db=99", "unix://***@SOCKET?***"),
    ],
)
async def test_a_url_that_cannot_be_used_is_refused_without_its_user_and_parameters(
    tmp_path: Path, url: str, shown: str
) -> None:
    async with EmbeddedValkey(tmp_path) as server:
        url, shown = (text.replace("SOCKET", str(server.socket)) for text in (url, shown))
        with pytest.raises((ValueError, StoreUnavailableError)) as refused:
            async with open_store(RedisStoreSpec(url=url), tmp_path):
                pass
    assert shown in str(refused.value)
    told = "".join(traceback.format_exception(refused.value))
    assert not any(part in told for part in ("s3cret", "user@"))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:s3cret@h:1/0", "redis://***@h:1/0"),
        ("redis://:sec/ret@h:1/0", "redis://***@h:1/0"),
        ("redis://:sec?ret@h:x/0", "redis://***"),
        ("redis://h:1/0?password=s3cret", "redis://h:1/0?***"),
        ("unix://:s3cret@/tmp/s", "unix://***@/tmp/s"),
    ],
)
def test_a_url_with_a_password_is_refused_with_a_remedy_and_without_it(
    url: str, shown: str
) -> None:
    with pytest.raises(ValidationError) as refused:
        RedisStoreSpec(url=url)
    told = "".join(traceback.format_exception(refused.value))
    assert repr(shown) in told
    assert "password_file" in told
    assert not any(part in told for part in ("s3cret", "sec/", "sec?", "ret@"))


async def test_the_password_of_a_store_is_that_of_its_file(tmp_path: Path) -> None:
    file = tmp_path / "password"
    async with EmbeddedValkey(tmp_path / "store") as server:
        admin = Redis.from_url(server.url)
        await admin.execute_command("ACL", "SETUSER", "me", "on", ">s3cret", "~*", "+@all")
        await admin.execute_command("CONFIG", "SET", "requirepass", "other")
        await admin.aclose()
        mine = RedisStoreSpec(url=f"unix://me@{server.socket}", password_file=file)
        plain = RedisStoreSpec(url=f"unix://{server.socket}", password_file=file)
        for spec, password in ((mine, "s3cret"), (plain, "other")):
            file.write_text(f"{password}\n")
            async with open_store(spec, tmp_path) as opened:
                assert isinstance(await opened.next_epoch("a"), int)
        file.write_text("wr0ng")
        for spec, named in (
            (mine, "AuthenticationError"),
            (RedisStoreSpec(url=plain.url), "password_file"),
            (RedisStoreSpec(url=plain.url, password_file=tmp_path / "absent"), "absent"),
        ):
            with pytest.raises(ValueError, match=named) as refused:
                async with open_store(spec, tmp_path):
                    pass
            assert "wr0ng" not in "".join(traceback.format_exception(refused.value))


async def test_only_this_user_reaches_the_embedded_server_and_by_no_port(tmp_path: Path) -> None:
    async with EmbeddedValkey(tmp_path / "store") as server:
        socket_path, process = server.socket, psutil.Process(server.pid)
        assert stat.S_IMODE(socket_path.stat().st_mode) == 0o600
        assert stat.S_IMODE(socket_path.parent.stat().st_mode) == 0o700
        assert len(os.fsencode(socket_path)) <= 107
        assert process.net_connections("inet") == []
    assert not socket_path.parent.exists()


def test_the_folder_of_a_killed_process_is_removed_and_that_of_a_live_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = (
        "import os, signal, tempfile\n"
        f"tempfile.tempdir = {str(tmp_path)!r}\n"
        "from rolemesh.coordinator.state.server.socket_folder import SocketFolder\n"
        "print(SocketFolder().path, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    left = Path(done.stdout.strip())
    live = SocketFolder()
    # One that is just being made has no lock yet.
    assert left.is_dir()
    for folder in (left, live.path):
        os.utime(folder, (0, 0))
    SocketFolder().remove()
    assert not left.exists()
    assert live.path.is_dir()
    live.remove()
    assert not live.path.exists()


def test_a_long_folder_for_temporary_files_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    folder = SocketFolder()
    assert folder.path.parent == Path("/tmp")
    folder.remove()


async def test_an_unreachable_store_is_told_without_its_user(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailableError) as refused:
        async with open_store(RedisStoreSpec(url="redis://me@127.0.0.1:1/0"), tmp_path):
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
