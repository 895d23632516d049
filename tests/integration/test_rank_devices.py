"""A rank's service on GPUs that only keep account: what it selects, measures and gives back."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from support.fake_cuda import TOTAL_BYTES, FakeCuda
from support.service_calls import initialize, last, values
from support.services import ToyRole, ToySpec, operation_key, serving
from torch import nn

from rolemesh.rpc.channel import open_channel
from rolemesh.rpc.errors import InternalError
from rolemesh.services.runtime.ranks import device_use
from rolemesh.services.runtime.service_server import ServiceStartError
from rolemesh.v1 import experience_pb2, worker_pb2, worker_pb2_grpc

HELD = 3 << 30


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Four GPUs; this process is rank 2."""
    return FakeCuda(monkeypatch, num_devices=4, rank=2)


class GpuRole(ToyRole):
    """Holds memory of its rank's GPU from Initialize to Sleep or to its end."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self.cuda = cuda
        self.worked_on: list[int] = []

    def initialize(self, *arguments: Any) -> Any:
        self.cuda.used_bytes[2] = HELD
        return super().initialize(*arguments)

    def work(self, *arguments: Any) -> Any:
        self.worked_on.append(torch.cuda.current_device())
        return super().work(*arguments)

    def sleep(self) -> int:
        self._drop("sleep")
        return HELD

    def close(self) -> None:
        self._drop("close")
        super().close()

    def _drop(self, event: str) -> None:
        self.cuda.events.append(event)
        self.cuda.free(2, self.cuda.used_bytes[2])


async def test_both_threads_of_a_rank_select_its_gpu_before_anything_asks_for_one(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_use, "SHORTEST_LOOK_S", 0.0)
    role = GpuRole(cuda)
    async with serving(role) as server, open_channel(server.runtime.address) as channel:
        worker = worker_pb2_grpc.WorkerServiceStub(channel)
        loop_thread = threading.current_thread().name
        assert cuda.selected == {loop_thread: 2, "compute": 2}
        told = await worker.GetCapabilities(worker_pb2.GetCapabilitiesRequest())
        await initialize(channel)
        result = await last(values(channel))
        status = await worker.GetStatus(worker_pb2.GetStatusRequest())
    assert list(told.devices) == ["cuda:2 fake 2"]
    assert role.worked_on == [2]
    # Statistics of rank 2's device, which raise before CUDA has started.
    (measured,) = {entry.source for entry in result.report.memory}
    assert measured == experience_pb2.MEMORY_SOURCE_DEVICE
    assert {entry.peak_bytes for entry in result.report.memory} == {HELD}
    assert status.devices[0].device == "cuda:2"
    assert status.devices[0].memory_bytes == HELD
    assert {index for _, index in cuda.asked} == {2}
    assert cuda.breaches == []


async def test_a_rank_without_a_gpu_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch, num_devices=2, rank=2)
    with pytest.raises(ServiceStartError, match="rank 2 has no GPU: the service sees 2"):
        async with serving():
            pass


async def test_sleep_and_the_end_of_a_run_leave_nothing_on_the_gpu(cuda: FakeCuda) -> None:
    async with serving(GpuRole(cuda)) as server, open_channel(server.runtime.address) as channel:
        worker = worker_pb2_grpc.WorkerServiceStub(channel)
        await initialize(channel)
        assert torch.cuda.mem_get_info(2)[0] == TOTAL_BYTES - HELD
        freed = await worker.Sleep(worker_pb2.SleepRequest(key=operation_key("sleep")))
        # What torch kept would be missing to the role that wakes next.
        assert torch.cuda.mem_get_info(2)[0] == TOTAL_BYTES
        assert freed.freed_bytes == HELD
        await initialize(channel, epoch=2)
        assert torch.cuda.mem_get_info(2)[0] == TOTAL_BYTES - HELD
        await worker.Drain(worker_pb2.DrainRequest())
        assert torch.cuda.mem_get_info(2)[0] == TOTAL_BYTES
    pairs = zip(cuda.events, cuda.events[1:], strict=False)
    emptied = [before for before, event in pairs if event == "empty_cache"]
    # The second Initialize of the run drops what the first one made.
    assert emptied == ["sleep", "close", "close"]


class HalfLoaded(ToyRole):
    """Fails after it has made a model, which it holds in a local variable alone."""

    model: weakref.ref[nn.Module]
    was_alive_at_close = True

    def initialize(self, spec: ToySpec, *arguments: Any) -> Any:
        model = nn.Linear(2, 2)
        model.register_forward_pre_hook(lambda module, inputs: model.weight.sum())
        self.model = weakref.ref(model)
        raise RuntimeError("no room for the sampler")


async def test_what_a_failed_initialize_had_made_is_freed_while_its_error_is_told() -> None:
    role = HalfLoaded()
    async with serving(role) as server, open_channel(server.runtime.address) as channel:
        gc.disable()  # The service's own collection frees it, and no other.
        try:
            with pytest.raises(InternalError, match="no room for the sampler"):
                await initialize(channel)
            assert role.model() is None
        finally:
            gc.enable()
