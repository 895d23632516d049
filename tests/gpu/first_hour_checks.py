"""Looks at what is there, and the suite of tests/gpu: parts of the first hour."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import subprocess
import sys
import threading
import xml.etree.ElementTree as ElementTree
from typing import Any

import torch
from first_hour_tools import REPOSITORY, Found, scratch


def devices(found: Found) -> None:
    """What there is, and whether each GPU computes and can be selected by a thread of its own."""
    versions = {}
    for package in ("torch", "vllm", "transformers", "grpcio", "nvidia-ml-py", "triton", "trl"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    found["versions"] = versions
    found["cuda"] = torch.version.cuda
    with contextlib.suppress(RuntimeError, AttributeError):
        found["torch_nccl"] = list(torch.cuda.nccl.version())
    try:
        cupy = importlib.import_module("cupy")
        nccl = importlib.import_module("cupy.cuda.nccl")
        is_there = bool(getattr(nccl, "available", True))
        found["cupy"] = {
            "version": cupy.__version__,
            "nccl": nccl.get_version() if is_there else "libnccl is missing",
        }
    except ImportError as error:
        found["cupy"] = f"cannot be imported: {error}"
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        query = "--query-gpu=name,driver_version,memory.total,compute_mode"
        said = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        found["nvidia_smi"] = said.stdout.strip().splitlines()
    list_of = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        list_of.append(
            {
                "name": properties.name,
                "capability": [properties.major, properties.minor],
                "free_bytes": free,
                "total_bytes": total,
                "peers": [
                    other
                    for other in range(torch.cuda.device_count())
                    if other != index and torch.cuda.can_device_access_peer(index, other)
                ],
                "selected_by_a_thread": _selected_by_a_thread(index),
            }
        )
        found["devices"] = list_of
    assert [one["selected_by_a_thread"] for one in list_of] == list(range(len(list_of)))


def _selected_by_a_thread(index: int) -> int:
    from rolemesh.engine.devices import use_device

    where: list[int] = []

    def compute() -> None:
        use_device(torch.device("cuda", index))
        ones = torch.ones(64, 64, device="cuda")
        assert float((ones @ ones).sum()) == 64.0**3
        where.append(ones.device.index)

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    return where[0] if where else -1


def tests_gpu(found: Found) -> None:
    """The suite of tests/gpu."""
    with scratch() as folder:
        junit = folder / "junit.xml"
        completed = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-o", "addopts=", "--import-mode=importlib"),
                *("-ra", "-q", "-m", "gpu", f"--junitxml={junit}", "tests/gpu"),
            ],
            cwd=REPOSITORY,
            check=False,
        )
        if not junit.exists():
            raise RuntimeError(f"pytest made no report, exit code {completed.returncode}")
        outcomes: dict[str, Any] = {"passed": 0, "failed": {}, "skipped": {}}
        for case in ElementTree.parse(junit).iter("testcase"):
            name = f"{case.get('classname')}::{case.get('name')}"
            bad = [node for kind in ("failure", "error") for node in case.iter(kind)]
            left_out = list(case.iter("skipped"))
            if bad:
                outcomes["failed"][name] = (bad[0].text or bad[0].get("message") or "")[-1500:]
            elif left_out:
                outcomes["skipped"][name] = left_out[0].get("message")
            else:
                outcomes["passed"] += 1
        found["tests"] = outcomes
    if completed.returncode != 0:
        raise RuntimeError(f"{len(outcomes['failed'])} tests failed, or nothing was tested")
