"""The suite of tests/gpu, by subjects: each file in one part."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from typing import Any

from minutes_tools import IS_REHEARSAL, REPOSITORY, Found, Skip, needs, scratch


def tests_trainer(found: Found) -> None:
    """Devices, memory and the trainer."""
    run_tests(
        found, "test_devices_cuda", "test_memory_cuda", "test_trainer_cuda", "test_experts_cuda"
    )


def tests_ranks(found: Found) -> None:
    """Transports, exchanges and a trainer of two ranks on one device.

    Each test starts processes that load CUDA: several at once, since cores wait for it.
    """
    files = ("test_transports_cuda", "test_exchange_cuda", "test_trainer_ranks_cuda")
    at_once = min(6, len(os.sched_getaffinity(0)) // 2)
    has_xdist = importlib.util.find_spec("xdist") is not None and at_once > 1
    run_tests(found, *files, flags=("-n", str(at_once)) if has_xdist else ())


def tests_services(found: Found) -> None:
    """Roles as services: a step, sleep, a second run."""
    run_tests(found, "test_services_cuda")


def tests_kernels(found: Found) -> None:
    """Triton's kernels and FlexAttention against their references, over many cases."""
    needs("triton")
    run_tests(found, "test_kernels_cuda", "test_fused_cuda")


def vllm(found: Found) -> None:
    """The sampler vLLM beside a trainer."""
    if importlib.util.find_spec("vllm") is None:
        raise Skip("vLLM is not installed")
    run_tests(found, "test_vllm_cuda")


def run_tests(found: Found, *files: str, flags: tuple[str, ...] = ()) -> None:
    """Runs files of tests/gpu; in a rehearsal it only sees that they can be imported."""
    if IS_REHEARSAL:
        found.unrehearsed("tests", "they compute on a GPU; that they are found was tried")
        flags = ("--collect-only",)
    with scratch() as folder:
        junit = folder / "junit.xml"
        completed = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-o", "addopts=", "--import-mode=importlib"),
                *("-ra", "-q", "-m", "gpu", "--durations=8", "-p", "no:cacheprovider", *flags),
                *(f"--junitxml={junit}", *(f"tests/gpu/{file}.py" for file in files)),
            ],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE if IS_REHEARSAL else None,
            text=True,
            check=False,
        )
        if IS_REHEARSAL:
            print(completed.stdout)
            lines = completed.stdout.splitlines()
            outcomes: dict[str, Any] = {"collected": sum("::" in line for line in lines)}
            is_good = completed.returncode == 0 and outcomes["collected"] > 0
        else:
            if not junit.exists():
                raise RuntimeError(f"pytest made no report, exit code {completed.returncode}")
            outcomes = _outcomes(ElementTree.parse(junit))
            is_good = completed.returncode == 0
        found["tests"] = outcomes
    if not is_good:
        raise RuntimeError(f"{len(outcomes.get('failed', ()))} tests failed, or none was there")


def _outcomes(report: Any) -> dict[str, Any]:
    outcomes: dict[str, Any] = {"passed": 0, "failed": {}, "skipped": {}}
    for case in report.iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        bad = [node for kind in ("failure", "error") for node in case.iter(kind)]
        left_out = list(case.iter("skipped"))
        if bad:
            outcomes["failed"][name] = (bad[0].text or bad[0].get("message") or "")[-1500:]
        elif left_out:
            outcomes["skipped"][name] = left_out[0].get("message")
        else:
            outcomes["passed"] += 1
    return outcomes
