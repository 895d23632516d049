"""A service as a process of its own: signals, parents, crashes, what is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message
from support import warm_processes
from support.services import (
    ServiceProcess,
    operation_key,
    segments_of,
    service_command,
    spawn_service,
    wait_for_announcement,
)

from rolemesh.rpc.channel import MeshChannel, open_channel
from rolemesh.rpc.errors import InternalError, UnavailableError
from rolemesh.rpc.experience import payload_stream
from rolemesh.services.runtime.experience.fetch import fetch_rows
from rolemesh.v1 import experience_pb2, value_pb2, value_pb2_grpc, worker_pb2, worker_pb2_grpc

END_TIMEOUT_S = 30.0
"""A process that ends cleanly is gone long before; the machine may be busy."""


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    started = spawn_service(tmp_path)
    yield started
    started.end()


async def initialize(channel: MeshChannel, **spec: Any) -> None:
    # A new process on a busy machine may drop the first handshake.
    await channel.channel_ready()
    request = worker_pb2.InitializeRequest(key=operation_key("initialize"))
    request.spec.update(spec)
    async for _ in worker_pb2_grpc.WorkerServiceStub(channel).Initialize(request):
        pass


async def produce(channel: MeshChannel) -> experience_pb2.ExperienceRef:
    message = None
    async for message in value_pb2_grpc.ValueServiceStub(channel).ComputeValues(  # noqa: B007
        value_pb2.ComputeValuesRequest(key=operation_key())
    ):
        pass
    assert message is not None
    reference: experience_pb2.ExperienceRef = message.result.experience
    return reference


async def test_sigterm_drains_exits_0_and_leaves_no_shared_memory(
    service: ServiceProcess, tmp_path: Path
) -> None:
    async with open_channel(service.address) as channel:
        await initialize(channel, num_rows=2000)
        await produce(channel)
    assert len(segments_of(service.pid)) == 1
    service.process.send_signal(signal.SIGTERM)
    assert service.process.wait(END_TIMEOUT_S) == 0
    assert segments_of(service.pid) == []
    assert not (tmp_path / "announce.json").exists()
    assert "INFO toy[0] " in service.log.read_text()


async def test_sigterm_lets_the_call_in_progress_finish(service: ServiceProcess) -> None:
    async with open_channel(service.address) as channel:
        await initialize(channel, behaviour="slow", seconds=1.0)
        running = asyncio.create_task(produce(channel))
        await asyncio.sleep(0.3)
        service.process.send_signal(signal.SIGTERM)
        assert (await running).num_rows == 4
    assert service.process.wait(END_TIMEOUT_S) == 0


async def test_drain_with_exit_ends_the_process(service: ServiceProcess) -> None:
    async with open_channel(service.address) as channel:
        await worker_pb2_grpc.WorkerServiceStub(channel).Drain(worker_pb2.DrainRequest(exit=True))
    assert service.process.wait(END_TIMEOUT_S) == 0


async def test_a_role_that_raises_shows_the_root_cause_here_and_the_traceback_in_its_log(
    service: ServiceProcess,
) -> None:
    async with open_channel(service.address) as channel:
        await initialize(channel, behaviour="raise")
        with pytest.raises(InternalError, match="RuntimeError: the model is broken") as caught:
            await produce(channel)
    log = service.log.read_text()
    assert "Traceback (most recent call last)" in log
    assert "ZeroDivisionError: division by zero" in log
    assert caught.value.request_id is not None
    assert caught.value.request_id in log


async def test_a_producer_killed_in_the_middle_of_a_fetch_is_named(
    service: ServiceProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = payload_stream.decode_part
    num_chunks = 0

    def kill_at_first_chunk(message: bytes, stream: type[Message]) -> Any:
        nonlocal num_chunks
        num_chunks += 1
        if num_chunks == 1:
            service.end()
        return decode(message, stream)

    # The header is read by `pull`, which has its own name for the function.
    monkeypatch.setattr(payload_stream, "decode_part", kill_at_first_chunk)
    async with open_channel(service.address) as channel:
        await initialize(channel, num_rows=60_000)
        reference = await produce(channel)
        shard = reference.groups[0].shards[0]
        names = [column.name for column in reference.groups[0].columns]
        # Far more than what gRPC buffers on the way, so that the kill is in the middle.
        assert shard.num_bytes > 20 << 20
        with pytest.raises(UnavailableError) as caught:
            await fetch_rows(channel, shard, names, range(60_000), host_id="")
    assert num_chunks >= 1
    assert f"toy rank 0 at {service.address}" in caught.value.message
    assert caught.value.metadata["peer_role"] == "toy"


async def test_shared_memory_of_a_killed_service_is_removed_by_the_next_one(
    service: ServiceProcess, tmp_path: Path
) -> None:
    async with open_channel(service.address) as channel:
        await initialize(channel, num_rows=2000)
        await produce(channel)
    assert len(segments_of(service.pid)) == 1
    service.end()
    following = spawn_service(tmp_path)
    try:
        # Its log may lack the name: a service of another test may have come first.
        assert segments_of(service.pid) == []
    finally:
        following.end()


def ended(*flags: str) -> subprocess.CompletedProcess[str]:
    """A service that does not come to serve, from the warm process."""
    return subprocess.run(
        service_command(*flags),
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **warm_processes.services()},
    )


def test_a_port_in_use_ends_the_process_with_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        service = ended("--port", str(port))
    assert service.returncode == 1
    assert f"port {port} on 127.0.0.1 is in use" in service.stderr
    assert "Traceback" not in service.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--host", "0.0.0.0"], "host is '0.0.0.0', which others can reach"),
        (["--port", "70000"], "port is '70000'"),
        (["--parent-pid", "0"], "parent_pid is '0'"),
    ],
    ids=["remote-host", "port", "parent-pid"],
)
def test_wrong_settings_end_the_process_with_code_2(flags: list[str], message: str) -> None:
    service = ended(*flags)
    assert service.returncode == 2
    assert message in service.stderr


def test_a_service_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    announce = tmp_path / "announce.json"
    command = service_command("--announce", str(announce), "--log-directory", str(tmp_path))
    parent_program = textwrap.dedent("""
        import os, subprocess, sys, time
        subprocess.Popen([*sys.argv[1:], "--parent-pid", str(os.getpid())])
        time.sleep(600)
    """)
    parent = subprocess.Popen(
        [sys.executable, "-c", parent_program, *command], stderr=subprocess.DEVNULL
    )
    try:
        pid = wait_for_announcement(parent, announce)["pid"]
    finally:
        parent.kill()
        parent.wait(END_TIMEOUT_S)
    deadline = time.monotonic() + END_TIMEOUT_S
    while is_running(pid):
        assert time.monotonic() < deadline, "the service outlived its parent"
        time.sleep(0.05)
    assert "is gone: the service ends" in (tmp_path / "toy.log").read_text()


def test_logs_are_json_when_asked_for(tmp_path: Path) -> None:
    service = spawn_service(tmp_path, "--log-format", "json")
    service.process.send_signal(signal.SIGTERM)
    assert service.process.wait(END_TIMEOUT_S) == 0
    entries = [json.loads(line) for line in service.log.read_text().splitlines()]
    assert {entry["role"] for entry in entries} == {"toy"}
    assert {entry["rank"] for entry in entries} == {0}
    assert any(entry["message"].startswith("serving toy at 127.0.0.1:") for entry in entries)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # An orphan whose new parent does not reap it is a zombie: ended all the same.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
