"""Arithmetic that a process without torch takes from the engine brings no torch along."""

from __future__ import annotations

import json
import subprocess
import sys

PURE = (
    "packing.balance",
    "layout.ranks",
    "layout.manifest",
    "layout.families",
    "layout.boxes",
    "layout.payload",
    "hardware.memory",
    "specs",
    "transfer_protocols",
    "weights.checkpoints.disk_layout",
    "weights.plan",
)
HEAVY = ("torch", "numpy", "vllm", "transformers", "safetensors", "cupy")


def test_pure_modules_import_no_torch() -> None:
    """Each in turn, so that a failure names the module that brought it."""
    program = (
        "import importlib, json, sys\n"
        "brought = {}\n"
        f"for name in {PURE!r}:\n"
        "    importlib.import_module('rolemesh.engine.' + name)\n"
        "    heavy = [module for module in "
        f"{HEAVY!r} if module in sys.modules and module not in sum(brought.values(), [])]\n"
        "    brought[name] = heavy\n"
        "print(json.dumps(brought))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    brought = json.loads(done.stdout.splitlines()[-1])
    assert brought == {name: [] for name in PURE}
