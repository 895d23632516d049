"""Tests of a service that sleeps, or whose work failed: state, refusals, remedies."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import json_format, struct_pb2
from support.services import ToyRole, operation_key, serving

from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.rpc.channel import MeshChannel, open_channel
from rolemesh.rpc.errors import InternalError, PreconditionError
from rolemesh.services.runtime.calls.role import InitializeResult
from rolemesh.v1 import (
    experience_pb2,
    experience_pb2_grpc,
    value_pb2,
    value_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)


class FragileRole(ToyRole):
    """Fails to initialise after it has taken something, as often as it is told to."""

    def __init__(self, num_failures: int) -> None:
        super().__init__()
        self.num_failures = num_failures
        self.is_loaded = False

    def initialize(
        self, spec: Any, run_seed: int, progress: Any, mesh: RankMesh
    ) -> InitializeResult:
        self.is_loaded = True
        if self.num_failures:
            self.num_failures -= 1
            raise RuntimeError("no memory for the sampler")
        return super().initialize(spec, run_seed, progress, mesh)

    def close(self) -> None:
        self.is_loaded = False
        super().close()


async def initialize(channel: MeshChannel, run_id: str = "run", **spec: Any) -> None:
    request = worker_pb2.InitializeRequest(
        key=operation_key("initialize", run_id=run_id),
        spec=json_format.ParseDict(spec, struct_pb2.Struct()),
    )
    async for _ in worker_pb2_grpc.WorkerServiceStub(channel).Initialize(request):
        pass


async def compute_values(channel: MeshChannel, **key: Any) -> None:
    request = value_pb2.ComputeValuesRequest(key=operation_key(**key))
    async for _ in value_pb2_grpc.ValueServiceStub(channel).ComputeValues(request):
        pass


async def status_of(channel: MeshChannel) -> worker_pb2.GetStatusResponse:
    status: worker_pb2.GetStatusResponse = await worker_pb2_grpc.WorkerServiceStub(
        channel
    ).GetStatus(worker_pb2.GetStatusRequest())
    return status


async def test_an_asleep_service_refuses_work_until_it_is_woken() -> None:
    role = ToyRole()
    async with serving(role) as server, open_channel(server.runtime.address) as channel:
        worker = worker_pb2_grpc.WorkerServiceStub(channel)
        await initialize(channel)
        await worker.Sleep(worker_pb2.SleepRequest(key=operation_key("sleep")))
        with pytest.raises(PreconditionError, match="call Wake first") as caught:
            await compute_values(channel)
        assert (caught.value.reason, role.num_runs) == ("ASLEEP", 0)
        await worker.Wake(worker_pb2.WakeRequest(key=operation_key("wake")))
        await compute_values(channel)
    assert role.num_runs == 1


async def test_a_failed_initialize_frees_what_it_took_and_says_so() -> None:
    role = FragileRole(num_failures=1)
    async with serving(role) as server, open_channel(server.runtime.address) as channel:
        with pytest.raises(InternalError, match="no memory for the sampler"):
            await initialize(channel)
        assert not role.is_loaded
        status = await status_of(channel)
        assert (status.state, status.run_id) == (worker_pb2.WORKER_STATE_FAILED, "")
        assert status.failure.startswith("Initialize failed: RuntimeError: no memory")
        # Another run need not wait, nor know of it.
        await initialize(channel, "other")
        status = await status_of(channel)
    assert (status.state, status.failure) == (worker_pb2.WORKER_STATE_READY, "")


async def test_unforeseen_errors_of_work_are_a_state_until_the_run_is_given_back() -> None:
    async with serving() as server, open_channel(server.runtime.address) as channel:
        await initialize(channel, behaviour="raise")
        with pytest.raises(InternalError):
            await compute_values(channel, step=3)
        status = await status_of(channel)
        assert (status.state, status.run_id) == (worker_pb2.WORKER_STATE_FAILED, "run")
        assert status.failure.startswith("step 3 toy.work failed: RuntimeError: the model is")
        await worker_pb2_grpc.WorkerServiceStub(channel).Drain(worker_pb2.DrainRequest())
        status = await status_of(channel)
    assert (status.state, status.failure) == (worker_pb2.WORKER_STATE_IDLE, "")


async def test_a_run_drains_only_its_own_hold_and_only_by_its_newest_coordinator() -> None:
    async with serving() as server, open_channel(server.runtime.address) as channel:
        worker = worker_pb2_grpc.WorkerServiceStub(channel)
        await initialize(channel)
        await compute_values(channel, epoch=2)
        for run_id, epoch, reason in (("run", 1, "STALE_EPOCH"), ("other", 1, "RUN_MISMATCH")):
            request = worker_pb2.DrainRequest(run_id=run_id, fencing_epoch=epoch)
            with pytest.raises(PreconditionError) as caught:
                await worker.Drain(request)
            assert caught.value.reason == reason
            assert (await status_of(channel)).run_id == "run"
        # A repeat finds the service free, as it wants it.
        for _ in range(2):
            await worker.Drain(worker_pb2.DrainRequest(run_id="run", fencing_epoch=2))
            assert (await status_of(channel)).run_id == ""


async def test_a_stale_coordinator_releases_nothing() -> None:
    async with serving() as server, open_channel(server.runtime.address) as channel:
        stub = experience_pb2_grpc.ExperienceServiceStub(channel)
        await initialize(channel)
        await compute_values(channel, epoch=2)
        with pytest.raises(PreconditionError) as caught:
            await stub.Release(experience_pb2.ReleaseRequest(run_id="run", fencing_epoch=1))
        assert caught.value.reason == "STALE_EPOCH"
        assert server.runtime.store.held_bytes > 0
        await stub.Release(experience_pb2.ReleaseRequest(run_id="run", fencing_epoch=2))
        assert server.runtime.store.held_bytes == 0


async def test_errors_that_were_foreseen_are_no_state() -> None:
    async with serving() as server, open_channel(server.runtime.address) as channel:
        await initialize(channel, behaviour="nan")
        with pytest.raises(PreconditionError):
            await compute_values(channel)
        assert (await status_of(channel)).state == worker_pb2.WORKER_STATE_READY
