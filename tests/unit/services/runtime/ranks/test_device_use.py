"""Tests of the use of a rank's device, by clocks and NVMLs of the test's own."""

from __future__ import annotations

import asyncio
import sys
import types
from typing import Any, cast

import psutil
import pytest
import torch
from support.fake_cuda import FakeCuda

from rolemesh.rpc.errors import UnavailableError
from rolemesh.services.runtime.ranks import device_use
from rolemesh.services.runtime.ranks.device_use import SHORTEST_LOOK_S, RankDevice, ServiceDevices
from rolemesh.services.runtime.ranks.face import Face
from rolemesh.v1 import worker_pb2

FOUR_CORES = {0, 1, 2, 3}
# busy travels as float32.
SHARE_TOLERANCE = 1e-6


class Clock:
    """Wall time and processor time that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.cpu_seconds = 100.0, 7.0
        monkeypatch.setattr(device_use.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(device_use.os, "sched_getaffinity", lambda pid: FOUR_CORES)
        monkeypatch.setattr(RankDevice, "_own_cpu_seconds", lambda device: self.cpu_seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_cpu_is_as_busy_as_the_share_of_its_cores_that_the_process_took(clock: Clock) -> None:
    device = RankDevice(3)
    clock.now += 2.0
    clock.cpu_seconds += 6.0
    use = device.look()
    assert (use.rank, use.device) == (3, "cpu")
    assert use.busy == pytest.approx(6.0 / (2.0 * 4), abs=SHARE_TOLERANCE)
    assert 0 < use.memory_bytes <= use.memory_total_bytes == psutil.virtual_memory().total
    # Of the time since that look alone.
    clock.now += 1.0
    assert device.look().busy == 0.0


def test_looks_that_follow_each_other_at_once_give_the_same_answer(clock: Clock) -> None:
    device = RankDevice(0)
    clock.now += 1.0
    clock.cpu_seconds += 1.0
    first = device.look()
    clock.now += SHORTEST_LOOK_S / 2
    clock.cpu_seconds += 5.0
    assert device.look() == first
    # What was not looked at is not lost.
    clock.now += SHORTEST_LOOK_S / 2
    assert device.look().busy == 1.0


class NvmlError(Exception):
    """Stands for pynvml.NVMLError."""


def nvml_with(utilization: Any) -> types.ModuleType:
    module = cast(Any, types.ModuleType("pynvml"))
    module.NVMLError = NvmlError
    module.nvmlInit = lambda: None
    module.nvmlDeviceGetHandleByUUID = {"GPU-uuid-1": "handle"}.__getitem__
    module.nvmlDeviceGetMemoryInfo = lambda handle: types.SimpleNamespace(used=5, total=8)
    module.nvmlDeviceGetUtilizationRates = utilization
    return cast(types.ModuleType, module)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch, num_devices=2, rank=1)
    torch.cuda.set_device(1)


@pytest.mark.usefixtures("cuda")
def test_a_gpu_is_found_by_its_id_and_asked_by_nvml(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = nvml_with(lambda handle: types.SimpleNamespace(gpu=62))
    monkeypatch.setitem(sys.modules, "pynvml", module)
    device = RankDevice(2)
    clock.now += 1.0
    use = device.look()
    assert (use.rank, use.device, use.memory_bytes, use.memory_total_bytes) == (2, "cuda:1", 5, 8)
    assert use.busy == pytest.approx(0.62, abs=SHARE_TOLERANCE)


@pytest.mark.usefixtures("cuda")
def test_where_nvml_cannot_tell_the_process_is_shown(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_supported(handle: str) -> None:
        raise NvmlError("not supported")

    for module in (None, nvml_with(not_supported)):
        monkeypatch.setitem(sys.modules, "pynvml", cast(Any, module))
        device = RankDevice(0)
        clock.now += 1.0
        clock.cpu_seconds += 1.0
        use = device.look()
        assert (use.device, use.busy) == ("cpu", 0.25)


@pytest.mark.usefixtures("cuda")
def test_nvml_that_fails_later_ends_nothing_but_its_numbers(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([types.SimpleNamespace(gpu=62)])

    def utilization(handle: str) -> Any:
        try:
            return next(answers)
        except StopIteration:
            raise NvmlError("GPU is lost") from None

    monkeypatch.setitem(sys.modules, "pynvml", nvml_with(utilization))
    device = RankDevice(0)
    for expected in ("cuda:1", "cpu", "cpu"):
        clock.now += 1.0
        assert device.look().device == expected


class Peers:
    """A face whose other ranks answer when the test lets them."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.error: UnavailableError | None = None
        self.num_asked = 0

    async def tell(self, path: str, request: Any, timeout_s: float | None = None) -> list[Any]:
        self.num_asked += 1
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        use = worker_pb2.DeviceUse(rank=1, device="cpu", busy=0.5)
        return [worker_pb2.GetStatusResponse(devices=[use])]


async def test_a_face_never_waits_for_what_its_ranks_say() -> None:
    devices, peers = ServiceDevices(0), Peers()
    face = cast(Face, peers)
    # Rank 1 computes: it is asked once, and the answer has rank 0 alone.
    for _ in range(3):
        assert [use.rank for use in devices.look(face)] == [0]
        await asyncio.sleep(0)
    assert peers.num_asked == 1
    peers.may_answer.set()
    assert devices._asking is not None
    await devices._asking
    assert [use.rank for use in devices.look(face)] == [0, 1]
    # What it said last stays when it does not answer.
    peers.error = UnavailableError("gone")
    await devices._asking
    assert [use.rank for use in devices.look(face)] == [0, 1]
    await devices._asking
