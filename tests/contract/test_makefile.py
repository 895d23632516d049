"""Tests of what a target of the Makefile does before its own work."""

from __future__ import annotations

import subprocess
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
