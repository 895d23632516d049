"""GPUs of this host that services could use, and GPUs of other hosts by name."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rolemesh.coordinator.mapping.machines.devices import DEVICES

GPU_BYTES: Mapping[str, int] = {
    name: device.memory_bytes for name, device in DEVICES.items() if device.kind == "gpu"
}
"""Memory of a GPU as its data sheet gives it, in bytes; nvidia-smi shows up to 7 percent more."""

_TIMEOUT_S = 20.0
_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""What a driver shows of itself, on Linux and in WSL: a container may have no nvidia-smi."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostGpus:
    """The GPUs that services of this host would see."""

    count: int = 0
    name: str = ""
    """Of the first one."""
    bytes_each: int = 0
    """Memory of the smallest one."""
    unusable: str = ""
    """Why GPUs that are there are not among them; empty where there is nothing to say."""
    is_known: bool = True
    """False where nvidia-smi fails, as it may on a host whose GPUs are slow to wake."""


def host_gpus(environment: Mapping[str, str] = os.environ) -> HostGpus:
    """Looks for GPUs with nvidia-smi; finds none where it is missing or fails.

    Args:
        environment: Of this process. CUDA_VISIBLE_DEVICES limits what counts.
    """
    program = shutil.which("nvidia-smi", path=environment.get("PATH"))
    if program is None:
        return HostGpus()
    query = ["--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(
            [program, *query], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        ).stdout
        found = [line.rsplit(",", 1) for line in output.splitlines() if line.strip()]
        sizes = [int(mebibytes) << 20 for _, mebibytes in found]
    except (OSError, subprocess.SubprocessError, ValueError):
        return HostGpus(unusable="nvidia-smi fails: `rolemesh doctor` shows how", is_known=False)
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    count = len(sizes)
    if visible is not None:
        count = min(count, len([one for one in visible.split(",") if one.strip()]))
    if not count:
        hidden = "CUDA_VISIBLE_DEVICES hides them" if sizes else ""
        return HostGpus(unusable=hidden)
    torch = _torch_version()
    if "+cpu" in torch:
        return HostGpus(unusable=f"torch {torch} is built for the CPU: install rolemesh[gpu]")
    return HostGpus(count=count, name=found[0][0].strip(), bytes_each=min(sizes))


def why_no_gpu(gpus: HostGpus) -> str:
    """Why a service that is started on this host would see no GPU; empty if it may see one."""
    if gpus.count or not gpus.is_known:
        return ""
    if gpus.unusable:
        return gpus.unusable
    if any(path.exists() for path in _DRIVERS):
        return ""
    return "there is no nvidia-smi and no driver"


def _torch_version() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""
