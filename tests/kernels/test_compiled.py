"""Each kernel compiles for a GPU, which needs none: the interpreter runs what no compiler takes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from rolemesh.engine.kernels import choice

TESTS = Path(__file__).parents[1]
KERNELS = {
    *("_partial_sums", "_logit_gradients", "_ppo_loss", "_scan_row"),
    *("_norm", "_norm_backward", "_swiglu", "_swiglu_backward", "_rotate"),
}


def test_every_kernel_compiles_for_an_h100() -> None:
    kept = {"TRITON_INTERPRET", choice.KERNELS_VARIABLE}
    environment = {name: value for name, value in os.environ.items() if name not in kept}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    found = subprocess.run(
        [sys.executable, "-m", "support.compiled_kernels"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    _version, *compiled = found.stdout.split()
    assert {one.partition(":")[0] for one in compiled} == KERNELS
    # Those that are launched anywhere: a kernel that is added is compiled here, too.
    sources = "".join(file.read_text() for file in Path(choice.__file__).parent.glob("*.py"))
    assert set(re.findall(r"^ +(_\w+)\[[(\w]", sources, re.MULTILINE)) == KERNELS
