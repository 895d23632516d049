"""Tests of a service that several runs share: each is served as if it had it for itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from google.protobuf import json_format, struct_pb2
from support.service_calls import last, pulled, until, values
from support.services import ToyRole, operation_key, serving

from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.rpc.calls.service_client import ServiceClient
from rolemesh.rpc.channel import MeshChannel, open_channel
from rolemesh.rpc.errors import PreconditionError, UnsupportedError
from rolemesh.services.runtime.service_server import ServiceServer
from rolemesh.v1 import worker_pb2, worker_pb2_grpc


class DrawingRole(ToyRole):
    """Answers with numbers of the process's own generator, which it seeds when it begins."""

    def initialize(self, spec: Any, run_seed: int, *rest: Any) -> Any:
        torch.manual_seed(run_seed)
        return super().initialize(spec, run_seed, *rest)

    def work(self, batch: Experience | None, progress: Any) -> Experience:
        super().work(batch, progress)
        drawn = torch.rand(self.spec.num_rows)
        offsets = torch.arange(self.spec.num_rows + 1)
        return Experience({"values": Column(ColumnKind.SEQUENCE, drawn, offsets)})


async def begin(channel: MeshChannel, run_id: str, seed: int = 1, **spec: Any) -> Any:
    await channel.channel_ready()
    request = worker_pb2.InitializeRequest(
        key=operation_key("initialize", run_id=run_id),
        spec=json_format.ParseDict(spec, struct_pb2.Struct()),
        run_seed=seed,
    )
    return await last(worker_pb2_grpc.WorkerServiceStub(channel).Initialize(request))


async def status(channel: MeshChannel, run_id: str = "") -> worker_pb2.GetStatusResponse:
    stub = worker_pb2_grpc.WorkerServiceStub(channel)
    return await stub.GetStatus(worker_pb2.GetStatusRequest(run_id=run_id))


async def drain(channel: MeshChannel, run_id: str, *, exit: bool = False) -> None:
    request = worker_pb2.DrainRequest(run_id=run_id, fencing_epoch=1, exit=exit)
    await worker_pb2_grpc.WorkerServiceStub(channel).Drain(request)


@pytest.fixture
async def shared() -> AsyncIterator[tuple[ServiceServer, MeshChannel]]:
    async with (
        serving(ToyRole(), ToyRole()) as server,
        open_channel(server.runtime.address) as channel,
    ):
        yield server, channel


async def test_two_runs_have_a_service_and_a_third_one_waits_for_its_turn(
    shared: tuple[ServiceServer, MeshChannel],
) -> None:
    _, channel = shared
    # At once: neither may get the place that the other one is about to take.
    await asyncio.gather(begin(channel, "one", num_rows=2), begin(channel, "two", num_rows=3))
    results = {name: await last(values(channel, run_id=name)) for name in ("one", "two")}
    assert [results[name].experience.num_rows for name in ("one", "two")] == [2, 3]
    async with serving() as consumer:
        for name, result in results.items():
            # By its address and id alone: the peer that pulls names no run.
            batch = await pulled(consumer.runtime, result.experience)
            assert batch.num_rows == result.experience.num_rows
            assert (await status(channel, name)).run_id == name
    assert sorted((await status(channel)).run_ids) == ["one", "two"]
    with pytest.raises(PreconditionError) as caught:
        await begin(channel, "three")
    assert caught.value.reason == "ALREADY_INITIALIZED"

    await drain(channel, "one")
    assert list((await status(channel)).run_ids) == ["two"]
    with pytest.raises(PreconditionError, match="holds no run yet"):
        await last(values(channel, run_id="one", step=1))
    # The run that stays has lost nothing, and the place is free for another one.
    assert await last(values(channel, run_id="two")) == results["two"]
    await begin(channel, "three")
    assert sorted((await status(channel)).run_ids) == ["three", "two"]


async def test_an_epoch_of_one_run_fences_off_nobody_of_another(
    shared: tuple[ServiceServer, MeshChannel],
) -> None:
    _, channel = shared
    await begin(channel, "one")
    await begin(channel, "two")
    await last(values(channel, run_id="one", epoch=5))
    await last(values(channel, run_id="two", epoch=1))
    with pytest.raises(PreconditionError) as caught:
        await last(values(channel, run_id="one", epoch=4))
    assert caught.value.reason == "STALE_EPOCH"


async def test_each_run_draws_what_it_draws_alone() -> None:
    async def drawn(order: list[str]) -> dict[str, list[list[float]]]:
        found: dict[str, list[list[float]]] = {"one": [], "two": []}
        async with (
            serving(DrawingRole(), DrawingRole()) as server,
            open_channel(server.runtime.address) as channel,
        ):
            for seed, name in enumerate(sorted(set(order)), start=1):
                await begin(channel, name, seed)
            for step, name in enumerate(order):
                result = await last(values(channel, run_id=name, step=step))
                batch = await pulled(server.tenants.of(name), result.experience)
                found[name].append(batch["values"].values.tolist())
        return found

    alone = {name: (await drawn([name] * 3))[name] for name in ("one", "two")}
    together = await drawn(["one", "two", "two", "one", "two", "one"])
    # "two" has another seed where it is alone.
    assert together["one"] == alone["one"]
    assert together["two"] != alone["one"]
    assert together["two"] == (await drawn(["one", "two", "two", "two"]))["two"]


async def test_what_concerns_the_process_reaches_all_runs(
    shared: tuple[ServiceServer, MeshChannel],
) -> None:
    server, channel = shared
    await begin(channel, "one", behaviour="slow", seconds=0.5)
    await begin(channel, "two")
    capabilities = await worker_pb2_grpc.WorkerServiceStub(channel).GetCapabilities(
        worker_pb2.GetCapabilitiesRequest()
    )
    assert capabilities.max_runs == 2
    slow = asyncio.create_task(last(values(channel, run_id="one")))
    await until(lambda: bool(server.tenants.of("one").ledger.running()))
    # Of whichever run it comes: what the other one has in progress is finished first.
    await drain(channel, "two", exit=True)
    assert not server.tenants.of("one").ledger.running()
    await slow
    assert server.process.exit_requested.is_set()


async def test_a_shared_service_does_not_sleep_for_one_run(
    shared: tuple[ServiceServer, MeshChannel],
) -> None:
    _, channel = shared
    await begin(channel, "one")
    request = worker_pb2.SleepRequest(key=operation_key("sleep", run_id="one"))
    with pytest.raises(UnsupportedError, match=r"may serve 2 runs.*leave pools\.\*\.sleep out"):
        await worker_pb2_grpc.WorkerServiceStub(channel).Sleep(request)
    assert (await status(channel, "one")).state == worker_pb2.WORKER_STATE_READY


async def test_an_operator_drains_all_runs(shared: tuple[ServiceServer, MeshChannel]) -> None:
    server, channel = shared
    await begin(channel, "one")
    await begin(channel, "two")
    await ServiceClient(channel).drain("", 0)
    assert [runtime.hold.run_id for runtime in server.tenants.runtimes] == ["", ""]
