"""What the machine is: versions, names that its torch lacks, threads, plain speeds."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from minutes_tools import IS_REHEARSAL, REPOSITORY, Found, median_s, use_gpu

PACKAGES = (
    *("torch", "transformers", "triton", "cupy-cuda13x", "numpy", "grpcio", "protobuf", "pydantic"),
    *("nvidia-nccl-cu13", "nvidia-cudnn-cu13", "vllm", "trl", "tokenizers", "safetensors"),
)
_THREADS = """
import os, sys
sys.path[:0] = [{support!r}]
from warm_processes import MODULES
import importlib
for module in MODULES["RANKS"]:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError:
        pass
print(len(os.listdir("/proc/self/task")))
"""


def probe(found: Found) -> None:
    """All of it."""
    found["versions"] = versions()
    found["torch_has"] = names_of_torch()
    # An import that starts threads: ranks then begin as a new Python, and not as a fork.
    threads = subprocess.Popen(
        [sys.executable, "-c", _THREADS.format(support=str(REPOSITORY / "tests" / "support"))],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        found["machine"] = {
            "cores": len(os.sched_getaffinity(0)),
            "shm_bytes": _free_bytes("/dev/shm"),
            "tmp_bytes": _free_bytes(os.environ.get("TMPDIR", "/tmp")),
            "kernel": platform.release(),
        }
        if IS_REHEARSAL:
            found.unrehearsed("device", "there is none")
        else:
            found["device"] = device_told()
        product(found)
        copies(found)
        said, _ = threads.communicate(timeout=40)
    finally:
        threads.kill()
        threads.wait()
    found["threads_after_imports"] = int(said)


def versions() -> dict[str, Any]:
    """Of packages, CUDA, cuDNN and NCCL."""
    found: dict[str, Any] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    with contextlib.suppress(RuntimeError, AttributeError):
        found["cudnn_of_torch"] = torch.backends.cudnn.version()
    with contextlib.suppress(RuntimeError, AttributeError):
        found["nccl_of_torch"] = list(torch.cuda.nccl.version())
    try:
        nccl = importlib.import_module("cupy.cuda.nccl")
        is_there = bool(getattr(nccl, "available", True))
        found["nccl_of_cupy"] = nccl.get_version() if is_there else "libnccl is missing"
    except ImportError as error:
        found["nccl_of_cupy"] = f"cannot be imported: {error}"
    return found


def names_of_torch() -> dict[str, bool]:
    """What newer versions of torch have, and our code does without where it is not there."""
    import inspect

    from torch.distributed.fsdp import FSDPModule

    return {
        "FSDPModule.reset_iter_state": hasattr(FSDPModule, "reset_iter_state"),
        "all_gather_single": hasattr(dist, "all_gather_single"),
        "reduce_scatter_single": hasattr(dist, "reduce_scatter_single"),
        "new_group(sort_ranks=)": "sort_ranks" in inspect.signature(dist.new_group).parameters,
        "mm(out_dtype=)": "dtype" in torch.ops.aten.mm.overloads(),
    }


def device_told() -> dict[str, Any]:
    """What the driver says of the GPUs, and that each can be selected by a thread of its own."""
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    told: dict[str, Any] = {
        "name": properties.name,
        "count": torch.cuda.device_count(),
        "capability": [properties.major, properties.minor],
        "multiprocessors": properties.multi_processor_count,
        "free_bytes": free,
        "total_bytes": total,
    }
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        query = "--query-gpu=name,driver_version,memory.total,power.limit,clocks.max.sm"
        said = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
        told["nvidia_smi"] = said.stdout.strip().splitlines()
    return told


def product(found: Found) -> None:
    """A product of matrices in bfloat16, on random numbers: zeros are faster."""
    size, device = 256 if IS_REHEARSAL else 8192, use_gpu()
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    times = 10

    def multiply() -> None:
        for _ in range(times):
            left @ right

    seconds = median_s(multiply) / times
    found["product"] = {"size": size, "tflop_per_s": round(2 * size**3 / seconds / 1e12, 3)}


def copies(found: Found) -> None:
    """GB/s between host and device, by locked memory and by memory that is not."""
    if IS_REHEARSAL:
        found.unrehearsed("copies", "memory can be locked for a GPU alone")
        return
    num_bytes = 1 << 30
    there = torch.empty(num_bytes, dtype=torch.uint8, device=use_gpu())
    rates = {}
    for kind in ("pinned", "pageable"):
        here = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=kind == "pinned")
        for way, target, source in (("to_device", there, here), ("to_host", here, there)):
            seconds = median_s(partial(target.copy_, source))
            rates[f"{kind}_{way}"] = round(num_bytes / seconds / 1e9, 2)
    found["gb_per_s"] = rates


def _free_bytes(folder: str) -> int:
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize
