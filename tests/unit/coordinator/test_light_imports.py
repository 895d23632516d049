"""The coordinator holds no tensor: none of its modules brings torch or its kin along."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys

import rolemesh.coordinator

HEAVY = ("torch", "vllm", "transformers", "tensorflow", "tensorboard", "tensorboardX", "cupy")


def test_no_coordinator_module_imports_torch() -> None:
    names = [
        module.name
        for module in pkgutil.walk_packages(rolemesh.coordinator.__path__, "rolemesh.coordinator.")
        # A script that becomes another program.
        if not module.name.endswith(".bound_process")
    ]
    assert "rolemesh.coordinator.run.training_run" in names
    program = (
        "import importlib, json, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    loaded = json.loads(done.stdout.splitlines()[-1])
    assert [name for name in HEAVY if name in loaded] == []
