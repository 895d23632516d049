"""GPUs of this host that services could use, and GPUs of other hosts by name."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

GPU_BYTES: Mapping[str, int] = {
    "a100-40": 40 * 10**9,
    "a100-80": 80 * 10**9,
    "h100": 80 * 10**9,
    "h200": 141 * 10**9,
    "b200": 180 * 10**9,
    "l40s": 48 * 10**9,
    "rtx4090": 24 * 10**9,
}
"""Memory of a GPU as NVIDIA's data sheets give it, in units of 10^9 bytes; nvidia-smi shows up to 7
percent more. a100-40, a100-80: A100 Tensor Core GPU; h100: H100 SXM; h200: H200 SXM; b200: one of
the eight of a DGX B200, which has 1,440 GB; l40s: L40S; rtx4090: GeForce RTX 4090."""

_TIMEOUT_S = 20.0


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
        return HostGpus(unusable="nvidia-smi fails: `rolemesh doctor` shows how")
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


def _torch_version() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""
