"""Tests of faults around a service of several ranks."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support import warm_processes
from support.service_calls import initialize, last
from support.services import (
    SETTLE_VARIABLE,
    START_TIMEOUT_S,
    ServiceProcess,
    ToyRole,
    make_experience,
    operation_key,
    service_command,
    serving,
    spawn_service,
)

from rolemesh.rpc.channel import MeshChannel, open_channel
from rolemesh.rpc.errors import (
    DeadlineError,
    InternalError,
    NotFoundError,
    UnavailableError,
)
from rolemesh.services.runtime.experience.fetch import fetch_rows
from rolemesh.services.runtime.server.config import ServiceConfig
from rolemesh.services.runtime.service_server import ServiceServer
from rolemesh.v1 import (
    experience_pb2,
    experience_pb2_grpc,
    value_pb2,
    value_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

LAYOUT = {"dp": 2}
"""Two ranks, each with rows of its own."""

END_S = 30.0
"""Within this a service has ended: a rank that hangs is given 10 s, and the machine may be busy."""


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Any]:
    started: list[tuple[ServiceProcess, list[psutil.Process]]] = []

    def begin() -> ServiceProcess:
        service = spawn_service(tmp_path, "--layout", "dp=2")
        started.append((service, psutil.Process(service.pid).children()))
        return service

    yield begin
    for service, ranks in started:
        service.end()
        for rank in ranks:
            if rank.is_running():
                rank.kill()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """Outlives every test that uses it: none of their faults is its own."""
    started = spawn_service(tmp_path_factory.mktemp("ranks"), "--layout", "dp=2")
    yield started
    started.process.send_signal(signal.SIGTERM)
    assert started.process.wait(END_S) == 0


def compute(
    channel: MeshChannel,
    ref: experience_pb2.ExperienceRef | None = None,
    timeout: float | None = None,
    **key: Any,
) -> Any:
    request = value_pb2.ComputeValuesRequest(key=operation_key(**key), experience=ref)
    return last(value_pb2_grpc.ValueServiceStub(channel).ComputeValues(request, timeout=timeout))


async def status_of(channel: MeshChannel) -> worker_pb2.GetStatusResponse:
    answer: worker_pb2.GetStatusResponse = await worker_pb2_grpc.WorkerServiceStub(
        channel
    ).GetStatus(worker_pb2.GetStatusRequest())
    return answer


async def until_state(channel: MeshChannel, state: worker_pb2.WorkerState.ValueType) -> None:
    async with asyncio.timeout(END_S):
        while (await status_of(channel)).state != state:  # noqa: ASYNC110 - asked from outside
            await asyncio.sleep(0.05)


def unused_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


# --- experience ---------------------------------------------------------------------------


async def test_a_release_at_the_face_frees_what_every_rank_holds(service: ServiceProcess) -> None:
    async with open_channel(service.address) as channel:
        await initialize(channel, layout=LAYOUT, epoch=2, num_rows=6)
        result = await compute(channel, epoch=2)
        shards = result.experience.groups[0].shards
        assert {shard.rank for shard in shards} == {0, 1}
        answer = await experience_pb2_grpc.ExperienceServiceStub(channel).Release(
            experience_pb2.ReleaseRequest(run_id="run", through_step=0, fencing_epoch=2)
        )
        assert answer.released_bytes == sum(shard.num_bytes for shard in shards)
        for shard in shards:
            async with open_channel(shard.address) as rank:
                with pytest.raises(NotFoundError, match="was released"):
                    await fetch_rows(rank, shard, ["tokens"], range(1), "")


async def test_a_producer_that_is_gone_fails_the_call_and_not_the_service(
    service: ServiceProcess,
) -> None:
    async with serving() as producer, open_channel(service.address) as channel:
        await initialize(channel, layout=LAYOUT, epoch=3)
        ref = producer.runtime.publish(operation_key(), make_experience(8))
        lost = experience_pb2.ExperienceRef()
        lost.CopyFrom(ref)
        lost.groups[0].shards[0].address = f"127.0.0.1:{unused_port()}"
        with pytest.raises(UnavailableError, match=r"toy rank 0 at .* does not answer"):
            await compute(channel, lost, epoch=3)
        # Longer than a service stays that has decided to end.
        await asyncio.sleep(1.5)
        assert (await compute(channel, ref, epoch=3, sequence=1)).experience.num_rows == 8


# --- deadlines and hand-over ----------------------------------------------------------------


async def test_work_outlives_a_caller_whose_deadline_has_passed(service: ServiceProcess) -> None:
    async with open_channel(service.address) as channel:
        await initialize(channel, layout=LAYOUT, epoch=4, behaviour="slow", seconds=3)
        with pytest.raises(DeadlineError):
            await compute(channel, timeout=1, epoch=4)
        started = time.monotonic()
        result = await compute(channel, epoch=4)
        assert result.experience.num_rows == 4
        assert time.monotonic() - started < 3, "the repeat found the work of the first call"


async def test_a_call_whose_turn_comes_after_its_deadline_does_no_harm(
    service: ServiceProcess,
) -> None:
    async with serving() as producer, open_channel(service.address) as channel:
        await initialize(channel, layout=LAYOUT, epoch=5, behaviour="slow", seconds=1.5)
        ref = producer.runtime.publish(operation_key(), make_experience(8))
        first = asyncio.create_task(compute(channel, epoch=5))
        await until_state(channel, worker_pb2.WORKER_STATE_BUSY)
        with pytest.raises(DeadlineError):
            await compute(channel, ref, timeout=0.5, epoch=5, sequence=1)
        assert (await first).experience.num_rows == 4
        assert (await compute(channel, ref, epoch=5, sequence=1)).experience.num_rows == 8


async def test_a_drain_gives_up_the_work_of_all_ranks(service: ServiceProcess) -> None:
    async with open_channel(service.address) as channel:
        await initialize(channel, layout=LAYOUT, epoch=6, behaviour="slow", seconds=60)
        work = asyncio.create_task(compute(channel, epoch=6))
        await until_state(channel, worker_pb2.WORKER_STATE_BUSY)
        await worker_pb2_grpc.WorkerServiceStub(channel).Drain(worker_pb2.DrainRequest(), timeout=3)
        with pytest.raises(UnavailableError, match="the service drains"):
            await work
        await asyncio.sleep(1.5)
        await initialize(channel, layout=LAYOUT, epoch=7)
        assert (await compute(channel, epoch=7)).experience.num_rows == 4


# --- failures -----------------------------------------------------------------------------


async def test_an_error_that_all_ranks_meet_names_one_and_fails_the_service_state(
    service: ServiceProcess,
) -> None:
    async with open_channel(service.address) as channel:
        await initialize(channel, layout=LAYOUT, epoch=8, behaviour="raise")
        with pytest.raises(InternalError, match="the model is broken") as caught:
            await compute(channel, epoch=8)
        assert caught.value.message.count("failed:") == 1
        status = await status_of(channel)
        assert status.state == worker_pb2.WORKER_STATE_FAILED
        assert "the model is broken" in status.failure


async def test_the_error_of_another_rank_names_that_rank_alone(spawn: Any) -> None:
    service = spawn()
    async with open_channel(service.address) as channel:
        await initialize(channel, layout=LAYOUT, failing_rank=1)
        with pytest.raises(InternalError) as caught:
            await compute(channel)
        assert caught.value.message.startswith("toy rank 1 failed: RuntimeError")
        assert caught.value.message.count("toy rank") == 1
        assert caught.value.rank == 1
    assert service.process.wait(END_S) == 1


async def test_a_rank_that_fails_while_others_wait_for_it_ends_the_service(
    spawn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SETTLE_VARIABLE, "1")
    service = spawn()
    ranks = psutil.Process(service.pid).children()
    async with open_channel(service.address) as channel:
        await initialize(channel, layout=LAYOUT, behaviour="meet", failing_rank=1)
        first, second = await asyncio.gather(
            compute(channel), compute(channel, sequence=1), return_exceptions=True
        )
        assert isinstance(first, InternalError)
        assert re.match(r"toy rank 1.*the model is broken", first.message)
        # The call behind it is refused.
        assert isinstance(second, UnavailableError)
        assert second.reason == "RANKS_DIVERGED"
    assert service.process.wait(END_S) == 1
    assert not any(rank.is_running() for rank in ranks)


# --- the end ------------------------------------------------------------------------------


async def test_a_drain_with_exit_at_the_face_ends_every_rank(spawn: Any) -> None:
    service = spawn()
    ranks = psutil.Process(service.pid).children()
    async with open_channel(service.address) as channel:
        await worker_pb2_grpc.WorkerServiceStub(channel).Drain(worker_pb2.DrainRequest(exit=True))
    assert service.process.wait(END_S) == 0
    assert not any(rank.is_running() for rank in ranks)


async def test_work_that_waits_for_its_turn_is_finished_after_sigterm(spawn: Any) -> None:
    service = spawn()
    async with open_channel(service.address) as channel:
        await initialize(channel, layout=LAYOUT, behaviour="slow", seconds=1.5)
        works = [asyncio.create_task(compute(channel, sequence=n)) for n in range(2)]
        await until_state(channel, worker_pb2.WORKER_STATE_BUSY)
        await asyncio.sleep(0.3)
        service.process.send_signal(signal.SIGTERM)
        for result in await asyncio.gather(*works):
            assert result.experience.num_rows == 4
    assert service.process.wait(END_S) == 0


def begin_to_start(
    folder: Path, *flags: str, warm: bool = False
) -> tuple[subprocess.Popen[bytes], Any]:
    """A service whose ranks are being started, and its ranks; warm: those have imported torch."""
    added = warm_processes.services() if warm else {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        service_command("--layout", "dp=2", "--log-directory", str(folder), *flags),
        env={**os.environ, **added, "TMPDIR": str(folder)},
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + START_TIMEOUT_S
    while len(ranks := psutil.Process(warm_processes.forked(process.pid)).children()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process, ranks


def test_an_agent_killed_while_its_ranks_start_leaves_none_behind(tmp_path: Path) -> None:
    # A rank that waits for the others does not drain, and ends once the time for that is over.
    process, ranks = begin_to_start(tmp_path, "--drain-timeout-s", "1", warm=True)
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(ranks, timeout=2 * END_S)
    for rank in alive:
        rank.kill()
    assert not alive


async def test_a_call_that_comes_before_all_ranks_is_refused_and_harms_nothing(
    tmp_path: Path,
) -> None:
    """As of a run that knows the port of a service and does not ask for its health."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings: dict[str, Any] = {"layout": LAYOUT, "rank_store": tmp_path / "ranks"}
    settings |= {"folders": ["/"], "code_roots": ["/"], "role": ToyRole.name}
    ranks = [
        ServiceServer(ToyRole(), ServiceConfig(**settings, rank=0, port=port)),
        ServiceServer(ToyRole(), ServiceConfig(**settings, rank=1)),
    ]
    async with open_channel(f"127.0.0.1:{port}") as channel:
        starting = asyncio.create_task(ranks[0].start())
        await channel.channel_ready()
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        request = worker_pb2.InitializeRequest(key=operation_key("initialize"))
        with pytest.raises(UnavailableError, match="the 2 ranks of the toy have not met") as early:
            await last(worker_pb2_grpc.WorkerServiceStub(channel).Initialize(request))
        assert early.value.reason == "RANKS_STARTING"
        assert not starting.done()
        await asyncio.gather(starting, ranks[1].start())
        try:
            answer = await health.Check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        finally:
            await asyncio.gather(*(rank.stop(work_timeout_s=5.0) for rank in ranks))


def test_sigterm_while_ranks_start_ends_them_and_leaves_no_files(tmp_path: Path) -> None:
    process, ranks = begin_to_start(tmp_path)
    process.terminate()
    assert process.wait(END_S) == 0
    _, alive = psutil.wait_procs(ranks, timeout=1)
    assert not alive
    assert not list(tmp_path.glob("rolemesh-*"))


# Rank 1 waits for rank 0 and heeds no SIGTERM, and torch's launcher kills it after 30 s.
@pytest.mark.slow
def test_a_port_in_use_is_said_once_and_ends_all_ranks(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        process, ranks = begin_to_start(tmp_path, "--port", str(port), warm=True)
        assert process.wait(START_TIMEOUT_S) == 1
    _, alive = psutil.wait_procs(ranks, timeout=1)
    assert not alive
    logs = "".join(log.read_text() for log in tmp_path.glob("toy*.log"))
    assert logs.count(f"port {port} on 127.0.0.1 is in use") == 1
    assert "toy rank 0" in (tmp_path / "toy.log").read_text()
    assert not list(tmp_path.glob("rolemesh-*"))
