"""Says why a test of kernels is skipped, and has the interpreter round as devices do."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
        # What they need is not in the lock of a CPU.
        pytest.skip("kernels run by Triton's interpreter: make test-kernels")
    _round_to_nearest(monkeypatch)


def _round_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter (3.7) cuts float32 off where a device rounds it to bfloat16."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounding(numbers: Any, given: Any, wanted: Any, mode: Any) -> Any:
        if (given, wanted) != (tl.float32, tl.bfloat16):
            return convert(numbers, given, wanted, mode)
        narrow = torch.from_numpy(numbers.copy()).bfloat16().view(torch.uint16)
        return narrow.numpy().reshape(numbers.shape)

    monkeypatch.setattr(interpreter, "_convert_float", rounding)
