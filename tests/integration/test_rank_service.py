"""A service of several ranks as processes: shared rows, joined answers, and what a fault does."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support.service_calls import initialize, last
from support.services import (
    ServiceProcess,
    assert_same,
    make_experience,
    operation_key,
    serving,
    spawn_service,
)

from rolemesh.engine.experience import Experience
from rolemesh.engine.packing.balance import balanced_partition
from rolemesh.rpc.channel import MeshChannel, open_channel
from rolemesh.rpc.errors import InvalidRequestError, RolemeshError
from rolemesh.rpc.experience.references import rows_of
from rolemesh.v1 import experience_pb2, value_pb2, value_pb2_grpc, worker_pb2, worker_pb2_grpc

LAYOUT = {"tp": 2, "dp": 2}
"""Four ranks; rows are cut in two, and of each part the second tensor slice is a copy."""

END_S = 10.0
"""Within this a service ends after one of its ranks has died or failed."""


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Any]:
    started: list[ServiceProcess] = []

    def begin(*flags: str) -> ServiceProcess:
        started.append(spawn_service(tmp_path, *flags))
        return started[-1]

    yield begin
    for service in started:
        family = ranks_of(service)
        service.end()
        for rank in family:
            if rank.is_running():
                rank.kill()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    started = spawn_service(tmp_path_factory.mktemp("ranks"), "--layout", "tp=2,dp=2")
    yield started
    started.process.send_signal(signal.SIGTERM)
    assert started.process.wait(30) == 0


def ranks_of(service: ServiceProcess) -> list[psutil.Process]:
    """The rank processes, rank 0 first."""
    try:
        children = psutil.Process(service.pid).children()
        return sorted(children, key=lambda child: int(child.environ()["RANK"]))
    except psutil.NoSuchProcess:
        return []


def values(
    channel: MeshChannel, ref: experience_pb2.ExperienceRef | None = None, **key: Any
) -> Any:
    request = value_pb2.ComputeValuesRequest(key=operation_key(**key), experience=ref)
    return last(value_pb2_grpc.ValueServiceStub(channel).ComputeValues(request))


async def test_ranks_share_rows_by_length_and_the_answer_is_in_order(
    service: ServiceProcess,
) -> None:
    batch = make_experience(37, seed=2)
    async with serving() as producer, open_channel(service.address) as channel:
        await initialize(channel, layout=LAYOUT, epoch=2)
        ref = producer.runtime.publish(operation_key(), batch)
        result = await values(channel, ref, epoch=2)
        pulled = await producer.runtime.pull(
            result.experience,
            ["values"],
            Counting(),  # type: ignore[arg-type]
        )
    expected = Experience({"values": batch["tokens"]})
    assert torch.equal(pulled["values"].values, expected["values"].values.float() + 1)
    assert pulled["values"].lengths().tolist() == batch["tokens"].lengths().tolist()
    shards = result.experience.groups[0].shards
    shares = balanced_partition(batch["tokens"].lengths().tolist(), 2)
    assert {(shard.rank, tuple(rows_of(shard))) for shard in shards} == {
        (0, tuple(shares[0])),
        (2, tuple(shares[1])),
    }
    assert len({shard.address for shard in shards}) == 2
    assert result.report.num_tokens == batch.num_tokens
    fetched = sum(result.report.fetched_bytes.values())
    own = [batch.require(["tokens"]).select(torch.tensor(rows)).num_bytes for rows in shares]
    assert fetched == 2 * sum(own), "each slice pulls its part, and no more"


async def test_fewer_rows_than_ranks_leave_ranks_without_rows(service: ServiceProcess) -> None:
    batch = make_experience(1, seed=2)
    async with serving() as producer, open_channel(service.address) as channel:
        await initialize(channel, layout=LAYOUT, epoch=3)
        ref = producer.runtime.publish(operation_key(), batch)
        result = await values(channel, ref, epoch=3)
        pulled = await producer.runtime.pull(
            result.experience,
            ["values"],
            Counting(),  # type: ignore[arg-type]
        )
    assert torch.equal(pulled["values"].values, batch["tokens"].values.float() + 1)
    assert [shard.rank for shard in result.experience.groups[0].shards] == [0]


async def test_ranks_that_produce_rows_each_publish_their_own(service: ServiceProcess) -> None:
    async with serving() as consumer, open_channel(service.address) as channel:
        await initialize(channel, layout=LAYOUT, epoch=4, num_rows=10)
        result = await values(channel, epoch=4)
        pulled = await consumer.runtime.pull(
            result.experience,
            [column.name for column in result.experience.groups[0].columns],
            Counting(),  # type: ignore[arg-type]
        )
    # tp 2 generates as two replicas of one rank each: four ranks, four contiguous chunks.
    assert [shard.rank for shard in result.experience.groups[0].shards] == [0, 1, 2, 3]
    assert_same(pulled, make_experience(10, seed=5))


async def test_a_repeat_of_a_call_gets_the_first_answer_without_new_work(
    service: ServiceProcess,
) -> None:
    async with open_channel(service.address) as channel:
        await initialize(channel, layout=LAYOUT, epoch=5)
        first = await values(channel, epoch=5)
        again = await values(channel, epoch=5)
        later = await values(channel, epoch=5, sequence=1)
    assert first == again
    assert later.experience != first.experience


async def test_calls_side_by_side_reach_all_ranks_in_one_order(service: ServiceProcess) -> None:
    # Ranks that meet in different calls would wait for ever, or mix their rows up.
    import asyncio

    async with open_channel(service.address) as channel:
        await initialize(channel, layout=LAYOUT, epoch=6, behaviour="meet")
        results = await asyncio.gather(*(values(channel, epoch=6, sequence=n) for n in range(8)))
    assert len({shard.experience_id for r in results for shard in r.experience.groups[0].shards})


async def test_what_all_ranks_refuse_alike_does_no_harm(service: ServiceProcess) -> None:
    async with open_channel(service.address) as channel:
        with pytest.raises(InvalidRequestError, match=r"tp=4.* was started for .*tp=2"):
            await initialize(channel, layout={"tp": 4}, epoch=7)
        await initialize(channel, layout=LAYOUT, epoch=8)
        with pytest.raises(InvalidRequestError, match="column 'tokens' is missing"):
            await values(channel, experience_pb2.ExperienceRef(num_rows=1), epoch=8)
        assert (await values(channel, epoch=8, sequence=1)).experience.num_rows == 4


async def test_the_face_says_how_busy_the_devices_of_all_ranks_are(
    service: ServiceProcess,
) -> None:
    async with open_channel(service.address) as channel:
        worker = worker_pb2_grpc.WorkerServiceStub(channel)

        async def devices() -> list[worker_pb2.DeviceUse]:
            return list((await worker.GetStatus(worker_pb2.GetStatusRequest())).devices)

        # The face answers at once, and asks the others for the next time.
        while len(found := await devices()) == 1:  # noqa: ASYNC110 - the service says no event
            await asyncio.sleep(0.05)
    assert [(use.rank, use.device) for use in found] == [(rank, "cpu") for rank in range(4)]
    assert all(use.memory_bytes > 0 for use in found)


async def test_drain_gives_all_ranks_back(service: ServiceProcess) -> None:
    async with open_channel(service.address) as channel:
        await initialize(channel, layout=LAYOUT, epoch=9)
        worker = worker_pb2_grpc.WorkerServiceStub(channel)
        await worker.Drain(worker_pb2.DrainRequest())
        status = await worker.GetStatus(worker_pb2.GetStatusRequest())
        assert status.state == worker_pb2.WORKER_STATE_IDLE
        await initialize(channel, layout=LAYOUT, epoch=10)
        assert (await values(channel, epoch=10)).experience.num_rows == 4


async def test_a_killed_rank_ends_the_service_and_is_named(spawn: Any) -> None:
    service = spawn("--layout", "dp=2")
    family = ranks_of(service)
    async with open_channel(service.address) as channel:
        await initialize(channel, layout={"dp": 2}, behaviour="slow", seconds=60)
        call = value_pb2_grpc.ValueServiceStub(channel).ComputeValues(
            value_pb2.ComputeValuesRequest(key=operation_key())
        )
        messages = aiter(call)
        while (await anext(messages)).progress.stage != "slow":
            pass
        started = time.monotonic()
        os.kill(family[1].pid, signal.SIGKILL)
        with pytest.raises(RolemeshError, match="rank 1"):
            async for _ in messages:
                pass
    # As a shell says it: whoever started the service sees that it did not end by itself.
    assert service.process.wait(END_S) == 128 + signal.SIGKILL
    assert time.monotonic() - started < END_S
    assert not any(rank.is_running() for rank in family)
    assert "toy rank 1" in service.log.read_text()
    assert "was killed by signal 9 (SIGKILL)" in service.log.read_text()


class Counting:
    """The part of Call that pull uses."""

    def phase(self, name: str) -> Any:
        import contextlib

        return contextlib.nullcontext()

    def add_fetched(self, transport: str, num_bytes: int) -> None:
        pass
