"""Use of a service's devices: of GPUs by NVML, of CPUs by the time that the process took."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import time
from typing import Any

import psutil
import torch

from rolemesh.rpc.errors import RolemeshError
from rolemesh.services.runtime.ranks.device import rank_device
from rolemesh.services.runtime.ranks.face import Face
from rolemesh.v1 import worker_pb2

logger = logging.getLogger(__name__)

SHORTEST_LOOK_S = 0.25
"""Shortest time between two looks; a faster one gives the same answer. Processor time is counted in
ticks of 10 ms."""

PEERS_TIMEOUT_S = 2.0


class RankDevice:
    """The device of this process's rank. Owner: the loop."""

    def __init__(self, rank: int) -> None:
        """Begins to measure.

        Args:
            rank: Rank of this process within its service.
        """
        self._rank = rank
        self._process = psutil.Process()
        # The cores that this process may use, not all that the machine has.
        self._num_cores = len(os.sched_getaffinity(0))
        self._looked_at = time.monotonic()
        self._cpu_seconds = self._own_cpu_seconds()
        self._gpu: _Gpu | None = None
        self._is_gpu_looked_for = False
        self._last = self._of_cpu(0.0)

    def look(self) -> worker_pb2.DeviceUse:
        """Returns how busy the device was since the look before."""
        now = time.monotonic()
        elapsed_s = now - self._looked_at
        if elapsed_s < SHORTEST_LOOK_S:
            return self._last
        self._looked_at = now
        is_cuda_up = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if is_cuda_up and not self._is_gpu_looked_for:
            # Not earlier: the search itself would start CUDA, which takes seconds.
            self._is_gpu_looked_for = True
            self._gpu = _Gpu.of_this_rank()
        seconds = self._own_cpu_seconds()
        spent, self._cpu_seconds = seconds - self._cpu_seconds, seconds
        use = None if self._gpu is None else self._gpu.look(self._rank)
        if use is None:
            # Also after a failure of NVML: measuring a device must not end a run.
            self._gpu = None
            use = self._of_cpu(min(1.0, spent / elapsed_s / self._num_cores))
        self._last = use
        return use

    def _own_cpu_seconds(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def _of_cpu(self, busy: float) -> worker_pb2.DeviceUse:
        return worker_pb2.DeviceUse(
            rank=self._rank,
            device="cpu",
            busy=busy,
            memory_bytes=self._process.memory_info().rss,
            memory_total_bytes=psutil.virtual_memory().total,
        )


class _Gpu:
    """A GPU as NVML knows it."""

    def __init__(self, nvml: Any, handle: Any, name: str) -> None:
        self._nvml = nvml
        self._handle = handle
        self._name = name

    @classmethod
    def of_this_rank(cls) -> _Gpu | None:
        """The rank's GPU; None if NVML is not installed or does not know it."""
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            logger.info("pynvml is not installed: use of the CPU is shown instead of the GPU's")
            return None
        device = rank_device()
        try:
            nvml.nvmlInit()
            # By id, since CUDA_VISIBLE_DEVICES renumbers GPUs for CUDA but not for NVML.
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            return cls(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid), str(device))
        except nvml.NVMLError as error:
            logger.warning("NVML does not know %s: %s", device, error)
            return None

    def look(self, rank: int) -> worker_pb2.DeviceUse | None:
        """Returns its use; None if NVML fails, e.g. for a slice of a GPU, which has no use."""
        try:
            memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
            busy = self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100
        except self._nvml.NVMLError as error:
            logger.warning("NVML cannot tell how busy %s is: %s", self._name, error)
            return None
        return worker_pb2.DeviceUse(
            rank=rank,
            device=self._name,
            busy=busy,
            memory_bytes=memory.used,
            memory_total_bytes=memory.total,
        )


class ServiceDevices:
    """The devices of all ranks of a service, for its face.

    A rank that computes may answer slowly, but the face must answer at once. So the face answers
    with the last known use of the other ranks, and asks them in the background for the next time.
    Owner: the loop.
    """

    def __init__(self, rank: int) -> None:
        self._own = RankDevice(rank)
        self._others: list[worker_pb2.DeviceUse] = []
        self._asking: asyncio.Task[None] | None = None

    def look(self, face: Face | None) -> list[worker_pb2.DeviceUse]:
        """Returns how busy they were, by rank.

        Args:
            face: The face, on rank 0 of several ranks; None on any other rank.
        """
        if face is not None and (self._asking is None or self._asking.done()):
            self._asking = asyncio.create_task(self._ask(face))
        return [self._own.look(), *self._others]

    async def _ask(self, face: Face) -> None:
        request = worker_pb2.GetStatusRequest()
        try:
            answers = await face.tell(request, PEERS_TIMEOUT_S)
        except RolemeshError as error:
            # The next call that needs this rank will report the fault.
            logger.debug("a rank does not say how busy it is: %s", error)
            return
        self._others = [use for answer in answers for use in answer.devices]
