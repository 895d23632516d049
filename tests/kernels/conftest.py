"""Says why a test of kernels is skipped: what they need is not in the lock of a CPU."""

from __future__ import annotations

import importlib.util
import os

import pytest


@pytest.fixture(autouse=True)
def _interpreter() -> None:
    if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels run by Triton's interpreter: make test-kernels")
