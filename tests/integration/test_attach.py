"""Attach: a newer coordinator of a run keeps the service, and nothing that older epochs made."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format, struct_pb2
from support.service_calls import initialize, last, until, values
from support.services import (
    ServiceProcess,
    ToyRole,
    operation_key,
    serving,
    spawn_service,
)

from rolemesh.rpc.channel import MeshChannel, open_channel
from rolemesh.rpc.errors import (
    InternalError,
    InvalidRequestError,
    NotFoundError,
    PreconditionError,
    UnavailableError,
)
from rolemesh.services.runtime.experience.fetch import fetch_rows
from rolemesh.v1 import worker_pb2, worker_pb2_grpc

LAYOUT = {"dp": 2}
END_S = 30.0


async def attach(
    channel: MeshChannel,
    epoch: int = 2,
    *,
    run_id: str = "run",
    run_seed: int = 3,
    sequence: int = 0,
    **spec: Any,
) -> Any:
    request = worker_pb2.AttachRequest(
        key=operation_key("attach", epoch=epoch, run_id=run_id, sequence=sequence),
        spec=json_format.ParseDict(spec, struct_pb2.Struct()),
        run_seed=run_seed,
    )
    return await last(worker_pb2_grpc.WorkerServiceStub(channel).Attach(request))


async def status_of(channel: MeshChannel) -> Any:
    return await worker_pb2_grpc.WorkerServiceStub(channel).GetStatus(worker_pb2.GetStatusRequest())


class KeepingRole(ToyRole):
    """Counts what happens to it."""

    def __init__(self) -> None:
        super().__init__()
        self.num_loads = 0
        self.num_starts = 0

    def initialize(self, *given: Any) -> Any:
        self.num_loads += 1
        return super().initialize(*given)

    def start_over(self) -> None:
        self.num_starts += 1


async def test_an_attached_service_gives_work_up_and_keeps_what_it_loaded() -> None:
    role = KeepingRole()
    spec = {"behaviour": "slow", "seconds": 60.0}
    async with serving(role) as server, open_channel(server.runtime.address) as channel:
        first = await initialize(channel, **spec)
        working = asyncio.create_task(last(values(channel)))
        queued = asyncio.create_task(last(values(channel, sequence=1)))
        await until(lambda: role.num_runs == 1)
        held = await attach(channel, **spec)
        assert held == first
        assert held.facts == {"seed": "3"}
        for given_up in (working, queued):
            with pytest.raises(UnavailableError) as caught:
                await given_up
            assert caught.value.reason == "SERVICE_DRAINING"
        assert (role.num_loads, role.num_starts, role.num_runs) == (1, 1, 1)
        assert not role.is_closed
        assert server.runtime.ledger.running() == []
        assert (await status_of(channel)).state == worker_pb2.WORKER_STATE_READY


async def test_nothing_of_an_older_epoch_is_answered_again() -> None:
    role = ToyRole()
    async with serving(role) as server, open_channel(server.runtime.address) as channel:
        await initialize(channel)
        made = await last(values(channel))
        assert server.runtime.store.held_bytes > 0
        await attach(channel)
        assert server.runtime.store.held_bytes == 0
        assert not server.runtime.ledger.has(("run", 1, 0, "toy.work", 0))
        (shard,) = made.experience.groups[0].shards
        with pytest.raises(NotFoundError):
            await fetch_rows(channel, shard, ["tokens"], range(1), "")
        with pytest.raises(PreconditionError) as caught:
            await last(values(channel))
        assert caught.value.reason == "STALE_EPOCH"
        with pytest.raises(PreconditionError) as caught:
            await attach(channel, epoch=1)
        assert caught.value.reason == "STALE_EPOCH"
        # The same names under the new epoch are other keys.
        anew = await last(values(channel, epoch=2))
        assert anew.experience.groups[0].shards[0].experience_id != shard.experience_id
        assert role.num_runs == 2


async def test_a_repeated_attach_has_one_effect() -> None:
    role = KeepingRole()
    async with serving(role) as server, open_channel(server.runtime.address) as channel:
        await initialize(channel)
        await attach(channel)
        await last(values(channel, epoch=2))
        await attach(channel)
        assert role.num_starts == 1
        assert server.runtime.store.held_bytes > 0
        await attach(channel, epoch=3)
        assert (role.num_starts, server.runtime.store.held_bytes) == (2, 0)


async def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    role = KeepingRole()
    async with serving(role) as server, open_channel(server.runtime.address) as channel:
        with pytest.raises(PreconditionError) as caught:
            await attach(channel)
        assert caught.value.reason == "NOT_INITIALIZED"
        await initialize(channel, epoch=2, num_rows=5)
        await last(values(channel, epoch=2))
        held_bytes = server.runtime.store.held_bytes
        for given, reason in (
            ({"run_id": "other", "num_rows": 5}, "RUN_MISMATCH"),
            ({"num_rows": 6}, "SPEC_CHANGED"),
            ({}, "SPEC_CHANGED"),
            ({"num_rows": 5, "run_seed": 4}, "SPEC_CHANGED"),
        ):
            with pytest.raises(PreconditionError) as caught:
                await attach(channel, epoch=2, **given)
            assert caught.value.reason == reason
        assert "call Initialize" in caught.value.message
        for wrong in ({"colour": 1}, {"num_rows": 5, "run_seed": -1}):
            with pytest.raises(InvalidRequestError) as invalid:
                await attach(channel, epoch=2, **wrong)
            assert invalid.value.reason == "SPEC_INVALID"
        assert (role.num_starts, server.runtime.store.held_bytes) == (0, held_bytes)
        # Whole numbers are doubles on the wire, and defaults may be spelt out.
        await attach(channel, epoch=2, num_rows=5.0, behaviour="sum")
        assert role.num_starts == 1


async def test_what_may_not_be_whole_is_not_kept() -> None:
    async with serving() as server, open_channel(server.runtime.address) as channel:
        await initialize(channel, behaviour="raise")
        with pytest.raises(InternalError):
            await last(values(channel))
        with pytest.raises(PreconditionError, match=r"the model is broken.*call Initialize") as no:
            await attach(channel, behaviour="raise")
        assert no.value.reason == "NOT_WHOLE"
        await initialize(channel, epoch=2)
        await attach(channel, epoch=3)


async def test_a_failed_initialize_leaves_nothing_to_attach_to() -> None:
    class FailingRole(KeepingRole):
        def initialize(self, *given: Any) -> Any:
            super().initialize(*given)
            raise RuntimeError("no memory")

    async with serving(FailingRole()) as server, open_channel(server.runtime.address) as channel:
        with pytest.raises(InternalError):
            await initialize(channel)
        with pytest.raises(PreconditionError) as caught:
            await attach(channel)
        assert caught.value.reason == "NOT_INITIALIZED"


async def test_a_service_that_sleeps_is_attached_and_sleeps_on() -> None:
    async with serving() as server, open_channel(server.runtime.address) as channel:
        worker = worker_pb2_grpc.WorkerServiceStub(channel)
        await initialize(channel)
        await worker.Sleep(worker_pb2.SleepRequest(key=operation_key("sleep")))
        await attach(channel)
        assert (await status_of(channel)).state == worker_pb2.WORKER_STATE_ASLEEP
        await worker.Wake(worker_pb2.WakeRequest(key=operation_key("wake", epoch=2)))
        await last(values(channel, epoch=2))


async def test_an_attach_waits_for_work_that_gives_no_sign() -> None:
    role = KeepingRole()
    spec = {"behaviour": "deaf", "seconds": 1.5}
    async with serving(role) as server, open_channel(server.runtime.address) as channel:
        await initialize(channel, **spec)
        working = asyncio.create_task(last(values(channel)))
        await until(lambda: role.num_runs == 1)
        attaching = asyncio.create_task(attach(channel, **spec))
        await asyncio.sleep(0.5)
        assert not attaching.done()
        assert role.num_starts == 0
        await attaching
        # Deaf work cannot be given up: it ended by itself, and its experience went with it.
        await asyncio.gather(working, return_exceptions=True)
        assert (role.num_starts, server.runtime.store.held_bytes) == (1, 0)


# --- two ranks ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """Outlives every test that uses it: none of them parts its ranks."""
    started = spawn_service(tmp_path_factory.mktemp("ranks"), "--layout", "dp=2")
    yield started
    started.process.send_signal(signal.SIGTERM)
    assert started.process.wait(END_S) == 0


async def until_busy(channel: MeshChannel) -> None:
    async with asyncio.timeout(END_S):
        while (await status_of(channel)).state != worker_pb2.WORKER_STATE_BUSY:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_all_ranks_give_work_up_together_and_work_on(service: ServiceProcess) -> None:
    spec = {"layout": LAYOUT, "behaviour": "slow", "seconds": 60}
    async with open_channel(service.address) as channel:
        await initialize(channel, epoch=2, **spec)
        works = [asyncio.create_task(last(values(channel, epoch=2, sequence=n))) for n in range(2)]
        await until_busy(channel)
        held = await attach(channel, epoch=3, **spec)
        assert held.num_parameters == 3
        for work in works:
            with pytest.raises((UnavailableError, PreconditionError)) as caught:
                await work
            assert caught.value.reason in ("SERVICE_DRAINING", "STALE_EPOCH")
        # Longer than a service stays that has decided to end.
        await asyncio.sleep(1.5)
        quick = {"layout": LAYOUT}
        await initialize(channel, epoch=4, **quick)
        made = await last(values(channel, epoch=4))
        shards = made.experience.groups[0].shards
        assert {shard.rank for shard in shards} == {0, 1}
        await attach(channel, epoch=5, **quick)
        for shard in shards:
            async with open_channel(shard.address) as rank:
                with pytest.raises(NotFoundError):
                    await fetch_rows(rank, shard, ["tokens"], range(1), "")
        assert (await last(values(channel, epoch=5))).experience.num_rows == 4


async def test_ranks_of_which_one_has_ended_its_part_are_attached(tmp_path: Path) -> None:
    spec = {"layout": LAYOUT, "behaviour": "slow", "seconds": 60, "quick_rank": 1}
    service = spawn_service(tmp_path, "--layout", "dp=2")
    try:
        async with open_channel(service.address) as channel:
            await initialize(channel, **spec)
            work = asyncio.create_task(last(values(channel)))
            await until_busy(channel)
            await asyncio.sleep(0.5)
            await attach(channel, **spec)
            with pytest.raises(UnavailableError):
                await work
            # Longer than a service stays that has decided to end.
            await asyncio.sleep(1.5)
            assert (await status_of(channel)).state == worker_pb2.WORKER_STATE_READY
    finally:
        service.end()


async def test_ranks_that_may_not_be_whole_are_not_kept(service: ServiceProcess) -> None:
    async with open_channel(service.address) as channel:
        await initialize(channel, epoch=6, layout=LAYOUT, behaviour="raise")
        with pytest.raises(InternalError):
            await last(values(channel, epoch=6))
        with pytest.raises(PreconditionError) as caught:
            await attach(channel, epoch=7, layout=LAYOUT, behaviour="raise")
        assert caught.value.reason == "NOT_WHOLE"
