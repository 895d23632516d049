"""GPUs that only keep account: who selected which, who asked before, and what lies on them.

`torch.cuda`'s functions are replaced; no tensor can be made on these devices. As with real ones the
current device belongs to a thread, a thread that selected none has the first, and statistics
raise before CUDA has started.
"""

from __future__ import annotations

import sys
import threading
import types
from typing import Any

import pytest
import torch

TOTAL_BYTES = 80 << 30


class FakeCuda:
    """GPUs of a host, as torch shows them.

    Example: `cuda = FakeCuda(monkeypatch, num_devices=2)`; `cuda.selected` afterwards.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, num_devices: int, rank: int | None = None
    ) -> None:
        """Replaces torch's functions for the test; `rank` is what a launcher would have said."""
        self.num_devices = num_devices
        self.selected: dict[str, int] = {}
        """Device by the name of the thread that selected it."""
        self.breaches: list[str] = []
        """What asked for the current device, or started CUDA, on a thread that selected none."""
        self.events: list[str] = []
        """Calls that matter for memory, in order; tests may add their own."""
        self.used_bytes = [0] * num_devices
        """Held by tensors."""
        self.cached_bytes = [0] * num_devices
        """Freed, but kept by torch."""
        self.asked: list[tuple[str, int]] = []
        """(Function, index) of questions about a device."""
        self._local = threading.local()
        self._is_initialized = False
        if rank is not None:
            monkeypatch.setenv("LOCAL_RANK", str(rank))
        for name in (
            *("is_available", "device_count", "is_initialized", "init", "set_device"),
            *("current_device", "empty_cache", "mem_get_info", "get_device_properties"),
            *("get_device_name", "reset_peak_memory_stats", "max_memory_allocated"),
        ):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setitem(sys.modules, "pynvml", self._nvml())

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return self.num_devices

    def is_initialized(self) -> bool:
        return self._is_initialized

    def init(self) -> None:
        if not self._is_initialized:
            self._note_unselected("init")
        self._is_initialized = True

    def set_device(self, device: Any) -> None:
        self._is_initialized = True
        self._local.index = self._index(device)
        self.selected[threading.current_thread().name] = self._local.index

    def current_device(self) -> int:
        self._note_unselected("current_device")
        self._is_initialized = True
        return int(getattr(self._local, "index", 0))

    def empty_cache(self) -> None:
        self.events.append("empty_cache")
        self.cached_bytes = [0] * self.num_devices

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        index = self._asked("mem_get_info", device)
        return TOTAL_BYTES - self.used_bytes[index] - self.cached_bytes[index], TOTAL_BYTES

    def get_device_properties(self, device: Any = None) -> Any:
        index = self._asked("get_device_properties", device)
        return types.SimpleNamespace(uuid=f"uuid-{index}", name=f"fake {index}")

    def get_device_name(self, device: Any = None) -> str:
        return f"fake {self._asked('get_device_name', device)}"

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        index = self._asked("reset_peak_memory_stats", device)
        if not self._is_initialized:
            raise RuntimeError(f"Invalid device argument {index}: did you call init?")

    def max_memory_allocated(self, device: Any = None) -> int:
        return self.used_bytes[self._asked("max_memory_allocated", device)]

    def free(self, index: int, num_bytes: int) -> None:
        """Tensors go; torch keeps their memory."""
        self.used_bytes[index] -= num_bytes
        self.cached_bytes[index] += num_bytes

    def _asked(self, name: str, device: Any) -> int:
        index = self.current_device() if device is None else self._index(device)
        self.asked.append((name, index))
        return index

    def _index(self, device: Any) -> int:
        index = device if isinstance(device, int) else torch.device(device).index
        assert index is not None, "torch wants a device with an index here"
        assert 0 <= index < self.num_devices
        return index

    def _note_unselected(self, what: str) -> None:
        if not hasattr(self._local, "index"):
            self.breaches.append(f"{what} on {threading.current_thread().name}")

    def _nvml(self) -> types.ModuleType:
        module: Any = types.ModuleType("pynvml")
        module.NVMLError = type("NVMLError", (Exception,), {})
        module.nvmlInit = lambda: None
        module.nvmlDeviceGetHandleByUUID = lambda uuid: int(uuid.removeprefix("GPU-uuid-"))
        module.nvmlDeviceGetMemoryInfo = lambda index: types.SimpleNamespace(
            used=self.used_bytes[index], total=TOTAL_BYTES
        )
        module.nvmlDeviceGetUtilizationRates = lambda index: types.SimpleNamespace(gpu=50)
        return module  # type: ignore[no-any-return]
