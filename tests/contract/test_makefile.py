"""Tests of what a target of the Makefile does before its own work."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("target", "work"),
    [
        ("quickstart", "rolemesh train"),
        ("bench", "tests/benchmarks/step_time.py"),
        ("judge", "rolemesh.quickstart.form_judge"),
    ],
)
def test_targets_that_need_the_quickstarts_model_make_it_first(target: str, work: str) -> None:
    completed = subprocess.run(
        ["make", "--dry-run", target],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    made = completed.stdout.index("rolemesh.quickstart.smollm2 --out .models/SmolLM2")
    assert made < completed.stdout.index(work)


# --- make test-gpu --------------------------------------------------------------------------


def test_gpu_run(python: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "test-gpu", f"GPU_PYTHON={python}"],
        cwd=REPOSITORY,
        env={"PATH": os.environ["PATH"], **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


test_gpu_run.__test__ = False  # type: ignore[attr-defined]


def python_of(folder: Path, text: str) -> Path:
    path = folder / "python3"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_gpu_tests_take_a_machines_own_packages_along(tmp_path: Path) -> None:
    python = python_of(tmp_path, 'echo "$PYTHONPATH $*"')
    said = test_gpu_run(python, PYTHONPATH="/opt/machine").stdout.splitlines()[-1]
    assert said.startswith("src:tests:/opt/machine -m pytest")
    assert test_gpu_run(python).stdout.splitlines()[-1].startswith("src:tests -m pytest")


def test_without_a_device_nothing_is_tested_and_that_is_said(tmp_path: Path) -> None:
    completed = test_gpu_run(python_of(tmp_path, "exit 1"))
    assert completed.returncode == 0
    assert "has no torch that sees a CUDA device: nothing to test" in completed.stdout


@pytest.mark.parametrize("sees_a_device", [True, False])
@pytest.mark.parametrize("runs_one", [True, False])
def test_a_run_that_skipped_everything_fails_where_there_is_a_device(
    tmp_path: Path, sees_a_device: bool, runs_one: bool
) -> None:
    """The real conftest, over a torch that only says whether it sees a device."""
    tests = tmp_path / "gpu"
    tests.mkdir()
    shutil.copy(REPOSITORY / "tests" / "gpu" / "conftest.py", tests)
    (tmp_path / "torch.py").write_text(
        f"class cuda:\n    is_available = staticmethod(lambda: {sees_a_device})\n"
    )
    (tests / "test_it.py").write_text(
        "import pytest\n"
        "def test_skipped():\n    pytest.skip('vLLM is not installed')\n"
        + ("def test_one():\n    pass\n" if runs_one else "")
    )
    completed = subprocess.run(
        [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", str(tests)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert completed.returncode == (1 if sees_a_device and not runs_one else 0), completed.stdout
    assert ("but nothing was tested" in completed.stdout) is (sees_a_device and not runs_one)
