"""Tokens of a coordinator: made, found by its user, shown on a terminal, and less than all."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from rich.console import Console
from support import warm_processes
from support.coordinator_doors import GIVEN, QUICK, TOKEN, asked, bearer, doors, made_token

from rolemesh.coordinator.api.credentials import TOKEN_FILE
from rolemesh.coordinator.api.doors.known_doors import known_door
from rolemesh.coordinator.commands import train
from rolemesh.coordinator.commands.terminal.console import LiveConsole, LoggingObserver
from rolemesh.coordinator.sdk import AsyncClient, Client, RetryPolicy
from rolemesh.rpc.channel import open_channel
from rolemesh.rpc.errors import ForbiddenError, PreconditionError, UnavailableError
from rolemesh.v1 import coordinator_pb2, coordinator_pb2_grpc


@pytest.fixture(autouse=True)
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this user's coordinators leave notes; no other test's."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "rolemesh"


# --- a token without ceremony -----------------------------------------------------------------


def check_note(notes: Path, token: str) -> None:
    """The one note says where the token is; neither it nor others can be read by another user."""
    (note,) = notes.iterdir()
    assert token not in note.read_text()
    assert (notes.stat().st_mode & 0o777, note.stat().st_mode & 0o777) == (0o700, 0o600)


def left_behind(notes: Path) -> tuple[str, str]:
    """Name and text of the one note."""
    (note,) = notes.iterdir()
    return note.name, note.read_text()


async def test_programs_of_this_user_find_the_token_and_those_of_others_do_not(
    tmp_path: Path, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with doors(tmp_path) as opened:
        assert await asked(opened) == "live"
        port = opened.address.rpartition(":")[2]
        async with AsyncClient(f"localhost:{port}", retry=QUICK) as client:
            assert (await client.get_run("live")).run_id == "live"
            # By the name, another user's server might answer at the other address.
            assert client.address == opened.address
        token = made_token(tmp_path)
        check_note(notes, token)
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "of another user"))
        with pytest.raises(ForbiddenError, match="file api-token of the folder") as refused:
            await asked(opened)
        assert refused.value.reason == "TOKEN_MISSING"
        assert await asked(opened, token=token) == "live"
        assert opened.url is not None
        async with httpx.AsyncClient(base_url=opened.url) as client_of_rest:
            assert (await client_of_rest.get("api/v1/runs")).status_code == 401
            answer = await client_of_rest.post("api/v1/runs/live/stop")
            assert answer.status_code == 401
            right = bearer(token)
            assert (await client_of_rest.get("api/v1/runs", headers=right)).status_code == 200
            # A page that rebinds its name does not get as far as that.
            rebound = {**right, "host": "evil.example"}
            answer = await client_of_rest.get("api/v1/runs", headers=rebound)
            assert answer.json()["reason"] == "HOST_REFUSED"
            elsewhere = {**right, "origin": "http://evil.example"}
            answer = await client_of_rest.post("api/v1/runs/live/stop", headers=elsewhere)
            assert answer.json()["reason"] == "ORIGIN_REFUSED"
    assert os.listdir(notes) == []


async def test_a_client_that_came_before_its_coordinator_finds_the_token(tmp_path: Path) -> None:
    async with doors(tmp_path) as first:
        port = int(first.address.rpartition(":")[2])
    async with AsyncClient(f"127.0.0.1:{port}", retry=RetryPolicy()) as client:
        with pytest.raises(UnavailableError):
            await asked(first)
        async with doors(tmp_path, grpc_port=port):
            assert (await client.get_run("live")).run_id == "live"
        # It has the same token when it comes back.
        async with doors(tmp_path, grpc_port=port):
            assert (await client.get_run("live")).run_id == "live"


async def test_the_note_of_a_dead_coordinator_is_not_followed(tmp_path: Path, notes: Path) -> None:
    async with doors(tmp_path) as opened:
        assert known_door(opened.address) is not None
        name, text = left_behind(notes)
    # Its process was killed, and another user's listens on its port now.
    (notes / name).write_text(text)
    assert known_door(opened.address) is None
    for other in ("127.0.0.1:1", "nowhere", "../../etc/passwd:1", ""):
        assert known_door(other) is None
    # The next one cleans up.
    async with doors(tmp_path) as opened:
        assert len(os.listdir(notes)) == 1


async def test_what_is_told_holds_the_token_for_the_owner_alone(tmp_path: Path) -> None:
    async with doors(tmp_path) as opened:
        token = made_token(tmp_path)
        assert opened.told(to_person=True).startswith(
            f"dashboard and REST: {opened.url}#token={token} - gRPC: {opened.address}"
        )
        told = opened.told(to_person=False)
        assert told.endswith(f"token: {tmp_path / TOKEN_FILE}")
        for text in (told, repr(opened), json.dumps(opened.facts())):
            assert token not in text
        assert opened.facts()["token_file"] == str(tmp_path / TOKEN_FILE)
    async with doors(tmp_path, given=GIVEN) as opened:
        # One that the owner has chosen may be good for more than this.
        assert TOKEN not in opened.told(to_person=True)


async def test_the_doors_are_open_where_the_owner_says_so(tmp_path: Path) -> None:
    async with (
        doors(tmp_path, open_to_every_local_user=True, http_port=None) as opened,
        open_channel(opened.address) as channel,
    ):
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        await stub.StopRun(coordinator_pb2.StopRunRequest(run_id="live"))
    assert not (tmp_path / TOKEN_FILE).exists()


@contextlib.contextmanager
def started(folder: Path, *words: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A command on a terminal, and the line that it prints there."""
    terminal, theirs = pty.openpty()
    # Wide enough for no line to be broken.
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 400, 0, 0))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ROLEMESH_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "rolemesh.coordinator.commands.cli", *words],
        cwd=folder,
        env={**environment, **warm_processes.commands()},
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=subprocess.STDOUT,
    )
    os.close(theirs)
    try:
        with os.fdopen(terminal, "rb", buffering=0) as screen:
            told = b""
            while not told.endswith(b"\n"):
                told += screen.read(1024)
            yield process, told.decode()
    finally:
        process.terminate()
        process.wait(30)


def test_a_terminal_shows_an_address_that_opens_and_no_file_holds_the_token(
    tmp_path: Path,
) -> None:
    words = ("coordinator", "--data", "data", "--port", "0", "--http-port", "0")
    with started(tmp_path, *words) as (process, told):
        found = re.search(r"dashboard and REST: (http://\S+/)#token=(\S+) - gRPC: (\S+)", told)
        assert found is not None, told
        url, token, address = found.groups()
        right = bearer(token)
        assert httpx.get(f"{url}api/v1/runs").status_code == 401
        assert httpx.get(f"{url}api/v1/runs", headers=right).status_code == 200
        with Client(address, retry=QUICK) as client:
            assert len(client.list_runs()) == 0
        assert token not in " ".join(psutil.Process(process.pid).cmdline())
        assert token.encode() not in Path(f"/proc/{process.pid}/environ").read_bytes()
    holders = [
        path
        for path in tmp_path.rglob("*")
        if path.is_file() and token.encode() in path.read_bytes()
    ]
    assert holders == [tmp_path / "data" / TOKEN_FILE]


@pytest.mark.parametrize("is_terminal", [True, False])
async def test_a_run_shows_its_token_on_a_terminal_and_never_in_its_log(
    is_terminal: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    screen = io.StringIO()
    # As where FORCE_COLOR is set: what rich takes for a terminal may be a file.
    console = Console(file=screen, force_terminal=True, width=400)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)
    shown = LiveConsole(console)
    caplog.set_level("INFO")
    async with doors(tmp_path) as opened:
        train.tell_doors(shown, LoggingObserver(shown), opened)
    shown.close()
    token = made_token(tmp_path)
    assert (f"#token={token}" in screen.getvalue()) is is_terminal
    assert str(opened.url) in screen.getvalue()
    assert token not in caplog.text
    assert f"token: {tmp_path / TOKEN_FILE}" in caplog.text


# --- scopes -----------------------------------------------------------------------------------


async def test_a_client_gets_no_further_than_its_token(tmp_path: Path) -> None:
    files = {scope: tmp_path / scope for scope in ("read", "drive")}
    for scope, file in files.items():
        file.write_text(f"may-{scope}")
    async with doors(tmp_path, given=GIVEN, tokens=files) as opened:
        async with AsyncClient(opened.address, token="may-read", retry=QUICK) as reader:
            assert (await reader.get_run("live")).run_id == "live"
            with pytest.raises(ForbiddenError, match="StopRun is not for client/read") as refused:
                await reader.stop_run("live")
            assert refused.value.reason == "CALLER_DENIED"
            with pytest.raises(ForbiddenError, match="AttachRun is not for client/read"):
                await reader.attach("live")
        async with AsyncClient(opened.address, token="may-drive", retry=QUICK) as driver:
            await driver.pause_run("live")
            with pytest.raises(ForbiddenError, match="needs the scope admin"):
                await driver.create_run({"run": {}})
            # What it has paused, it may let go on. To start a run again is more.
            await driver.resume_run("live")
            with pytest.raises(ForbiddenError, match="to start run 'live' again is not for"):
                await driver.resume_run("live", overrides=["run.steps=4"])
            # Past the door: the run is no external one.
            with pytest.raises(PreconditionError, match="whose steps its coordinator makes"):
                await driver.attach("live")
        async with AsyncClient(opened.address, token=TOKEN, retry=QUICK) as admin:
            await admin.resume_run("live")
            with pytest.raises(PreconditionError, match="this coordinator makes one run alone"):
                await admin.resume_run("live", overrides=["run.steps=4"])


async def test_what_a_driver_has_sent_is_worth_nothing_once_another_one_drives(
    tmp_path: Path,
) -> None:
    files = {scope: tmp_path / scope for scope in ("read", "drive")}
    for scope, file in files.items():
        file.write_text(f"may-{scope}")
    async with (
        doors(tmp_path, given=GIVEN, tokens=files, is_external=True) as opened,
        open_channel(opened.address) as channel,
    ):
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)

        async def send(method: str, request: Any, token: str) -> Any:
            return await getattr(stub, method)(request, metadata=tuple(bearer(token).items()))

        attach = coordinator_pb2.AttachRunRequest(run_id="live")
        first = (await send("AttachRun", attach, "may-drive")).fencing_epoch
        logged = coordinator_pb2.LogStepRequest(
            run_id="live", fencing_epoch=first, step=1, metrics={"reward/mean": 0.25}
        )
        await send("LogStep", logged, "may-drive")
        # Who has read it on its way cannot send it with less than that right.
        for token, reason in (("may-read", "CALLER_DENIED"), ("may-nothing", "TOKEN_INVALID")):
            with pytest.raises(ForbiddenError) as refused:
                await send("LogStep", logged, token)
            assert refused.value.reason == reason
        second = (await send("AttachRun", attach, TOKEN)).fencing_epoch
        assert second > first
        # Sent again as it is, it changes nothing; under that epoch nothing new can be sent.
        await send("LogStep", logged, "may-drive")
        logged.step = 2
        for epoch in (first, 2**62):
            logged.fencing_epoch = epoch
            with pytest.raises(PreconditionError) as stale:
                await send("LogStep", logged, "may-drive")
            assert stale.value.reason == "STALE_EPOCH"
        logged.fencing_epoch = second
        await send("LogStep", logged, "may-drive")
