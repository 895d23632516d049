"""Compiles Triton's kernels for a GPU that is not there: `python -m support.compiled_kernels`.

Their own launchers are called, on tensors of a CPU; each launch compiles its kernel down to the
machine code of an H100 and computes nothing. Prints the names of the kernels and how often each
was compiled. Not within Triton's interpreter, which compiles nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from typing import Any
from unittest import mock

import torch
import triton
from support.kernel_cases import HEADS, LOSSES, ROWS, estimated, kernels, lost, scored
from support.layer_cases import TYPES, gated, normed, rotated
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

# All of them, before the variable below says that the interpreter computes.
from rolemesh.engine.kernels import (
    choice,
    layers,
    linear_logprobs,
    policy_loss,
    segmented_scan,
)

MODULES = (layers, linear_logprobs, policy_loss, segmented_scan)
H100 = GPUTarget("cuda", 90, 32)
CPU = "cpu"


class NoDriver:
    """What a compilation asks of a driver."""

    def get_current_target(self) -> GPUTarget:
        return H100

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def compiled() -> Counter[str]:
    """Compiles what the launchers of the cases launch, by the kernel's name."""
    found: Counter[str] = Counter()
    run = JITFunction.run

    def compile_alone(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = run(self, *args, **{**kwargs, "warmup": True})
        assert kernel.asm["cubin"], self
        found[self.__name__] += 1
        return kernel

    driver.set_active(NoDriver())
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(JITFunction, "run", compile_alone))
        stack.enter_context(mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}))
        stack.enter_context(kernels("triton"))
        assert choice.triton_serves(torch.device(CPU))
        scored(CPU, **HEADS["ragged on all sides"])
        scored(CPU, num_tokens=37, num_rows=301, width=256, compute_dtype=torch.bfloat16)
        scored(CPU, **HEADS["no loss reads the entropy"])
        for name in ("plain", "dual clip, k1", "capped, k2", "everything, k3"):
            lost(CPU, LOSSES[name], (7, 1, 0, 16, 3))
        lost(CPU, LOSSES["plain"], (7, 1), "no entropy")
        for dtype in (torch.float32, torch.float64):
            estimated(CPU, ROWS, dtype, 0.9, 0.95)
        for types in TYPES.values():
            normed(CPU, "qwen3", (3, 1024), types)
            normed(CPU, "qwen3", (2, 3, 2, 128), types)
            rotated(CPU, "qwen3", (2, 5, 16, 128), types)
        normed(CPU, "llama", (3, 8192), TYPES["bfloat16"])
        for dtype in (torch.float32, torch.bfloat16):
            gated(CPU, "qwen3", 5, dtype)
    return found


if __name__ == "__main__":
    assert not linear_logprobs._WIDENS, "unset TRITON_INTERPRET"
    print(triton.__version__, *(f"{name}:{count}" for name, count in sorted(compiled().items())))
