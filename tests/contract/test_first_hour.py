"""The script of the first hour with GPUs: it ends, and says for each part what became of it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch

GPU = Path(__file__).resolve().parents[1] / "gpu"


@pytest.fixture(scope="module")
def first_hour() -> ModuleType:
    spec = importlib.util.spec_from_file_location("first_hour", GPU / "first_hour.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_runs_to_its_end_and_says_why_each_part_was_skipped(
    first_hour: ModuleType, tmp_path: Path
) -> None:
    if torch.cuda.is_available():
        pytest.skip("here it would measure for an hour")
    completed = subprocess.run(
        [GPU / "first_hour.sh", "--out", tmp_path / "report.json"],
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    report = json.loads(completed.stdout)
    assert json.loads((tmp_path / "report.json").read_text()) == report
    assert list(report["parts"]) == list(first_hour.LIMITS_S)
    for part in report["parts"].values():
        assert part["status"] == "skipped"
        assert part["reason"] == f"torch {torch.__version__} sees no CUDA device"


def test_every_part_that_has_a_limit_exists(first_hour: ModuleType) -> None:
    said = beside_the_parts("import first_hour_parts as p; print(*p.PARTS)")
    assert said.split() == list(first_hour.LIMITS_S)
    assert sum(first_hour.LIMITS_S.values()) <= 3600.0


@pytest.mark.slow
def test_functions_of_ranks_are_found_in_the_processes_of_the_ranks() -> None:
    said = beside_the_parts(
        "from first_hour_ranks import exchanged_weights, given_weights\n"
        "from support import rank_processes\n"
        "print(rank_processes.run_ranks(exchanged_weights, 2, timeout_s=100.0))\n"
        "print(rank_processes.run_ranks(given_weights, 3, 1, timeout_s=100.0))"
    )
    between_ranks, between_services = said.splitlines()[-2:]
    assert between_ranks == "['process memory', 'process memory']"
    assert between_services.count("'transport': 'shared memory'") == 3


@pytest.mark.usefixtures("capfd")
def test_a_kernel_that_does_not_compile_is_one_part_that_failed(
    first_hour: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLEMESH_KERNELS", "of the shell")
    monkeypatch.setattr(first_hour, "HERE", tmp_path)
    monkeypatch.setattr(first_hour, "no_device", lambda: "")
    (tmp_path / "first_hour_parts.py").write_text(
        "import json, os, sys\n"
        "kernels = os.environ['ROLEMESH_KERNELS']\n"
        "open(sys.argv[2], 'w').write(json.dumps({'kernels': kernels}))\n"
        "sys.exit('CompilationError: at 7:4' if kernels == 'triton' else 0)\n"
    )
    names = "update_speed,update_speed_triton,publication"
    assert first_hour.main(["--only", names, "--out", str(tmp_path / "report.json")]) == 1
    parts = json.loads((tmp_path / "report.json").read_text())["parts"]
    assert [part["status"] for part in parts.values()] == ["ok", "failed", "ok"]
    assert [part["found"]["kernels"] for part in parts.values()] == [
        "torch",
        "triton",
        "of the shell",
    ]
    assert parts["update_speed_triton"]["log"] == ["CompilationError: at 7:4"]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (
            "note({'rate': 3}); print('loaded'); raise SystemExit(0)",
            {"status": "ok", "found": {"rate": 3}},
        ),
        (
            "note({'rate': 3, 'skipped': 'vllm is missing'}); raise SystemExit(77)",
            {"status": "skipped", "reason": "vllm is missing", "found": {"rate": 3}},
        ),
        (
            "note({'rate': 3}); print('CUDA error: no kernel image'); raise SystemExit(1)",
            {
                "status": "failed",
                "error": "ended with exit code 1",
                "log": ["CUDA error: no kernel image"],
                "found": {"rate": 3},
            },
        ),
        (
            "import os; os.kill(os.getpid(), 11)",
            {"status": "failed", "error": "ended with exit code -11", "log": [], "found": {}},
        ),
    ],
    ids=["ok", "skipped", "failed", "killed"],
)
def test_a_part_is_reported_as_what_became_of_it(
    first_hour: ModuleType, tmp_path: Path, code: str, expected: dict[str, Any]
) -> None:
    report = first_hour.run_part(part(code), tmp_path, 60.0)
    assert report.pop("seconds") >= 0
    assert report == expected


def test_a_part_that_hangs_is_ended_with_all_that_it_started(
    first_hour: ModuleType, tmp_path: Path
) -> None:
    """Both ignore SIGTERM, as a process in NCCL's hands does."""
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    child = f"{deaf}; import time; time.sleep(600)"
    code = (
        f"{deaf}; import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        "note({'child': child.pid}); time.sleep(600)"
    )
    first_hour.GRACE_S = 1.0
    started = time.monotonic()
    report = first_hour.run_part(part(code), tmp_path, 5.0)
    assert time.monotonic() - started < 60.0
    assert report["status"] == "failed"
    assert report["error"] == "did not end within 5 s"
    deadline = time.monotonic() + 10.0
    while is_alive(report["found"]["child"]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_alive(report["found"]["child"])


def beside_the_parts(code: str) -> str:
    """What a program says whose path is that of the parts."""
    path = ":".join([str(GPU), str(GPU.parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def part(code: str) -> list[str]:
    """A part's command: `note` writes what was found."""
    note = "import json, sys\ndef note(found): open(sys.argv[1], 'w').write(json.dumps(found))\n"
    return [sys.executable, "-c", note + code]
